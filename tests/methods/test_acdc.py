"""30 steps of AC/DC follow the paper's algorithm, written here in a straight line."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Flops, Sparsifier, Unstructured
from spartan.methods.acdc import ACDC
from spartan.problem.schedules import Moment
from tests.contract.algorithm_3 import POSITIONS, spread, units
from tests.contract.cases import Net, batch
from tests.methods.following import follow

T, SPARSITY, LR, MOMENTUM, DECAY = 30, 0.8, 0.1, 0.9, 1e-2
# First step of each phase: dense, sparse, dense, ... The last dense one is three steps longer than the others.
STARTS = (0, 3, 6, 9, 12, 15, 18, 24)


def top_k(theta: dict[str, Tensor], side: int, cost: dict[str, float]) -> dict[str, Tensor]:
    """The units of largest mean magnitude, one by one, until the next does not fit."""
    u = [(-float(x), n, i) for n in POSITIONS for i, x in enumerate(units(theta[n].abs(), side) / side**2)]
    order = {n: i for i, n in enumerate(POSITIONS)}
    u.sort(key=lambda each: (each[0], order[each[1]], each[2]))
    total = sum(cost[n] * theta[n].numel() for n in POSITIONS)
    keep = {n: torch.zeros(theta[n].numel() // side**2, dtype=torch.float64) for n in POSITIONS}
    left = (1.0 - SPARSITY) * total + 1e-9
    for _, n, i in u:
        left -= cost[n] * side**2
        if left < 0:
            break
        keep[n][i] = 1.0
    return {n: spread(k, theta[n], side) for n, k in keep.items()}


def reference(model: nn.Module, side: int, cost: dict[str, float], reset: bool = True) -> list[dict[str, Tensor]]:
    """θ at every step, from 0 to T: in AC/DC it is what the model holds. With `reset` dense phases begin at rest."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    mask = {n: torch.ones_like(p) for n, p in theta.items()}
    history = []
    for t in range(T + 1):
        if t in STARTS:
            dense = STARTS.index(t) % 2 == 0
            mask |= {n: torch.ones_like(theta[n]) for n in POSITIONS} if dense else top_k(theta, side, cost)
            theta = {n: mask[n] * p for n, p in theta.items()}
            if dense and reset:  # of biases and norms too, as reset_momentum_buffer() does
                momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
        history.append({n: theta[n].clone() for n in POSITIONS})
        leaves = {n: p.requires_grad_() for n, p in theta.items()}
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**leaves, **buffers}, (x,)), y)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for n, p in theta.items():
            momentum[n] = MOMENTUM * momentum[n] + mask[n] * grads[n] + DECAY * p.detach()
            theta[n] = mask[n] * (p.detach() - LR * momentum[n])
    return history


@pytest.mark.parametrize(
    ("side", "cost", "reset"),
    [
        pytest.param(1, None, True, id="unstructured"),
        pytest.param(2, None, True, id="block"),
        pytest.param(1, Flops, True, id="flops"),
        pytest.param(2, Flops, True, id="block-flops"),
        pytest.param(1, None, False, id="momentum-goes-on"),
    ],
)
def test_thirty_steps(side: int, cost: Any, reset: bool) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = reference(copy.deepcopy(model), side, POSITIONS if cost else dict.fromkeys(POSITIONS, 1.0), reset)
    sparsifier = Sparsifier(
        model,
        SPARSITY,
        T,
        ACDC(first_dense=0.1, phase=0.1, last_dense=0.1, reset_momentum=reset),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64)) if cost else None,
        finetune=0.2,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for t, _ in follow(model, sparsifier, expected, optimizer):
        dense = sum(t >= start for start in STARTS) % 2 == 1
        assert (sparsifier.stats.density == 1.0) == dense
        if not dense:
            assert sparsifier.stats.density < 0.35


def test_the_default_phases_are_the_papers() -> None:
    """Of 100 epochs: prune at 10, 20, …, 70 and 85, restore at 15, 25, …, 75."""
    start = Moment.start(1000, ACDC.warmup, ACDC.finetune, seed=0)
    dense = [ACDC().dense_at(Moment(t, 1000, start.warmup_steps, start.freeze_step)) for t in range(1000)]
    changes = [t / 10 for t, (a, b) in enumerate(itertools.pairwise(dense), 1) if a != b]
    assert dense[0]
    assert changes == [10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 85]


@pytest.mark.parametrize("adam", [False, True])
def test_momentum_is_gone_when_a_dense_phase_begins_and_only_then(adam: bool) -> None:
    """Of all that both optimizers train; Adam's second moments stay."""
    torch.manual_seed(0)
    model = Net().double()
    groups: list[Any] = [[model.conv.weight], [p for p in model.parameters() if p is not model.conv.weight]]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(g, lr=0.01) if adam else torch.optim.SGD(g, lr=0.1, momentum=0.9) for g in groups
    ]
    method = ACDC(first_dense=0.25, phase=0.25, last_dense=0.0)
    Sparsifier(model, 0.8, 20, method, finetune=0.25).attach(*optimizers)
    for t in range(20):
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        kept = [state for optimizer in optimizers for state in optimizer.state.values()]
        assert len(kept) == 8
        for state in kept:
            assert state["exp_avg" if adam else "momentum_buffer"].any() == (t != 9)
            assert not adam or state["exp_avg_sq"].any()


def test_pruned_weights_restart_from_zero_with_two_optimizers() -> None:
    """The second optimizer ends a sparse phase with momentum on pruned weights; none of it may reach θ."""
    torch.manual_seed(0)
    model = Net().double()
    groups = [[model.conv.weight], [model.hidden.weight, model.head.weight]]
    optimizers = [torch.optim.SGD(g, lr=0.1, momentum=0.9) for g in groups]
    sparsifier = Sparsifier(model, 0.8, 20, ACDC(first_dense=0.25, phase=0.25, last_dense=0.0), finetune=0.25)
    sparsifier.attach(*optimizers)
    before = sparsifier.masks()
    for t in range(20):
        masks = sparsifier.masks()
        if t == 10:  # 5 to 9 were sparse
            for name, mask in before.items():
                assert torch.equal(model.get_parameter(name) != 0, mask)
            assert sparsifier.stats.density == 1.0
        if 5 < t < 10:
            assert all(torch.equal(mask, before[name]) for name, mask in masks.items()), "fixed within a phase"
        before = masks
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def test_a_run_without_dense_phases_at_its_end_meets_a_grown_budget() -> None:
    model = nn.Linear(20, 20, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = ACDC(first_dense=0.0, phase=1.0, last_dense=0.0)
    sparsifier = Sparsifier(model, 0.9, 20, method, warmup=0.5, finetune=0.5).attach(optimizer)
    for _ in range(20):
        model(torch.randn(4, 20, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()
    assert int((model.weight != 0).sum()) == 40


@pytest.mark.parametrize("name", ["first_dense", "phase", "last_dense"])
def test_bad_fractions(name: str) -> None:
    with pytest.raises(ValueError, match=f"ACDC: {name}=1.5"):
        ACDC(**{name: 1.5})  # type: ignore[arg-type]
