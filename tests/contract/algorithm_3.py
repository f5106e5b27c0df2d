"""Spartan as the paper writes it, in a straight line with autograd, in float64 and without any code of ours.

Algorithm 3 is the training, Algorithms 4 and 5 the soft top-k mask that it trains by; `exact` and `Sinkhorn` are two ways
to get that mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.contract.cases import batch

T, W, FREEZE = 50, 10, 40  # steps, warm-up, first step of finetuning
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.1, 0.9, 1e-3
POSITIONS = {"conv.weight": 4.0, "hidden.weight": 1.0, "head.weight": 1.0}  # a 2 × 2 output, and one row each
NAMES = list(POSITIONS)
SoftTopK = Callable[[Tensor, float, float, Tensor], Tensor]  # m of v, k, β, c


def exact(v: Tensor, k: float, beta: float, c: Tensor) -> Tensor:
    """m = sigmoid(βv/c + μ): bisection for μ, then one differentiable Newton step, which makes autograd exact.

    Every row has a budget of its own.
    """
    if bool((k >= c.sum(-1) * (1 - 1e-12)).all()):
        return 1.0 + 0.0 * v
    z = beta * v / c
    with torch.no_grad():
        low, high = -z.amax(-1, keepdim=True) - 60.0, -z.amin(-1, keepdim=True) + 60.0
        for _ in range(100):
            mu = 0.5 * (low + high)
            less = (c * torch.sigmoid(z + mu)).sum(-1, keepdim=True) < k
            low, high = torch.where(less, mu, low), torch.where(less, high, mu)
        slope = (c * torch.sigmoid(z + mu) * torch.sigmoid(-z - mu)).sum(-1, keepdim=True)
    f = (c * torch.sigmoid(z + mu)).sum(-1, keepdim=True)
    return torch.sigmoid(z + mu - (f - k) / slope)


class Sinkhorn:
    """Algorithm 4, at most 100 iterations to a tolerance of 0.01, with the gradient of Algorithm 5.

    It starts "cold" from μ₀ = 0, "cached" from the μ that it ended with the last time, or from the "threshold"
    −β|θ_i|/c_i of the last unit that the budget holds (Sec. 4.3).
    """

    def __init__(self, init: str) -> None:
        self.init, self.mu, self.passes = init, 0.0, 0

    def __call__(self, v: Tensor, k: float, beta: float, c: Tensor) -> Tensor:
        """The mask m."""
        z = beta * v / c
        m = self.mask(z.detach(), v.detach(), c, k)
        # The mask of the solution has dm = m(1−m)(dz + dμ) with Σ c dm = 0, and there Σ c m(1−m) = k − Σ c m².
        slope = m * (1 - m)
        moved = slope * (z - (c * slope * z).sum() / (k - (c * m * m).sum()))
        return m + moved - moved.detach()

    def mask(self, z: Tensor, v: Tensor, c: Tensor, k: float) -> Tensor:
        """The iteration."""
        mu = self.start(z, c, k)
        last = torch.ones_like(z)
        for self.passes in range(1, 101):
            nu = c.log() - torch.log(1 + torch.exp(z + mu))
            mu = math.log(k) - math.log(float(torch.exp(z + nu).sum()))
            m = torch.exp(z + mu + nu - c.log())
            done = abs(float(v @ (m - last))) < 0.01 * abs(float(v @ last))
            last = m
            if done:
                break
        self.mu = mu
        return last

    def start(self, z: Tensor, c: Tensor, k: float) -> float:
        """μ₀."""
        if self.init == "threshold":
            return -float(z[hard(z, k, c) == 1].min())
        return self.mu if self.init == "cached" else 0.0


def hard(u: Tensor, k: float, c: Tensor) -> Tensor:
    """1 for the units of largest u that fit the budget, in their order; 0 for the others."""
    rank = u.tolist()
    keep, spent = torch.zeros_like(u), 0.0
    for i in sorted(range(len(rank)), key=lambda i: (-rank[i], i)):
        if spent + float(c[i]) > k + 1e-9:
            break
        spent += float(c[i])
        keep[i] = 1.0
    return keep


def units(x: Tensor, side: int) -> Tensor:
    """Sum over side × side blocks of the matrix, flat."""
    rows, columns = x.shape[0], x[0].numel()
    return x.reshape(rows // side, side, columns // side, side).sum((1, 3)).reshape(-1)


def spread(u: Tensor, like: Tensor, side: int) -> Tensor:
    """The reverse: each unit's entry at all its places."""
    rows, columns = like.shape[0], like[0].numel()
    wide = u.reshape(rows // side, columns // side).repeat_interleave(side, 0).repeat_interleave(side, 1)
    return wide.reshape(like.shape)


def reference(
    model: nn.Module,
    soft: SoftTopK,
    side: int,
    cost: Mapping[str, float],
    power: float,
    beta_end: float,
    project: bool = True,
) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T.

    Without the projection, the ablation of Sec. 4.2, finetuning begins with a hard mask.
    """
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    sizes = [theta[n].numel() // side**2 for n in NAMES]
    prices = zip(NAMES, sizes, strict=True)
    c = torch.cat([torch.full((size,), cost[n] * side**2, dtype=torch.float64) for n, size in prices])
    history, frozen = [], None
    for t in range(T + 1):
        leaves = {n: p.requires_grad_() for n, p in theta.items()}
        k = float(c.sum()) * (1.0 - SPARSITY * min(1.0, t / W))
        beta = 1.0 + (beta_end - 1.0) * min(1.0, t / FREEZE)
        if frozen is None:
            v = torch.cat([units(cost[n] ** power * leaves[n].abs(), side) for n in NAMES])
            m, keep = soft(v, k, beta, c), hard(v.detach() / c, k, c)
            if t >= FREEZE:
                frozen = (m * keep).detach() if project else keep
        w = dict(leaves)
        masks = (m if frozen is None else frozen).split(sizes)
        for n, mask, kept in zip(NAMES, masks, keep.split(sizes), strict=True):
            w[n] = leaves[n] * spread(mask, leaves[n], side)
            if project and frozen is None:  # straight through
                w[n] = w[n] + (w[n] * spread(kept, leaves[n], side) - w[n]).detach()
        history.append({n: w[n].detach().clone() for n in NAMES})
        if t == T:
            break
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        with torch.no_grad():
            for n in theta:
                momentum[n] = MOMENTUM * momentum[n] + grads[n] + DECAY * theta[n]
                theta[n] = theta[n].detach() - LR * momentum[n]
    return history
