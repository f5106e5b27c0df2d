"""The methods that bring an expression of their own, each once more as a straight line.

A solver takes the VJP of a method's expression; compared with the VJP of the same expression it would always be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spartan.problem.schedules import Moment
from spartan.solvers.torch import TorchSolver
from tests.contract.algorithm_3 import hard
from tests.contract.kinds import Sampled

Expression = Callable[[Sequence[Tensor]], list[Tensor]]


def entries_of(solver: TorchSolver, units: Tensor) -> list[Tensor]:
    """Each unit's entry at all its places."""
    return [solver.problem.expand(i, units[here]) for i, here in enumerate(solver.problem.slices)]


def values_of(solver: TorchSolver, thetas: Sequence[Tensor]) -> Tensor:
    """u = v/c of every unit."""
    each = enumerate(zip(thetas, solver.problem.factors, strict=True))
    return torch.cat([solver.problem.reduce(i, theta.abs()) * factor for i, (theta, factor) in each])


def chosen(solver: TorchSolver, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """1 for the units of highest rank that fit the budget of their segment, and the highest rank left out of it."""
    problem, slices = solver.problem, solver.problem.slices
    keep, below = torch.zeros_like(ranks), torch.zeros_like(ranks)
    for segment, k in zip(problem.segments, solver.k, strict=True):
        places = torch.cat([torch.arange(slices[i].start, slices[i].stop) for i in segment.targets])
        costs = [torch.full((problem.units[i],), problem.unit_costs[i]).double() for i in segment.targets]
        kept = hard(ranks[places], k, torch.cat(costs))
        keep[places] = kept
        below[places] = max([-math.inf, *ranks[places][kept == 0].tolist()])
    return keep, below


def thresholded(solver: TorchSolver, at: Moment, thetas: Sequence[Tensor]) -> list[Tensor]:
    """STR: θ · min(z − λ, u)/u where kept, z = u − sigmoid(s); λ is a constant."""
    u, s = values_of(solver, thetas), solver.state.learned_per_target["s"]
    shifts = [torch.sigmoid(s[i]).expand(n) for i, n in enumerate(solver.problem.units)]
    z = u - torch.cat(shifts)
    keep, below = chosen(solver, z.detach())
    mask = keep * torch.minimum(z - below, u) / u
    return [theta * m for theta, m in zip(thetas, entries_of(solver, mask), strict=True)]


def published(solver: TorchSolver, at: Moment, thetas: Sequence[Tensor]) -> list[Tensor]:
    """STR as published: θ · max(u − sigmoid(s), 0)/u."""
    u, s = values_of(solver, thetas), solver.state.learned_per_target["s"]
    shifts = [torch.sigmoid(s[i]).expand(n) for i, n in enumerate(solver.problem.units)]
    mask = torch.relu(u - torch.cat(shifts)) / u
    return [theta * m for theta, m in zip(thetas, entries_of(solver, mask), strict=True)]


def learned(solver: TorchSolver, at: Moment, thetas: Sequence[Tensor]) -> list[Tensor]:
    """θ · [φ is among the largest], with the gradient of θ · φ for φ."""
    phi = solver.state.learned["phi"]
    mask = chosen(solver, phi.detach())[0] + phi - phi.detach()
    return [theta * m for theta, m in zip(thetas, entries_of(solver, mask), strict=True)]


def sampled(solver: TorchSolver, at: Moment, thetas: Sequence[Tensor]) -> list[Tensor]:
    """θ · noise where |θ| · noise is among the largest, straight through the choice."""
    noise = Sampled()._noise(solver, at)
    keep, _ = chosen(solver, values_of(solver, thetas).detach() * noise)
    found = []
    for theta, n, kept in zip(thetas, entries_of(solver, noise), entries_of(solver, keep), strict=True):
        noisy = theta * n
        found.append(noisy - (noisy * (1 - kept)).detach())
    return found


LINES = {"str": thresholded, "str-published": published, "learned": learned, "sampled": sampled}


def straight_line(method: str, solver: TorchSolver, at: Moment) -> Expression | None:
    """The expression of a method by its name; None where declarations say it all."""
    line = LINES.get(method)
    return None if line is None else lambda thetas: line(solver, at, thetas)
