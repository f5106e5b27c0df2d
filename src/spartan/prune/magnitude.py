"""Keeps the weights of largest magnitude: no data is needed."""

import torch

from spartan.problem.problem import Problem
from spartan.solvers.base import FINE, Flags
from spartan.solvers.forms import Form
from spartan.solvers.sharded import ShardedSolver
from spartan.solvers.torch import TorchSolver


@torch.no_grad()
def prune_by_magnitude(problem: Problem) -> None:
    """Set the units of smallest magnitude to zero, in place, to the final budgets of the problem."""
    for part in problem.split():
        device = part.targets[0].local.device
        flags = Flags(torch.full((2,), FINE, device=device), torch.zeros(len(part.segments), 2, device=device))
        kind = TorchSolver if part.ranks.alone else ShardedSolver
        solver = kind(part, flags, alias=True)  # the weights themselves: no copy of them for a single pass
        solver.solve(part.budgets(1.0))
        solver.write(Form())
