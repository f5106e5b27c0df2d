"""Has optimizers forget the momentum of weights that begin anew."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from spartan.distributed import local
from spartan.solvers.forms import MOMENTA
from spartan.solvers.torch import TorchSolver


def forget_units(solver: TorchSolver, optimizers: Sequence[Optimizer]) -> None:
    """Set to zero what a method has asked optimizers to forget of some units."""
    asked, solver.forgotten = solver.forgotten, []
    for where, names in asked:
        entries = solver.per_target(solver.spread(where))
        for target, mine in zip(solver.problem.targets, entries, strict=True):
            for kept in _kept(optimizers, [target.parameter], names):
                kept.masked_fill_(mine, 0.0)


def forget_all(optimizers: Sequence[Optimizer]) -> None:
    """Set the momentum of everything that these optimizers train to zero."""
    every = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    found = list(_kept(optimizers, every, MOMENTA))
    if found:
        torch._foreach_zero_(found)


def _kept(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], names: Sequence[str]) -> Iterator[Tensor]:
    """What optimizers keep of parameters under these names, an entry per weight, as this process holds it."""
    for optimizer in optimizers:
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name in names:
                found = state.get(name)
                if isinstance(found, Tensor) and found.shape == parameter.shape:
                    yield local(found)
