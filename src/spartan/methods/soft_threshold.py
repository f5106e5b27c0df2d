"""Soft threshold reparameterization: thresholds that are learned, one per layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.ops.select import Threshold
from spartan.problem.schedules import Moment
from spartan.solvers.forms import VJP, Form, Shifted
from spartan.solvers.pools import Selection
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import masked


@register
@dataclass(frozen=True)
class STR(Method):
    """STR: soft thresholding with a learned threshold per layer, shifted together to meet the budget.

        z = |θ| − sigmoid(s)                          s: one learned number per layer
        w = sign(θ) · min(max(z − λ, 0), |θ|)         λ: the largest z that is not kept, a constant for the gradient
        θ ← θ − η · [kept] ⊙ g,  s ← s − η · (∂w/∂s)ᵀ g

    The learned thresholds decide how the budget is spread over the layers of a group. With a unit's mean magnitude u in
    the place of |θ|, w = θ · min(max(z − λ, 0), u)/u.

    Args:
        exact: False is the paper's own form, λ = 0: weight decay on s steers the sparsity, `sparsity` is not met.
        init: s at the start. The paper's ResNet-50 starts from −3200, where sigmoid(s) and its slope are 0, and relies
            on weight decay over 100 epochs to bring s up; −5 learns from the first step.
        decay: weight decay of s; the paper's is that of the weights, and is what makes its own form sparse. None is the
            optimizer's default, which is 0 where each of its parameter groups has one of its own, as in the recipes.
            For the exact form it hardly matters: it moves all thresholds together, and λ takes that back.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method="str", warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    exact: bool = True
    init: float = -5.0
    decay: float | None = None

    name = "str"
    year = 2020
    mask_rule = "top-k of |θ| − sigmoid(s), s learned per layer, shrunk by the threshold"
    gradient_rule = "VJP: g where kept, else 0; s learns too"
    needs = "one learned threshold per layer"
    reference = "Kusupati et al., Soft threshold weight reparameterization for learnable sparsity, ICML 2020"
    refuses_nm = "its learned thresholds divide the budget among layers, and with N:M there is nothing to divide"

    def __post_init__(self) -> None:
        if not math.isfinite(self.init):
            raise ValueError(f"STR: init={self.init!r}; a finite number is needed")
        if self.decay is not None and not 0 <= self.decay < math.inf:
            raise ValueError(
                f"STR: decay={self.decay!r} is not a weight decay; None or a number of at least 0 is needed"
            )

    @property
    def learned_options(self) -> dict[str, Any]:  # type: ignore[override]
        """The weight decay of s."""
        return {} if self.decay is None else {"weight_decay": self.decay}

    @property
    def sparse_from(self) -> Literal["warmup", "never"]:  # type: ignore[override]
        """From when the model meets its sparsity."""
        return "warmup" if self.exact else "never"

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """s, one entry per target."""
        s = torch.full((len(solver.problem.targets),), self.init, dtype=solver.dtype, device=solver.device)
        solver.state.learned_per_target["s"] = nn.Parameter(s)

    def scores(self, solver: TorchSolver, u: Tensor) -> Tensor:
        """z = u − sigmoid(s) of every unit."""
        return solver.shifted("s", u)

    @torch.no_grad()
    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """λ for the budget; the paper's own form has none."""
        if self.exact:
            solver.solve(solver.k, shifted="s")
        else:
            solver.a = Selection.of([Threshold(0.0)] * len(solver.problem.segments), solver.device)

    @torch.no_grad()
    def keep(self, solver: TorchSolver, at: Moment) -> Tensor:
        """z above λ."""
        return solver.pools.keep(solver.shifted("s"), solver.a)

    def mask(self, solver: TorchSolver, u: Tensor, kept: Tensor) -> Tensor:
        """min(max(z − λ, 0), u)/u per unit, differentiable in u and s."""
        z = self.scores(solver, u)
        shift = solver.pools.below(z.detach(), solver.a)
        live = kept & (u > 0)  # a kept zero stays free to move, as where nothing is subtracted
        top, bottom = torch.where(live, torch.minimum(z - shift, u), 1.0), torch.where(live, u, 1.0)
        return masked(top / bottom, kept)

    @torch.no_grad()
    def freeze(self, solver: TorchSolver, at: Moment) -> tuple[Tensor, Tensor]:
        """The mask as it is."""
        kept = self.keep(solver, at)
        return kept, self.mask(solver, solver.scores(), kept)

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """θ times the mask: an expression that s learns through."""

        def weights(thetas: Sequence[Tensor]) -> list[Tensor]:
            kept = self.keep(solver, at)
            mask = self.mask(solver, solver.magnitudes(solver.dense(thetas)), kept)
            entries = zip(thetas, *(solver.per_target(solver.spread(x)) for x in (mask, kept)), strict=True)
            return [masked(theta * m.to(theta.dtype), keep) for theta, m, keep in entries]

        return Form(Shifted("s"), VJP.THROUGH, own=weights) if self.exact else Form(own=weights)
