"""Static sparse training: plain training of the weights under a random mask."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spartan import Block, Sparsifier, Unstructured
from spartan.methods import Static  # type: ignore[attr-defined]
from tests.contract.cases import Net, batch
from tests.methods.rewiring import NAMES, Rule, T, compare


@pytest.mark.parametrize("budget", ["erk", "uniform"])
@pytest.mark.parametrize("side", [1, 2])
def test_forty_steps(budget: str, side: int) -> None:
    """The reference, never rewired."""
    pattern = Unstructured() if side == 1 else Block(2, 2)
    seen = compare(
        lambda model: Sparsifier(model, 0.7, T, Static(), pattern=pattern, budget=budget),
        Rule(),
        lambda seed: lambda layer, step, gradient: gradient,
        side,
        end=30,
    )
    assert all(torch.equal(seen[0][n] != 0, w[n] != 0) for w in seen for n in NAMES)


def test_the_mask_comes_from_the_seed() -> None:
    def mask(seed: int) -> torch.Tensor:
        model = nn.Linear(32, 32)
        torch.manual_seed(seed)
        return Sparsifier(model, 0.75, 10, Static()).masks()["weight"]

    assert torch.equal(mask(1), mask(1))
    assert not torch.equal(mask(1), mask(2))
    # About as many in every part: 256 of 1,024, in quarters of 64 ± 4 standard deviations.
    assert all(64 - 28 < int(part.sum()) < 64 + 28 for part in mask(3).split(8))


def test_with_a_warm_up_each_mask_is_part_of_the_one_before() -> None:
    torch.manual_seed(0)
    model = Net().double()
    sparsifier = Sparsifier(model, 0.7, T, Static(), warmup=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.attach(optimizer)
    before = sparsifier.masks()
    assert all(mask.all() for mask in before.values())
    for t in range(T):
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = sparsifier.masks()
        assert not any((now[n] & ~before[n]).any() for n in NAMES)
        assert (t >= T // 2) == all(torch.equal(now[n], before[n]) for n in NAMES)
        before = now
    sparsifier.finalize()
