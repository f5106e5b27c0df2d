"""Prunes a model once, by magnitude."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from spartan.problem.budgets import Budget
from spartan.problem.costs import Cost
from spartan.problem.patterns import Pattern
from spartan.problem.problem import make_problem
from spartan.problem.targets import Globs
from spartan.solvers.base import FINE, Flags
from spartan.solvers.forms import Form
from spartan.solvers.sharded import ShardedSolver
from spartan.solvers.torch import TorchSolver

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def prune(
    model: M,
    sparsity: float,
    *,
    pattern: Pattern | None = None,
    cost: Cost | Mapping[str, float] | None = None,
    budget: Budget = "global",
    include: Globs = None,
    exclude: Globs = None,
    count: str = "targets",
) -> M:
    """Set the weights of smallest magnitude to zero, in place, to an exact budget. The arguments are `Sparsifier`'s.

    Example:
        >>> model = prune(torch.nn.Linear(10, 10), sparsity=0.9)
        >>> int((model.weight != 0).sum())
        10
    """
    problem = make_problem(
        model, sparsity, pattern=pattern, cost=cost, budget=budget, include=include, exclude=exclude, count=count
    )
    for part in problem.split():
        device = part.targets[0].local.device
        flags = Flags(torch.full((2,), FINE, device=device), torch.zeros(len(part.segments), 2, device=device))
        kind = TorchSolver if part.ranks.alone else ShardedSolver
        solver = kind(part, flags, alias=True)  # the weights themselves: no copy of them for a single pass
        solver.solve(part.budgets(1.0))
        solver.write(Form())
    return model
