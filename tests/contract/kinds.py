"""Methods of the kinds that the base class must carry but the library does not ship yet, written as a user would.

One learns scores through an expression of its own, one updates masks every few steps and looks at dense gradients, one
draws random numbers each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spartan.methods.base import Method
from spartan.methods.paced import Paced
from spartan.problem.schedules import Moment
from spartan.solvers.base import Grads
from spartan.solvers.forms import KEPT, Form, Stored
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import masked
from tests.contract.straight import straight_through


@dataclass(frozen=True)
class LearnedScores(Method):
    """Keep the units whose learned scores are largest; scores learn straight through the mask."""

    name = "test-learned"
    year = 2020
    mask_rule = "top-k of learned scores"
    gradient_rule = "VJP"
    needs = "one score per unit"
    reference = "a test"
    learned_options = {"weight_decay": 0.0}  # noqa: RUF012

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        solver.state.learned["phi"] = nn.Parameter(solver.scores().clone())

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        solver.solve(solver.k, ranks=solver.state.learned["phi"].detach())

    def keep(self, solver: TorchSolver, at: Moment) -> Tensor:
        return solver.pools.keep(solver.state.learned["phi"].detach(), solver.a)

    def freeze(self, solver: TorchSolver, at: Moment) -> tuple[Tensor, Tensor]:
        kept = self.keep(solver, at)
        return kept, kept.to(solver.dtype)

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        def weights(thetas: Sequence[Tensor]) -> list[Tensor]:
            phi, kept = solver.state.learned["phi"], self.keep(solver, at)
            soft = solver.per_target(solver.spread(straight_through(phi, kept.to(phi.dtype))))
            entries = zip(thetas, soft, solver.per_target(solver.spread(kept)), strict=True)
            return [straight_through(theta * m, masked(theta * m, keep)) for theta, m, keep in entries]

        return Form(own=weights)


@dataclass(frozen=True)
class Regrowing(Method):
    """Sparse from the start; every third step the weakest kept units make room for those with large gradients."""

    name = "test-regrowing"
    year = 2020
    mask_rule = "kept by |θ|, grown by |g|, every 3 steps"
    gradient_rule = "VJP"
    needs = "dense gradients"
    reference = "a test"
    sparse_from = "start"
    budget = "erk"
    warmup = 0.0

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        u = solver.scores()
        solver.state.per_unit |= {"mask": torch.zeros_like(u, dtype=torch.bool), "growth": u.clone()}

    def observes(self, at: Moment) -> bool:
        return True

    def observe(self, solver: TorchSolver, grads: Grads, at: Moment) -> None:
        slabs = [g.abs() for g in solver.dense(grads)]
        solver.state.per_unit["growth"] = solver.reduce(slabs)

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        if at.step % 3:
            return
        u, mask, growth = solver.scores(), solver.state.per_unit["mask"], solver.state.per_unit["growth"]
        strong = mask.clone()
        for here in solver.problem.slices:
            if mask[here].any():
                strong[here] &= u[here] >= torch.quantile(u[here][mask[here]], 0.3)
        rank = torch.where(strong, 2.0 + u / (1.0 + u), growth / (1.0 + growth))
        solver.state.per_unit["mask"] = solver.top(solver.k, rank)

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        return Form(Stored("mask"), KEPT)


@dataclass(frozen=True)
class Sampled(Method):
    """A new random mask every step, larger weights more likely to be kept."""

    name = "test-sampled"
    year = 2021
    mask_rule = "top-k of |θ| times noise"
    gradient_rule = "straight through, times the noise"
    random = True
    needs = "random numbers"
    reference = "a test"

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        solver.state.per_unit["mask"] = solver.top(solver.k, solver.scores() * self._noise(solver, at))

    def _noise(self, solver: TorchSolver, at: Moment) -> Tensor:
        return solver.random(at).to(solver.dtype) + 0.5

    def keep(self, solver: TorchSolver, at: Moment) -> Tensor:
        return solver.state.per_unit["mask"]

    def freeze(self, solver: TorchSolver, at: Moment) -> tuple[Tensor, Tensor]:
        kept = self.keep(solver, at)
        return kept, kept.to(solver.dtype)

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        def weights(thetas: Sequence[Tensor]) -> list[Tensor]:
            noise, kept = self._noise(solver, at), self.keep(solver, at)
            entries = zip(thetas, *(solver.per_target(solver.spread(x)) for x in (noise, kept)), strict=True)
            return [straight_through(theta * n, masked(theta * n, keep)) for theta, n, keep in entries]

        return Form(own=weights)


class Hurried(Paced):
    """Paced, with a pace other than 1 from the first step on: short runs do not get to one."""

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """As it is, and half as fast again."""
        super().setup(solver, at)
        solver.state.per_target["pace"] *= 1.5
