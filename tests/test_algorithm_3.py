"""50 steps of Spartan follow Algorithm 3 of the paper, written here in a straight line with autograd."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Flops, Sparsifier, Spartan, Unstructured, linear
from tests.contract.cases import Net, batch

T, W, FREEZE = 50, 10, 40  # steps, warm-up, first step of finetuning
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.1, 0.9, 1e-3
POSITIONS = {"conv.weight": 4.0, "hidden.weight": 1.0, "head.weight": 1.0}  # a 2 × 2 output, and one row each


def soft_topk(v: Tensor, k: float, beta: float, c: Tensor) -> Tensor:
    """m = sigmoid(βv/c + μ): bisection for μ, then one differentiable Newton step, which makes autograd exact."""
    if k >= float(c.sum()) * (1 - 1e-12):
        return torch.ones_like(v)
    z = beta * v / c
    with torch.no_grad():
        low, high = -float(z.max()) - 60.0, -float(z.min()) + 60.0
        for _ in range(200):
            mid = 0.5 * (low + high)
            low, high = (mid, high) if float((c * torch.sigmoid(z + mid)).sum()) < k else (low, mid)
        mu = 0.5 * (low + high)
        slope = (c * torch.sigmoid(z + mu) * torch.sigmoid(-z - mu)).sum()
    f = (c * torch.sigmoid(z + mu)).sum()
    return torch.sigmoid(z + mu - (f - k) / slope)


def units(x: Tensor, side: int) -> Tensor:
    """Sum over side × side blocks of the matrix, flat."""
    rows, columns = x.shape[0], x[0].numel()
    return x.reshape(rows // side, side, columns // side, side).sum((1, 3)).reshape(-1)


def spread(u: Tensor, like: Tensor, side: int) -> Tensor:
    rows, columns = like.shape[0], like[0].numel()
    return (
        u.reshape(rows // side, columns // side)
        .repeat_interleave(side, 0)
        .repeat_interleave(side, 1)
        .reshape(like.shape)
    )


def reference(
    model: nn.Module, side: int, cost: dict[str, float], power: float, beta_end: float
) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T."""
    names = list(POSITIONS)
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    c = torch.cat([torch.full((theta[n].numel() // side**2,), cost[n] * side**2, dtype=torch.float64) for n in names])
    history, frozen = [], None
    for t in range(T + 1):
        leaves = {n: p.requires_grad_() for n, p in theta.items()}
        k = float(c.sum()) * (1.0 - SPARSITY * min(1.0, t / W))
        beta = 1.0 + (beta_end - 1.0) * min(1.0, t / FREEZE)
        if frozen is None:
            v = torch.cat([units(cost[n] ** power * leaves[n].abs(), side) for n in names])
            m = soft_topk(v, k, beta, c)
            rank = (v.detach() / c).tolist()
            order = sorted(range(len(rank)), key=lambda i: (-rank[i], i))
            keep, spent = torch.zeros_like(v), 0.0
            for i in order:
                if spent + float(c[i]) > k + 1e-9:
                    break
                spent += float(c[i])
                keep[i] = 1.0
            if t >= FREEZE:
                frozen = (m * keep).detach()
        sizes = [theta[n].numel() // side**2 for n in names]
        w = dict(leaves)
        masks = m.split(sizes) if frozen is None else frozen.split(sizes)
        for n, mask, kept in zip(names, masks, keep.split(sizes), strict=True):
            sigma = leaves[n] * spread(mask, leaves[n], side)
            projected = sigma * spread(kept, leaves[n], side)
            w[n] = sigma + (projected - sigma).detach() if frozen is None else projected
        history.append({n: w[n].detach().clone() for n in names})
        if t == T:
            return history
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        with torch.no_grad():
            for n in theta:
                g = grads[n] + DECAY * theta[n]
                momentum[n] = MOMENTUM * momentum[n] + g
                theta[n] = theta[n].detach() - LR * momentum[n]
    return history


@pytest.mark.parametrize(
    ("side", "cost", "power"),
    [
        pytest.param(1, None, 1.0, id="unstructured"),
        pytest.param(2, None, 1.0, id="block"),
        pytest.param(1, Flops, 1.0, id="flops-v1"),
        pytest.param(1, Flops, 0.5, id="flops-v0.5"),
        pytest.param(2, Flops, 0.5, id="block-flops"),
    ],
)
def test_fifty_steps(side: int, cost: Any, power: float) -> None:
    torch.manual_seed(0)
    model = Net().double()
    straight = copy.deepcopy(model)
    beta_end = 30.0 * math.sqrt(side**2)  # blocks scale the end of β by √(h·w)
    table = POSITIONS if cost else dict.fromkeys(POSITIONS, 1.0)
    expected = reference(straight, side, table, power, beta_end)
    sparsifier = Sparsifier(
        model,
        SPARSITY,
        T,
        Spartan(beta=linear(1, 30)),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64), value_power=power) if cost else None,
        warmup=0.2,
        finetune=0.2,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    for t in range(T + 1):
        for name, w in expected[t].items():
            torch.testing.assert_close(
                model.get_parameter(name).detach(), w, rtol=0, atol=1e-10, msg=f"step {t}, {name}"
            )
        if t == FREEZE:
            assert sparsifier.stats.beta == pytest.approx(beta_end)
            assert sparsifier.stats.phase == "finetune"
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
