"""Answers any problem in torch operations, on any device: the reference for the other solvers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import Flags, Solver
from spartan.solvers.forms import MOMENTA, Form
from spartan.solvers.gradients import Gradients
from spartan.solvers.theta import copy_all
from spartan.solvers.units import MethodState


class TorchSolver(Gradients, Solver):
    """Plain torch: one tensor per target at a time, or all of them as one."""

    name = "torch"

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        Gradients.__init__(self, problem, alias)
        Solver.__init__(self, problem, flags)
        self.further = False  # whether the gradients that a method sees come on top of others of the same step
        self.forgotten: list[tuple[Tensor, tuple[str, ...]]] = []  # what optimizers are to forget, until they have

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """It always can."""
        return ""

    def put(self, which: Sequence[int]) -> None:
        """θ into the parameters of these targets."""
        self.theta.put(which)

    def take(self, which: Sequence[int]) -> None:
        """θ from the parameters of these targets."""
        self.theta.take(which)

    def write(self, form: Form | None) -> None:
        """w into the parameters."""
        copy_all([t.local for t in self.problem.targets], self.weights(form))

    def rewrite(self, function: Callable[[int, Tensor], Tensor]) -> None:
        """θ ← f(number, θ), target by target: the only way in which a method writes θ."""
        for i, theta in enumerate(self.theta.views):
            theta.copy_(function(i, theta))

    def restart(self, where: Tensor, growing: bool = False) -> None:
        """θ ← 0 at these units; with `growing` only at the entries that the pattern starts from zero.

        A unit that is not kept still moves by momentum and weight decay, unseen by the model, and w would start from
        where it had drifted.
        """
        entries = self.per_target(self.spread(where))
        for i, theta in enumerate(self.theta.views):
            some = self.problem.growing(i) if growing else None
            theta.masked_fill_(entries[i] if some is None else entries[i] & some, 0.0)

    def forget(self, where: Tensor, names: Sequence[str] = MOMENTA) -> None:
        """Have the optimizer forget what it keeps of these units under these names, its momentum; θ stays.

        The run sees to it as soon as masks are chosen: what a method asks for and takes back is never done.
        """
        self.forgotten.append((where, tuple(names)))

    def snapshot(self) -> Any:
        """θ, the masks and what the method knows."""
        thetas = [theta.clone() for theta in self.theta.views]
        return thetas, self.problem.apart, self.k, self.solution(), copy_of(self.state)

    def restore(self, snapshot: Any) -> None:
        """Go back."""
        thetas, apart, k, solution, state = snapshot
        copy_all(self.theta.views, thetas)
        self.state, self.forgotten = copy_of(state), []
        self.divide(apart)
        self.k = k
        self.go_on_from(solution)

    def solution(self) -> dict[str, Any]:
        """What is known of the masks, in plain numbers for every segment."""
        found = {"a": self.a, "b": self.b, "dual": self.dual}
        return {name: None if x is None else x.saved() for name, x in found.items()}

    def decisive(self) -> list[Tensor]:
        """The numbers that decide masks."""
        return [x for found in (self.a, self.b, self.dual) if found is not None for x in found.decisive()]

    def go_on_from(self, solution: Mapping[str, Any]) -> None:
        """Take over masks that `solution` gave."""
        self.a, self.dual = self.pools.restored(solution["a"], solution["dual"])
        self.b, _ = self.pools.restored(solution["b"], None)

    def divide(self, apart: list[int]) -> None:
        """Give these targets budgets of their own, and no others; masks are to be chosen anew then."""
        if apart != self.problem.apart:
            self.problem.set_apart(apart)
            self.redivided()

    def redivided(self) -> None:
        """The problem has other segments now."""
        self.pools = self.make_pools()
        self.k = [math.nan] * len(self.problem.segments)
        self.a = self.b = self.dual = None


def copy_of(state: MethodState) -> MethodState:
    """The same with dicts of its own."""
    return MethodState(*(dict(x) for x in vars(state).values()))
