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
from spartan.problem.schedules import Moment, constant
from spartan.solvers.forms import VJP, Form, Shifted
from spartan.solvers.pools import Selection
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import masked


@register
@dataclass(frozen=True)
class STR(Method):
    """STR, with an exact budget: soft thresholding with a learned threshold per layer, all shifted to meet the budget.

        z = |θ| − sigmoid(s)                          s: one learned number per layer
        w = sign(θ) · min(max(z − λ, 0), |θ|)         λ: the largest z that is not kept, a constant for the gradient
        θ ← θ − η · [kept] ⊙ g,  s ← s − η · (∂w/∂s)ᵀ g

    The learned thresholds decide how the budget is spread over the layers of a group. With a unit's mean magnitude u in
    the place of |θ|, w = θ · min(max(z − λ, 0), u)/u. This is not the published form, which meets no budget:

        STR(exact=False)                              λ = 0 to the end of the run, nothing is asked for or fixed
        s ← s − η · ((∂w/∂s)ᵀ g + decay · s)          weight decay brings s up from below, and the thresholds with it

    Its sparsity comes out of the decay, `init` and the length of the run, which its authors tune for each sparsity; that
    of the arguments is not met, and `finalize()` takes what there is. Look at `sparsifier.stats.density`.

    Args:
        exact: False is the published form.
        init: s at the start. The authors' ResNet-50 starts from −3200 (`sInit_value`), where sigmoid(s) and its slope
            are 0, and relies on weight decay over 100 epochs to bring s up; −5 learns from the first step.
        decay: weight decay of s. None is, as in the authors' code, that of the weights for the published form, and warns
            where they have none, since it would stay dense. For the exact form it is the optimizer's default and
            hardly matters: it moves all thresholds together, and λ takes that back.

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
    mask_rule = "exact budget: top-k of |θ| − sigmoid(s), s learned per layer, shrunk by the threshold"
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
        if not self.exact:
            free = {"ramp": constant(0.0), "warmup": 0.0, "finetune": 0.0, "sparse_by_decay": True}
            for fact, value in free.items():
                object.__setattr__(self, fact, value)

    @property
    def learned_options(self) -> dict[str, Any]:  # type: ignore[override]
        """The weight decay of s; None is that of the weights."""
        return {} if self.exact and self.decay is None else {"weight_decay": self.decay}

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
        elif solver.a is None:  # once: to send numbers makes the host wait
            every = [
                Threshold(0.0, cost=segment.total) for segment in solver.problem.segments
            ]  # at most: nobody counts
            solver.a = Selection.of(every, solver.device)

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
