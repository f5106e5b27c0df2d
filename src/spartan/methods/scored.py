"""Masks by learned scores: what movement pruning and OptG have in common."""

from torch import Tensor

from spartan.methods.base import Method
from spartan.problem.schedules import Moment
from spartan.solvers.forms import KEPT, Form, Stored
from spartan.solvers.torch import TorchSolver


class ScoredMasks(Method):
    """w = θ ⊙ M with M = [score among the k largest]; what is learned, a number per unit, sees through M as if it were it.

    `score` tells the scores. They are what is learned, or something made from it.
    """

    learned: str

    def score(self, solver: TorchSolver) -> Tensor:
        """What units compete by."""
        return solver.state.learned[self.learned].detach()

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """The units of largest score that fit the budget."""
        solver.state.per_unit["mask"] = solver.top(solver.k, self.score(solver), near="score")

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """M ⊙ θ and M ⊙ g; and for what is learned Σ g·θ over each unit, kept or not."""
        return Form(Stored("mask"), KEPT, learned=self.learned)
