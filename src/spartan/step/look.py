"""Tells what is kept, and by which masks, without changing anything."""

from typing import Any

import torch
from torch import Tensor

from spartan.distributed import like
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment
from spartan.solvers.frozen import FrozenSolver
from spartan.step.weights import Weights


def solutions(weights: Weights) -> list[tuple[float, dict[str, Any] | None, dict[str, Any] | None]]:
    """k, the selection and the dual of every segment, as plain numbers."""
    found = []
    for part in weights.parts:
        chosen = part.chosen if isinstance(part, FrozenSolver) else part.solution()
        pairs = (chosen[name] or [None] * len(part.k) for name in ("a", "dual"))
        found += list(zip(part.k, *pairs, strict=True))
    return found


def path(weights: Weights, at: Moment) -> str:
    """What does the work, and why."""
    if weights.method.identity:
        return "nothing to do"
    found = [part.path(form) for part, form in weights.each(at)]
    if len(set(found)) == 1:
        return found[0]
    sizes, every = [len(part.problem.targets) for part in weights.parts], len(weights.problem.targets)
    return "; ".join(f"{path}: {n} of {every} tensors" for path, n in zip(found, sizes, strict=True))


def thetas(weights: Weights) -> list[Tensor]:
    """θ of every target, as this process holds it; of what is gone, once masks are fixed, zeros."""
    found = [[solver.spread(i, theta) for i, theta in enumerate(solver.thetas)] for solver in weights.frozen]
    return weights.in_order([*found, *(part.theta.views for part in weights.solving)])


def kept_units(weights: Weights, at: Moment) -> list[int]:
    """Units kept of each target, by all processes that hold shards of it."""
    found = []
    for solver in weights.frozen:
        pairs = zip(solver.places, solver.problem.sizes, strict=True)
        here, ranks = [n.numel() // size for n, size in pairs], solver.problem.ranks
        if not ranks.alone:
            here = ranks.sum(ranks.counted(torch.tensor(here, device=solver.flags.bad.device))).tolist()
        found.append(here)
    for part in weights.solving:
        found.append(part.sum_by_target(weights.method.keep(part, at))[0].tolist())
    return [int(n) for n in weights.in_order(found)]


def masks(weights: Weights, at: Moment) -> dict[str, Tensor]:
    """Bool per weight, by parameter name."""
    found = [solver.keep() for solver in weights.frozen]
    for part in weights.solving:
        found.append([x.clone() for x in part.per_target(part.spread(weights.method.keep(part, at)))])
    targets = weights.problem.targets
    return {t.name: like(t.parameter, keep) for t, keep in zip(targets, weights.in_order(found), strict=True)}


def histogram(weights: Weights, at: Moment, bins: int) -> list[int] | None:
    """How many units have a soft mask value in each of `bins` equal parts of [0, 1]; None without a soft mask.

    Where weights lie in shards, every process must ask.
    """
    total = torch.zeros(bins, dtype=torch.int64)
    for solver in weights.frozen:
        if solver.chosen["dual"] is None:
            return None
        each = []
        for target, mask, size in zip(solver.problem.targets, solver.masks, solver.problem.sizes, strict=True):
            each.append(_counts(mask, bins) // size)
            each[-1][0] += (target.local.numel() - mask.numel()) // size
        total += _over_ranks(solver.problem, each)
    for part in weights.solving:
        if part.dual is None:
            return None
        mask = part.pools.soft(part.ranks(weights.method.form(part, at)), part.dual)
        total += _over_ranks(part.problem, [_counts(mask[here], bins) for here in part.problem.slices])
    return total.tolist()


def _counts(mask: Tensor, bins: int) -> Tensor:
    return torch.histc(mask.float(), bins, 0.0, 1.0).long()


def _over_ranks(problem: Problem, each: list[Tensor]) -> Tensor:
    """The sum over targets and processes."""
    mine = zip(each, problem.ranks.counts, strict=True)
    return problem.ranks.sum(torch.stack([x if counted else torch.zeros_like(x) for x, counted in mine]).sum(0)).cpu()
