"""30 steps of movement pruning follow the paper's equations, written here in a straight line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Flops, Sparsifier, Unstructured
from spartan.methods.movement import Movement
from spartan.problem.schedules import linear
from tests.contract.algorithm_3 import POSITIONS, spread, units
from tests.contract.cases import Net, batch
from tests.methods.following import follow

T, W, FREEZE = 30, 15, 24  # steps, warm-up, first step of finetuning
SPARSITY, LR, SCORE_LR, MOMENTUM, DECAY = 0.8, 0.1, 0.5, 0.9, 1e-2


def top_k(score: dict[str, Tensor], k: float, unit_cost: dict[str, float]) -> dict[str, Tensor]:
    """The units of largest score, ties by position, until the next does not fit."""
    order = sorted(
        ((n, i) for n in POSITIONS for i in range(score[n].numel())), key=lambda unit: -float(score[unit[0]][unit[1]])
    )
    keep, left = {n: torch.zeros_like(s) for n, s in score.items()}, k + 1e-9
    for n, i in order:
        left -= unit_cost[n]
        if left < 0:
            break
        keep[n][i] = 1.0
    return keep


def reference(model: nn.Module, side: int, cost: dict[str, float]) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    score = {n: torch.zeros(theta[n].numel() // side**2, dtype=torch.float64) for n in POSITIONS}
    score_momentum = {n: torch.zeros_like(s) for n, s in score.items()}
    unit_cost = {n: cost[n] * side**2 for n in POSITIONS}
    total = sum(cost[n] * theta[n].numel() for n in POSITIONS)
    history, mask = [], {n: torch.ones_like(p) for n, p in theta.items()}
    for t in range(T + 1):
        if t <= FREEZE:
            keep = top_k(score, total * (1.0 - SPARSITY * min(1.0, t / W)), unit_cost)
            mask |= {n: spread(keep[n], theta[n], side) for n in POSITIONS}
        w = {n: (mask[n] * p).requires_grad_() for n, p in theta.items()}
        history.append({n: w[n].detach().clone() for n in POSITIONS})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        if t < FREEZE:
            for n in POSITIONS:  # ∂L/∂S = Σ g·θ, for pruned units too
                score_momentum[n] = MOMENTUM * score_momentum[n] + units(grads[n] * theta[n], side)
                score[n] = score[n] - SCORE_LR * score_momentum[n]
        for n, p in theta.items():
            momentum[n] = MOMENTUM * momentum[n] + mask[n] * grads[n] + DECAY * p
            theta[n] = p - LR * momentum[n]
    return history


@pytest.mark.parametrize(
    ("side", "cost"),
    [
        pytest.param(1, None, id="unstructured"),
        pytest.param(2, None, id="block"),
        pytest.param(1, Flops, id="flops"),
        pytest.param(2, Flops, id="block-flops"),
    ],
)
def test_thirty_steps(side: int, cost: Any) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = reference(copy.deepcopy(model), side, POSITIONS if cost else dict.fromkeys(POSITIONS, 1.0))
    sparsifier = Sparsifier(
        model,
        SPARSITY,
        T,
        Movement(score_lr=SCORE_LR, ramp=linear(0, 1)),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64)) if cost else None,
        budget="global",
        warmup=W / T,
        finetune=0.2,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    returned, before = 0, sparsifier.masks()
    for _, masks in follow(model, sparsifier, expected, optimizer):
        returned += sum(int((masks[name] & ~before[name]).sum()) for name in masks)
        before = masks
    assert returned, "scores of pruned units go on learning, so that some come back"


def test_scores_join_the_optimizer_with_their_own_rate() -> None:
    for score_lr, want in ((1e-2, 1e-2), (None, 0.3)):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=0.1)
        Sparsifier(model, 0.5, 10, Movement(score_lr=score_lr)).attach(optimizer)
        assert [g["lr"] for g in optimizer.param_groups] == [0.3, want]
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]


def test_equal_scores_keep_what_comes_first() -> None:
    model = nn.Linear(8, 8)
    Sparsifier(model, 0.75, 10, Movement(), warmup=0.0)
    assert (model.weight != 0).sum(1).tolist() == [8, 8, 0, 0, 0, 0, 0, 0]


def test_the_papers_schedule() -> None:
    """Dense for a tenth of the run, then a cubic until eight tenths; masks change to the end."""
    torch.manual_seed(0)
    model = nn.Linear(20, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.8, 40, Movement()).attach(optimizer)
    masks = []
    for t in range(40):
        rest = 1.0 if t <= 4 else max(0.0, 1.0 - (t - 4) / 28) ** 3
        assert int((model.weight != 0).sum()) == int(1000 * (1 - 0.8 * (1 - rest)) + 1e-6)
        masks.append(sparsifier.masks()["weight"])
        model(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(masks[33], masks[39])
    sparsifier.finalize()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_rate_of_the_scores_does_not_matter(kind: Any) -> None:
    """They start at zero, and only their order counts."""
    found = []
    for score_lr in (0.25, 4.0):  # powers of two: exactly the same order
        torch.manual_seed(0)
        model = Net().double()
        optimizer = kind(model.parameters(), lr=0.01)
        sparsifier = Sparsifier(model, 0.8, 20, Movement(score_lr=score_lr)).attach(optimizer)
        for t in range(20):
            x, y = batch(t)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(sparsifier.masks())
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_bad_rate() -> None:
    with pytest.raises(ValueError, match="Movement: score_lr=-1"):
        Movement(score_lr=-1.0)
