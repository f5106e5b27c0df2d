"""SR-STE against its update rule in a straight line."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import NM, Sparsifier, TopKAST, Unstructured
from spartan.methods.srste import SRSTE
from tests.contract.cases import Net, batch
from tests.methods.following import follow

T, LR, MOMENTUM, DECAY = 30, 0.1, 0.9, 1e-3
NAMES = ("conv.weight", "hidden.weight", "head.weight")


def of_each_two(theta: dict[str, Tensor]) -> dict[str, Tensor]:
    """The larger of every two neighbours along the input channels."""
    found = {}
    for name, x in theta.items():
        if name in NAMES:
            last = x.abs().movedim(1, -1)
            pairs = last.reshape(-1, 2)
            kept = (pairs == pairs.max(1, keepdim=True).values).reshape(last.shape)
            found[name] = kept.movedim(-1, 1).double()
    return found


def of_all(theta: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest 30% of all weights."""
    ranked = torch.cat([theta[n].abs().flatten() for n in NAMES]).sort(descending=True).values
    edge = ranked[int(0.3 * len(ranked)) - 1]
    return {n: (theta[n].abs() >= edge).double() for n in NAMES}


def reference(model: nn.Module, choose: Any, lam: float) -> list[dict[str, Tensor]]:
    """w at every step: W ← W − γ(g(W̃) + λ(Ē ⊙ W)), with the optimizer's momentum and weight decay around it."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    velocity = {n: torch.zeros_like(p) for n, p in theta.items()}
    history = []
    for t in range(T + 1):
        mask = choose(theta)
        w = {n: (p * mask[n] if n in NAMES else p.clone()).requires_grad_() for n, p in theta.items()}
        history.append({n: w[n].detach().clone() for n in NAMES})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        for n, g in zip(w, torch.autograd.grad(loss, list(w.values())), strict=True):
            if n in NAMES:
                g = g + lam * (1 - mask[n]) * theta[n]
            velocity[n] = MOMENTUM * velocity[n] + g + DECAY * theta[n]
            theta[n] = theta[n] - LR * velocity[n]
    return history


@pytest.mark.parametrize("lam", [2e-4, 0.05])
@pytest.mark.parametrize(
    ("pattern", "sparsity", "choose"), [(NM(1, 2), 0.5, of_each_two), (Unstructured(), 0.7, of_all)], ids=["nm", "all"]
)
def test_thirty_steps(pattern: Any, sparsity: float, choose: Any, lam: float) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = reference(copy.deepcopy(model), choose, lam)
    sparsifier = Sparsifier(model, sparsity, T + 1, SRSTE(decay=lam), pattern=pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for _ in follow(model, sparsifier, expected, optimizer, zeros=True):
        pass
    sparsifier.finalize()


def trained(method: Any, **options: Any) -> tuple[list[Tensor], int]:
    """The weights after a run, and how many mask entries changed in it."""
    torch.manual_seed(0)
    model = Net().double()
    sparsifier = Sparsifier(model, 0.5, 40, method, pattern=NM(1, 2), warmup=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    sparsifier.attach(optimizer)
    changes, before = 0, sparsifier.masks()
    for t in range(40):
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = sparsifier.masks()
        changes += sum(int((after[n] ^ before[n]).sum()) for n in after)
        before = after
    return [p.detach() for p in model.parameters()], changes


def test_without_decay_it_is_topkast() -> None:
    for a, b in zip(trained(SRSTE(decay=0.0))[0], trained(TopKAST(), finetune=0)[0], strict=True):
        assert torch.equal(a, b)


def test_decay_settles_the_masks() -> None:
    free, held = trained(SRSTE(decay=0.0))[1], trained(SRSTE(decay=0.5))[1]
    assert held < free


def test_it_is_added_once_however_gradients_are_accumulated() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sparsifier = Sparsifier(model, 0.5, 10, SRSTE(decay=0.5), pattern=NM(1, 2)).attach(optimizer)
    theta = {name: state["theta"].clone() for name, state in sparsifier.state_dict()["weights"].items()}
    for half in (0, 1):
        x, y = batch(half)
        nn.functional.cross_entropy(model(x), y).backward()
    plain = {n: model.get_parameter(n).grad.clone() for n in NAMES}  # type: ignore[union-attr]
    sparsifier.backward()
    sparsifier.backward()
    masks = sparsifier.masks()
    optimizer.step()
    after = {name: state["theta"].clone() for name, state in sparsifier.state_dict()["weights"].items()}
    for name, mask in masks.items():
        want = plain[name] + torch.where(mask, 0.0, 0.5 * theta[name])
        grad = model.get_parameter(name).grad
        assert grad is not None
        torch.testing.assert_close(grad, want)
        torch.testing.assert_close(after[name], theta[name] - LR * want)
    optimizer.step()  # the same gradient again, with the decay that is in it
    again = {name: state["theta"] for name, state in sparsifier.state_dict()["weights"].items()}
    for name in masks:
        torch.testing.assert_close(again[name], after[name] - LR * model.get_parameter(name).grad)  # type: ignore[operator]


def test_a_finetune_phase_fixes_the_mask() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sparsifier = Sparsifier(model, 0.5, 10, SRSTE(), pattern=NM(1, 2), finetune=0.5).attach(optimizer)
    for t in range(10):
        if t == 5:
            fixed = sparsifier.masks()
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(mask, fixed[name]) for name, mask in sparsifier.masks().items())


@pytest.mark.parametrize("decay", [-1e-4, math.nan, math.inf])
def test_bad_decay(decay: float) -> None:
    with pytest.raises(ValueError, match="SRSTE: decay=.* is not a decay"):
        SRSTE(decay=decay)
