"""30 steps of OptG follow the paper's equations, by epochs as in the authors' code, written here in a straight line."""

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

T, EPOCHS, STEEPNESS = 30, 10, 1.2
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.2, 0.9, 1e-2


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def grown(epoch: int, epochs: int, steepness: float) -> float:
    """The paper's sigmoid around the middle of the run, less what it has at the start, over what it gains."""
    low, high = sigmoid(-steepness * epochs / 2), sigmoid(steepness * epochs / 2)
    return (sigmoid(steepness * (min(epoch, epochs) - epochs / 2)) - low) / (high - low)


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
        epoch = t * EPOCHS // freeze
        if t <= freeze and epoch != (t - 1) * EPOCHS // freeze:  # an epoch begins
            keep = top_k(score, total * (1.0 - SPARSITY * grown(epoch, EPOCHS, STEEPNESS)), unit_cost)
            mask |= {n: spread(keep[n], theta[n], side) for n in POSITIONS}
        w = {n: (mask[n] * p).requires_grad_() for n, p in theta.items()}
        history.append({n: w[n].detach().clone() for n in POSITIONS})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        if t < freeze:
            for n in POSITIONS:  # SGD with momentum, its learning rate times the sigmoid; pruned units too
                score_momentum[n] = MOMENTUM * score_momentum[n] + units(grads[n] * theta[n], side)
                score[n] = score[n] - LR * grown(epoch, EPOCHS, STEEPNESS) * score_momentum[n]
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
        OptG(epochs=EPOCHS, steepness=STEEPNESS),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64)) if cost else None,
        warmup=freeze / T,
        finetune=1 - freeze / T,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    returned, changed, before = 0, [], sparsifier.masks()
    for t, masks in follow(model, sparsifier, expected, optimizer):
        returned += sum(int((masks[name] & ~before[name]).sum()) for name in masks)
        if any(not torch.equal(masks[name], before[name]) for name in masks):
            changed.append(t)
        before = masks
    assert returned, "scores of pruned units go on learning, so that some come back"
    assert set(changed) <= {-(-epoch * freeze // EPOCHS) for epoch in range(EPOCHS + 1)}
    assert len(changed) > 5


def test_the_last_epochs_mask_stays_where_the_budget_is_met() -> None:
    """The sigmoid has reached its end long before, and what is trained is what is left: no choice after the last step."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sparsifier = Sparsifier(model, SPARSITY, 300, OptG()).attach(optimizer)
    masks = []
    for t in range(300):
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        masks.append(sparsifier.masks())
    assert any(not torch.equal(masks[296][n], masks[295][n]) for n in POSITIONS), "epoch 99 begins"
    for n in POSITIONS:
        assert torch.equal(masks[299][n], masks[296][n])
        assert torch.equal(masks[299][n], model.get_parameter(n) != 0)
    sparsifier.finalize()


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
    sparsifier = Sparsifier(model, 0.5, 100, OptG(epochs=100, steepness=0.2)).attach(optimizer)
    scores = []
    for _ in range(40):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scores.append(sparsifier._run.weights.solving[0].state.per_unit["S"].clone())
    assert (scores[0].abs().max() < 1e-6).item()
    for t in (20, 39):  # Adam moves by about its learning rate
        moved = (scores[t] - scores[t - 1]).abs().max().item()
        assert 0.2 < moved / (0.01 * grown(t, 100, 0.2)) < 3.0


def test_the_default_schedule() -> None:
    ramp = OptG().ramp
    for progress, want in ((0.0, 0.0), (0.4, sigmoid(-10)), (0.5, 0.5), (0.55, sigmoid(5)), (1.0, 1.0), (2.0, 1.0)):
        assert ramp.at(progress) == pytest.approx(want, abs=1e-12)
    for step in range(3000):  # 30 an epoch
        assert ramp.at(step / 3000) == pytest.approx(sigmoid(step // 30 - 50), abs=1e-12)
    assert OptG(steepness=0.1).ramp.at(1.0) == 1.0
    assert OptG(epochs=1).ramp.at(1.0) == 1.0
    assert OptG(epochs=1).ramp.at(0.99) == 0.0


def test_equal_scores_keep_what_comes_first() -> None:
    model = nn.Linear(8, 8)
    Sparsifier(model, 0.75, 10, OptG(), warmup=0.0)
    assert (model.weight != 0).sum(1).tolist() == [8, 8, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("steepness", [0.0, -1.0, math.inf, math.nan])
def test_bad_steepness(steepness: float) -> None:
    with pytest.raises(ValueError, match="OptG: steepness"):
        OptG(steepness=steepness)


@pytest.mark.parametrize("epochs", [0, -3, 2.5, True])
def test_bad_epochs(epochs: Any) -> None:
    with pytest.raises(ValueError, match="OptG: epochs"):
        OptG(epochs=epochs)
