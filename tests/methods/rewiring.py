"""Sparse training with a mask that is rewired, written in a straight line: what RigL and SET are compared with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Sparsifier
from tests.contract.cases import Net, batch

T, END = 40, 31  # steps; from 77% on the mask is fixed
LR, MOMENTUM, DECAY = 0.1, 0.9, 1e-3
NAMES = ["conv.weight", "hidden.weight", "head.weight"]

# Which of the units that are free to grow comes first: (layer, steps taken, gradient for w summed over units) → rank.
Growth = Callable[[int, int, Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """When and how a mask is rewired; steps are counted from 0."""

    updates: Callable[[int], bool] = lambda t: False  # whether with step t
    count: Callable[[int, int], int] = lambda t, kept: 0  # how many of the kept units go with step t
    replaces: bool = False  # whether the update stands in the place of the step, or comes after it
    dense: bool = False  # whether the optimizer sees the gradients of pruned weights too


def cosine_down(fraction: float, t: int, kept: int) -> int:
    """⌊f_t·kept⌋, f_t a cosine to zero where the mask is fixed."""
    return math.floor(0.5 * fraction * (1 + math.cos(math.pi * t / END)) * kept + 1e-9)


def units(x: Tensor, side: int) -> Tensor:
    """Sum over side × side blocks of the matrix, flat."""
    rows, columns = x.shape[0], x[0].numel()
    return x.reshape(rows // side, side, columns // side, side).sum((1, 3)).reshape(-1)


def spread(u: Tensor, like: Tensor, side: int) -> Tensor:
    """One entry per block at all its places."""
    matrix = u.reshape(like.shape[0] // side, like[0].numel() // side)
    return matrix.repeat_interleave(side, 0).repeat_interleave(side, 1).reshape(like.shape)


def reference(
    model: nn.Module, masks: dict[str, Tensor], rule: Rule, growth: Growth, side: int
) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T, from the weights and the masks (per unit) of the start."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    masks = dict(masks)
    history = []
    for t in range(T + 1):
        w = {n: p * spread(masks[n], p, side) if n in masks else p for n, p in theta.items()}
        history.append({n: w[n].clone() for n in NAMES})
        if t == T:
            break
        leaves = {n: p.detach().requires_grad_() for n, p in w.items()}
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**leaves, **buffers}, (x,)), y)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        updates = rule.updates(t)
        for n in theta if not (updates and rule.replaces) else ():
            g = grads[n] * spread(masks[n], grads[n], side) if n in masks and not rule.dense else grads[n]
            momentum[n] = MOMENTUM * momentum[n] + g + DECAY * theta[n]
            theta[n] = theta[n] - LR * momentum[n]
        if not updates:
            continue
        for i, n in enumerate(NAMES):
            old = masks[n].tolist()
            size = units(theta[n].abs(), side).tolist()
            rank = growth(i, t + 1, units(grads[n].abs(), side)).tolist()
            active = [j for j, m in enumerate(old) if m]
            count = rule.count(t, len(active))
            gone = set(sorted(active, key=lambda j: size[j])[:count])
            free = [j for j, m in enumerate(old) if not m or j in gone]
            grown = sorted(free, key=lambda j: -rank[j])[:count]
            new = [1.0 if (m and j not in gone) or j in grown else 0.0 for j, m in enumerate(old)]
            fresh = torch.tensor([1.0 if j in grown and not m else 0.0 for j, m in enumerate(old)])
            assert sum(new) == sum(old)
            for kept in (theta, momentum):
                kept[n] = torch.where(spread(fresh, kept[n], side) == 1, 0.0, kept[n])
            masks[n] = torch.tensor(new, dtype=torch.float64)
    return history


def compare(
    build: Callable[[nn.Module], Sparsifier], rule: Rule, growth: Callable[[int], Growth], side: int, end: int = END
) -> list[dict[str, Tensor]]:
    """Train beside the reference; what the model held at every step. `growth` is given the seed of the run."""
    torch.manual_seed(0)
    model = Net().double()
    straight = copy.deepcopy(model)
    sparsifier = build(model)
    assert sparsifier._run.at.freeze_step == end
    first = {n: units(m.double(), side) / side**2 for n, m in sparsifier.masks().items()}
    expected = reference(straight, first, rule, growth(sparsifier._run.at.seed), side)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    seen = []
    for t in range(T + 1):
        held = {n: model.get_parameter(n).detach().clone() for n in NAMES}
        for n in NAMES:
            torch.testing.assert_close(held[n], expected[t][n], rtol=1e-10, atol=1e-10)
            mask = sparsifier.masks()[n]
            assert not held[n][~mask].any(), "no masked weight is nonzero"
            assert int(mask.sum()) == int(first[n].sum()) * side**2, "the budget is exact"
        seen.append(held)
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen
