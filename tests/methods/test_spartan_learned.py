"""30 steps of Spartan with learned values follow the paper's extension, written here in a straight line with autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Flops, Sparsifier, Unstructured, linear
from spartan.methods.spartan_learned import SpartanLearned
from tests.contract.algorithm_3 import POSITIONS, exact, spread, units
from tests.contract.cases import Net, batch
from tests.methods.following import follow

T, W, FREEZE = 30, 9, 24  # steps, warm-up, first step of finetuning
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.1, 0.9, 1e-3


def top_k(phi: Tensor, k: float, c: Tensor) -> Tensor:
    """The units of largest φ, ties by position, until the next does not fit."""
    keep, left = torch.zeros_like(phi), k + 1e-9
    for i in sorted(range(len(phi)), key=lambda i: -float(phi[i])):
        left -= float(c[i])
        if left < 0:
            break
        keep[i] = 1.0
    return keep


def reference(
    model: nn.Module, side: int, cost: dict[str, float], beta_end: float, relative: bool
) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T."""
    names = list(POSITIONS)
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    sizes = [theta[n].numel() // side**2 for n in names]
    c = torch.cat([torch.full((s,), cost[n] * side**2, dtype=torch.float64) for n, s in zip(names, sizes, strict=True)])
    phi = torch.cat([units(theta[n].abs(), side) / side**2 for n in names])
    unit = float(phi.mean()) if relative else 1.0
    phi_momentum = torch.zeros_like(phi)
    history: list[dict[str, Tensor]] = []
    for t in range(T + 1):
        leaves = {n: p.requires_grad_() for n, p in theta.items()}
        phi.requires_grad_()
        if t <= FREEZE:
            k = float(c.sum()) * (1.0 - SPARSITY * min(1.0, t / W))
            keep = top_k(phi.detach(), k, c)
            m = exact(phi * c, k, (1.0 + (beta_end - 1.0) * t / FREEZE) / unit, c)
        if t == FREEZE:
            m = (m * keep).detach()
        w = dict(leaves)
        for n, mask, kept in zip(names, m.split(sizes), keep.split(sizes), strict=True):
            sigma = leaves[n] * spread(mask, leaves[n], side)
            w[n] = sigma + (sigma * spread(kept, leaves[n], side) - sigma).detach() if t < FREEZE else sigma
        history.append({n: w[n].detach().clone() for n in names})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        found = torch.autograd.grad(loss, [*leaves.values(), phi], allow_unused=True)
        grads = dict(zip(leaves, found, strict=False))
        phi = phi.detach()
        if t < FREEZE:
            # While everything is kept the mask is 1 whatever φ is, and its gradient zero.
            phi_momentum = MOMENTUM * phi_momentum + (0.0 if found[-1] is None else found[-1])
            phi = phi - LR * phi_momentum
        for n, p in theta.items():
            momentum[n] = MOMENTUM * momentum[n] + grads[n] + DECAY * p.detach()
            theta[n] = p.detach() - LR * momentum[n]
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
@pytest.mark.parametrize("relative", [True, False])
def test_thirty_steps(side: int, cost: Any, relative: bool) -> None:
    torch.manual_seed(0)
    model = Net().double()
    beta_max = 4.0 if relative else 30.0
    beta_end = beta_max * side  # √(side²)
    table = POSITIONS if cost else dict.fromkeys(POSITIONS, 1.0)
    expected = reference(copy.deepcopy(model), side, table, beta_end, relative)
    sparsifier = Sparsifier(
        model,
        SPARSITY,
        T,
        SpartanLearned(beta=linear(1, beta_max), relative=relative),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64)) if cost else None,
        warmup=W / T,
        finetune=0.2,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    (solver,) = sparsifier._run.weights.solving
    unit = float(solver.state.per_target["scale"][0])
    assert (unit == 1.0) != relative
    phi = solver.state.learned["phi"]
    start = phi.detach().clone()
    for t, _ in follow(model, sparsifier, expected, optimizer):
        if t == FREEZE:
            assert sparsifier.stats.beta == pytest.approx(beta_end / unit)
    moved = (phi.detach() - start).abs().split(solver.problem.units)
    assert all(float(d.max()) > 1e-3 for d in moved), "φ learns"


def test_infinite_sharpness_is_a_hard_mask_of_fixed_values() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 10, SpartanLearned(beta=float("inf")), warmup=0).attach(optimizer)
    first = sparsifier.masks()["weight"]
    for _ in range(10):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.weight != 0, first)


def test_bad_beta() -> None:
    with pytest.raises(ValueError, match="SpartanLearned: beta=-1"):
        SpartanLearned(beta=-1.0)
