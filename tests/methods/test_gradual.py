"""Gradual pruning of a trained model: from the sparsity that it has, never back, with the zeros that it has."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import spartan
from spartan import IMP, NM, Block, Sparsifier, cubic
from spartan.methods.gradual import Gradual
from spartan.methods.powerprop import Powerprop

STEPS = 20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sparsifier: Sparsifier, steps: range) -> list[float]:
    """The density after each step."""
    found = []
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(sparsifier.stats.density)
    return found


def run(model: nn.Module, sparsity: float, **options: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    sparsifier = Sparsifier(model, sparsity, STEPS, "gradual", **options).attach(optimizer)
    found = [sparsifier.stats.density, *train(model, optimizer, sparsifier, range(STEPS))]
    sparsifier.finalize()
    return found


def test_the_schedule_of_zhu_and_gupta() -> None:
    """s_t = s + (s₀ − s)(1 − t/W)³ with W half the run, to the unit."""
    for start in (0.0, 0.4, 0.5):
        model = net() if not start else spartan.prune(net(), start)
        found = run(model, 0.9)
        for t, density in enumerate(found):
            grown = 1 - (1 - min(1.0, t / (STEPS // 2))) ** 3
            assert density * 960 == int(960 * (1 - (start + (0.9 - start) * grown)) + 1e-6)
        assert found[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": "uniform"},
        {"pattern": Block(4, 4)},
        {"pattern": Block(4, 4), "budget": {"0.*": 0.9}},
        {"budget": "erk"},
    ],
    ids=str,
)
def test_no_step_back_and_zeros_stay(options: dict[str, Any]) -> None:
    model = spartan.prune(
        net(), 0.5, **options | ({"budget": "uniform"} if isinstance(options.get("budget"), dict) else {})
    )
    before = [p.detach() == 0 for p in model.parameters()]
    densities = run(model, 0.8, **options)
    assert densities[0] <= 0.7
    assert all(b <= a for a, b in itertools.pairwise(densities))
    for p, zero in zip(model.parameters(), before, strict=True):
        assert not p.detach()[zero].any()
    spartan.verify(model, 0.8, **options)


def test_of_every_m() -> None:
    """Zeros that are not n of every m do not count; those that are, do."""
    options: dict[str, Any] = {"pattern": NM(1, 4)}
    assert run(spartan.prune(net(), 0.5), 0.75, **options)[0] == 1.0
    assert run(spartan.prune(net(), 0.5, pattern=NM(2, 4)), 0.75, **options)[0] == 0.5
    assert run(spartan.prune(net(), 0.75, **options), 0.75, **options) == [0.25] * (STEPS + 1)


def test_a_dense_model_is_pruned_as_by_imp() -> None:
    mine, theirs = net(), net()
    assert run(mine, 0.9)[0] == 1.0
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    sparsifier = Sparsifier(theirs, 0.9, STEPS, IMP(ramp=cubic(0, 1)), warmup=0.5, finetune=0.3).attach(optimizer)
    train(theirs, optimizer, sparsifier, range(STEPS))
    assert all(torch.equal(p, q) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_a_sparser_model_than_asked_for() -> None:
    model = spartan.prune(net(), 0.95)
    zeros = [p.detach() == 0 for p in model.parameters()]
    assert run(model, 0.9)[0] == pytest.approx(0.1)
    assert all(not p.detach()[z].any() for p, z in zip(model.parameters(), zeros, strict=True))


@pytest.mark.parametrize("stop", [0, 3, 12, 17])
def test_resume_is_bit_identical(stop: int) -> None:
    """The state knows where the run began, which the model does not show any more."""
    model = spartan.prune(net(), 0.4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier = Sparsifier(model, 0.9, STEPS, "gradual").attach(optimizer)
    train(model, optimizer, sparsifier, range(stop))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    densities = train(model, optimizer, sparsifier, range(stop, STEPS))
    file.seek(0)
    saved, again = torch.load(file, weights_only=True), net()
    again.load_state_dict(saved[0])
    its_optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    its_sparsifier = Sparsifier(again, 0.9, STEPS, "gradual").attach(its_optimizer)
    its_optimizer.load_state_dict(saved[1])
    assert train(again, its_optimizer, its_sparsifier, range(stop, STEPS)) == densities
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_inside_powerprop() -> None:
    model = spartan.prune(net(), 0.5)
    assert Sparsifier(model, 0.9, STEPS, Powerprop(Gradual())).stats.density == 0.5
