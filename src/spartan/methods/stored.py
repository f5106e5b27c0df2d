"""Masks that a method stores and rewires: what static, SET, RigL and SViTE have in common."""

import math

import torch
from torch import Tensor

from spartan.methods.base import Method
from spartan.problem.schedules import Moment
from spartan.solvers.base import Grads
from spartan.solvers.forms import KEPT, Form, Stored
from spartan.solvers.torch import TorchSolver


class StoredMasks(Method):
    """Sparse from the first step: w = [kept] ⊙ θ, with the kept units in `state.per_unit["mask"]`."""

    sparse_from = "start"
    random = True
    budget = "erk"
    warmup = 0.0
    finetune = 0.25

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """A random mask."""
        solver.state.per_unit["mask"] = solver.top(solver.k, solver.random(at))

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """[kept] ⊙ θ and [kept] ⊙ g."""
        return Form(Stored("mask"), KEPT)


class Rewiring(StoredMasks):
    """Every few steps, until the mask is fixed, some of the kept units give way to others.

    Steps are counted from 0; an update belongs to a step t = 0, n, 2n, … and is made when that step is done.
    """

    refuses_nm = "it replaces a fraction of all kept weights, and with N:M each group would have to give up as many"

    every: int
    fraction: float
    rounds_up = False  # how many units give way: down, or up to the next whole one

    grows_from_zero = True
    restarts = True
    finetune = 0.232  # of RigL's 97,656 steps on CIFAR-10 the mask changes over 75,000

    def __post_init__(self) -> None:
        who = type(self).__name__
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{who}: every={self.every!r} is not a number of optimizer steps; an int ≥ 1 is needed")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"{who}: fraction={self.fraction!r} is not a fraction of the kept units; 0 to 1 is needed")

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """A random mask, never rewired."""
        super().setup(solver, at)
        solver.state.numbers["rewired"] = 0

    def period(self, at: Moment) -> int:
        """Steps between two updates of the mask."""
        return self.every

    def updates_at(self, at: Moment) -> bool:
        """Whether the mask is rewired with the step of this moment: not once it is fixed."""
        return 0 <= at.step < at.freeze_step and at.step % self.period(at) == 0

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """Rewire the mask if it is time; while a warm-up lowers the budget, keep what is largest of it."""
        state = solver.state
        old = state.per_unit["mask"]
        if 0 < at.step <= at.warmup_steps:
            state.per_unit["mask"] = solver.top(solver.k, solver.scores(), among=old)
        # Once per step, however often this is called.
        if not self.updates_at(at.before()) or state.numbers["rewired"] == at.step:
            return
        state.numbers["rewired"] = at.step
        importance, growth = self.importance_of(solver, at), self.growth(solver, at)
        if growth is None:
            return
        kept = state.per_unit["mask"]
        cost = solver.cost_of(kept)
        fraction, wanted = self.fraction_at(at), solver.max_by_segment(growth) > -math.inf
        room = fraction * cost
        if self.rounds_up and fraction > 0:
            dearest = [max(solver.problem.unit_costs[i] for i in s.targets) for s in solver.problem.segments]
            room = room + (1.0 - 1e-6) * solver.constant(dearest)
        stay = kept & ~solver.top(torch.where(wanted, torch.minimum(room, cost), 0.0), -importance, among=kept)
        new = stay | solver.top(torch.where(wanted, solver.room_beside(stay), 0.0), growth, among=~stay)
        self.begin(solver, new & ~old)
        state.per_unit["mask"] = new

    def importance_of(self, solver: TorchSolver, at: Moment) -> Tensor:
        """A number per unit: the least of what is kept give way."""
        return solver.scores()

    def growth(self, solver: TorchSolver, at: Moment) -> Tensor | None:
        """A rank per unit: which come first to fill the budget again. None changes nothing, nor does −∞ in a segment."""
        raise NotImplementedError

    def begin(self, solver: TorchSolver, grown: Tensor) -> None:
        """Where units that were not kept before start from: from zero, without momentum."""
        solver.restart(grown)
        solver.forget(grown)

    def fraction_at(self, at: Moment) -> float:
        """f_t = f/2 · (1 + cos(πt/T_end)), with T_end the step at which the mask is fixed, and t those taken."""
        return 0.5 * self.fraction * (1.0 + math.cos(math.pi * at.progress))


class ByGradient(Rewiring):
    """What grows has the largest Σ|g| over its unit, per cost: the gradient for w, dense, of the step it belongs to."""

    def observes(self, at: Moment) -> bool:
        """If the mask is rewired with this step."""
        return self.updates_at(at)

    def observe(self, solver: TorchSolver, grads: Grads, at: Moment) -> None:
        """Remember Σ|g| of every unit."""
        if all(g is None for g in grads):
            return
        problem, found = solver.problem, solver.magnitudes(solver.dense(grads))
        # A segment that the loss has not reached has nothing to go by.
        reached = [int(any(grads[i] is not None for i in segment.targets)) for segment in problem.segments]
        if not all(reached):
            found = torch.where(solver.at_units(solver.constant(reached)) > 0, found, -math.inf)
        self.remember(solver, "growth", found, grads)

    def remember(self, solver: TorchSolver, what: str, units: Tensor, grads: Grads) -> None:
        """Keep one number per unit until the mask is rewired.

        A missing gradient counts as zero, but leaves what another optimizer's part of the step has shown.
        """
        before = solver.state.per_unit.get(what)
        if before is not None and any(g is None for g in grads):
            there = solver.of_targets(solver.constant([int(g is not None) for g in grads])) > 0
            units = torch.where(there, units, before)
        solver.state.per_unit[what] = units

    def growth(self, solver: TorchSolver, at: Moment) -> Tensor | None:
        """Σ|g|, once; nothing where the loss has not reached."""
        return solver.state.per_unit.pop("growth", None)
