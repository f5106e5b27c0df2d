"""Keeps the dense weights θ of a run: the parts of the problem, each with its solver."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spartan.methods.base import Method
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment
from spartan.problem.targets import Target
from spartan.solvers.base import FINE, Flags
from spartan.solvers.choose import frozen_solver_for, solver_for
from spartan.solvers.forms import Form
from spartan.solvers.frozen import FrozenSolver, kept_entries
from spartan.solvers.torch import TorchSolver


class Weights:
    """The parts of a problem. Until masks are fixed, `solving` has their solvers; from then on, `frozen` has.

    Args:
        problem: what is asked.
        method: what is done about it.
        kernels: "auto", "triton" or "torch".
    """

    def __init__(self, problem: Problem, method: Method, kernels: str) -> None:
        self.problem, self.method, self.kernels = problem, method, kernels
        self.problems = problem.split()
        device = problem.targets[0].local.device
        # With a `min_density` every target may become a segment of its own.
        self._rows = [len(part.segments) + any(part.floors) * len(part.targets) for part in self.problems]
        # What the guard looks at, in one piece of memory, so that one copy brings it to the host.
        self.watched = torch.zeros(2 + 2 * sum(self._rows), dtype=torch.float64, device=device)
        self.bad, self.residuals = watched_parts(self.watched)
        self.bad.fill_(FINE)
        self.solving: list[TorchSolver] = []
        self.frozen: list[FrozenSolver] = []
        self.begin()
        # Where each target is: its part, and its number there.
        self._home = {n: (p, i) for p, part in enumerate(self.problems) for i, n in enumerate(part.numbers)}
        self._everything = [list(range(len(part.targets))) for part in self.problems]

    def begin(self) -> None:
        """Dense θ, as the model holds it."""
        flags = zip(self.problems, self._flags(), strict=True)
        self.solving = [solver_for(part, each, self.kernels, self.method.identity) for part, each in flags]
        for solver in self.solving:
            solver.power = self.method.power
        self.frozen = []

    def _flags(self) -> list[Flags]:
        return [Flags(self.bad, rows) for rows in self.residuals.split(self._rows)]

    def targets_of_row(self, row: int) -> list[Target]:
        """What a row of `residuals` is about."""
        for part, rows in zip(self.problems, self._rows, strict=True):
            if row < rows:
                return [part.targets[i] for i in part.members(row)]
            row -= rows
        raise IndexError(row)

    @property
    def parts(self) -> Sequence[TorchSolver | FrozenSolver]:
        """The solvers in use."""
        return self.frozen or self.solving

    def each(self, at: Moment) -> Sequence[tuple[TorchSolver | FrozenSolver, Form | None]]:
        """Every part with what the method declares for it."""
        if self.frozen:
            return [(solver, None) for solver in self.frozen]
        return [(part, self.method.form(part, at)) for part in self.solving]

    def local(self, which: Sequence[int]) -> list[list[int]]:
        """Targets by part, in the numbers of each."""
        if len(which) == len(self._home):
            return self._everything
        found: list[list[int]] = [[] for _ in self.problems]
        for n in which:
            p, i = self._home[n]
            found[p].append(i)
        return found

    def in_order(self, by_part: Sequence[Sequence[Any]]) -> list[Any]:
        """What parts have of each target, in the order of the model's."""
        return [by_part[p][i] for p, i in (self._home[n] for n in range(len(self.problem.targets)))]

    def put(self, which: Sequence[int]) -> None:
        """θ into the parameters of these targets."""
        for part, mine in zip(self.parts, self.local(which), strict=True):
            if mine:
                part.put(mine)

    def take(self, which: Sequence[int], at: Moment | None = None) -> None:
        """θ from the parameters of these targets; with a moment, as far from where it was as the method lets it go."""
        forms = [(part, None) for part in self.parts] if at is None else self.each(at)
        for (part, form), mine in zip(forms, self.local(which), strict=True):
            if mine and form is not None and form.pace is not None and isinstance(part, TorchSolver):
                part.pace(form, mine)
            if mine:
                part.take(mine)

    def together(self) -> "Together":
        """Inside, what solvers are to do may wait for the end, to be started at once."""
        return Together(self.parts)

    def write(self, at: Moment) -> None:
        """w into the model."""
        for part, form in self.each(at):
            part.write(form)

    def snapshot(self) -> list[Any]:
        """All that a step may change, to go back to."""
        return [part.snapshot() for part in self.parts]

    def restore(self, snapshot: Sequence[Any]) -> None:
        """Go back."""
        for part, was in zip(self.parts, snapshot, strict=True):
            part.restore(was)

    def freeze(self, at: Moment) -> None:
        """From now on masks are fixed: keep θ and the mask of what is kept, and let the rest go."""
        kept = []
        for solver in self.solving:
            keep, mask = self.method.freeze(solver, at)
            each = solver.theta.views, solver.per_target(solver.spread(keep)), solver.per_target(solver.spread(mask))
            kept.append([kept_entries(solver.problem, i, *of) for i, of in enumerate(zip(*each, strict=True))])
        self.freeze_at(kept)

    def freeze_at(self, kept: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]]) -> None:
        """The same from θ, the mask and the places of what is kept of each target, by part."""
        found = []
        for solver, flags, of in zip(self.solving, self._flags(), kept, strict=True):
            frozen = frozen_solver_for(solver.problem, flags, self.kernels, of)
            frozen.state, frozen.k, frozen.chosen = solver.state, solver.k, solver.solution()
            found.append(frozen)
        self.frozen, self.solving = found, []

    def learned(self) -> list[nn.Parameter]:
        """The method's own parameters, which an optimizer trains."""
        return [p for part in self.parts for p in part.state.parameters()]

    def drop(self) -> None:
        """Let θ go."""
        self.solving, self.frozen, self.problems = [], [], []


class Together:
    """Has solvers hold back what they are to do; a class, since a generator takes several times as long, in every step."""

    def __init__(self, parts: Sequence[TorchSolver | FrozenSolver]) -> None:
        self._parts = parts  # of the beginning: others may be in use at the end

    def __enter__(self) -> None:
        for part in self._parts:
            part.hold()

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.release()


def watched_parts(watched: Tensor) -> tuple[Tensor, Tensor]:
    """The flags of what went wrong, and the residuals, in that memory."""
    return watched[:2].view(torch.int32)[:3], watched[2:].view(-1, 2)
