"""30 steps of OptG follow the paper's equations, written here in a straight line."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Flops, Sparsifier, Unstructured
from spartan.methods.optg import OptG
from tests.contract.algorithm_3 import POSITIONS, spread, units
from tests.contract.cases import Net, batch
from tests.methods.following import follow
from tests.methods.test_movement import top_k

T, STEEPNESS = 30, 12.0
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.2, 0.9, 1e-2


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def grown(t: int, steps: int, steepness: float) -> float:
    """The paper's sigmoid around the middle of the run, less what it has at the start, over what it gains."""
    low, high = sigmoid(-steepness / 2), sigmoid(steepness / 2)
    return (sigmoid(steepness * (min(t, steps) / steps - 0.5)) - low) / (high - low)


def reference(model: nn.Module, side: int, cost: dict[str, float], freeze: int) -> list[dict[str, Tensor]]:
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
        if t <= freeze:
            keep = top_k(score, total * (1.0 - SPARSITY * grown(t, freeze, STEEPNESS)), unit_cost)
            mask |= {n: spread(keep[n], theta[n], side) for n in POSITIONS}
        w = {n: (mask[n] * p).requires_grad_() for n, p in theta.items()}
        history.append({n: w[n].detach().clone() for n in POSITIONS})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        if t < freeze:
            for n in POSITIONS:  # SGD with momentum, its learning rate times the sigmoid; pruned units too
                score_momentum[n] = MOMENTUM * score_momentum[n] + units(grads[n] * theta[n], side)
                score[n] = score[n] - LR * grown(t + 1, freeze, STEEPNESS) * score_momentum[n]
        for n, p in theta.items():
            momentum[n] = MOMENTUM * momentum[n] + mask[n] * grads[n] + DECAY * p
            theta[n] = p - LR * momentum[n]
    return history


@pytest.mark.parametrize(
    ("side", "cost", "freeze"),
    [
        pytest.param(1, None, 30, id="unstructured"),
        pytest.param(1, None, 24, id="finetune"),
        pytest.param(2, None, 30, id="block"),
        pytest.param(1, Flops, 30, id="flops"),
        pytest.param(2, Flops, 24, id="block-flops-finetune"),
    ],
)
def test_thirty_steps(side: int, cost: Any, freeze: int) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = reference(copy.deepcopy(model), side, POSITIONS if cost else dict.fromkeys(POSITIONS, 1.0), freeze)
    sparsifier = Sparsifier(
        model,
        SPARSITY,
        T,
        OptG(steepness=STEEPNESS),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64)) if cost else None,
        warmup=freeze / T,
        finetune=1 - freeze / T,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    returned, before = 0, sparsifier.masks()
    for _, masks in follow(model, sparsifier, expected, optimizer):
        returned += sum(int((masks[name] & ~before[name]).sum()) for name in masks)
        before = masks
    assert returned, "scores of pruned units go on learning, so that some come back"


def test_scores_follow_the_rate_of_the_weights_without_decay() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=0.1)
    Sparsifier(model, 0.5, 10, OptG()).attach(optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 0.3]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]


def test_any_optimizers_step_is_scaled_by_the_sigmoid() -> None:
    """Adam ignores the scale of a gradient, so the sigmoid must act on the step itself."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sparsifier = Sparsifier(model, 0.5, 100, OptG(steepness=20)).attach(optimizer)
    scores = []
    for _ in range(40):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scores.append(sparsifier._run.weights.solving[0].state.per_unit["S"])
    assert (scores[0].abs().max() < 1e-6).item()
    for t in (20, 39):  # Adam moves by about its learning rate
        moved = (scores[t] - scores[t - 1]).abs().max().item()
        assert 0.2 < moved / (0.01 * grown(t + 1, 100, 20)) < 3.0


def test_the_default_schedule() -> None:
    ramp = OptG().ramp
    for progress, want in ((0.0, 0.0), (0.4, sigmoid(-10)), (0.5, 0.5), (0.55, sigmoid(5)), (1.0, 1.0), (2.0, 1.0)):
        assert ramp.at(progress) == pytest.approx(want, abs=1e-12)
    assert OptG(steepness=0.1).ramp.at(1.0) == 1.0


def test_equal_scores_keep_what_comes_first() -> None:
    model = nn.Linear(8, 8)
    Sparsifier(model, 0.75, 10, OptG(), warmup=0.0)
    assert (model.weight != 0).sum(1).tolist() == [8, 8, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("steepness", [0.0, -1.0, math.inf, math.nan])
def test_bad_steepness(steepness: float) -> None:
    with pytest.raises(ValueError, match="OptG: steepness"):
        OptG(steepness=steepness)
