"""Spartan: soft top-k masking and dual averaging (the paper's Algorithm 3)."""

import math
from dataclasses import dataclass
from typing import Literal

from spartan.methods.base import Method, scaled_beta
from spartan.methods.registry import register
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment, Schedule, as_schedule, linear
from spartan.solvers.forms import KEPT, VJP, Form, Mask
from spartan.solvers.torch import TorchSolver

HARD = Form(Mask.ONE, KEPT)
SOFT, UNPROJECTED = (Form(Mask.SOFT, VJP.THROUGH, project=project) for project in (True, False))


@register
@dataclass(frozen=True)
class Spartan(Method):
    """Spartan: a soft top-k mask that sharpens over training, projected to the exact budget in the forward pass.

        σ(θ) = θ ⊙ softtopk(|θ|, k, β)         soft masking
        θ̃    = Π_k(σ(θ))                       projection onto the budget
        θ ← θ − η · ∇σ(θ) ∇L(θ̃)                dual averaging: the gradient ignores the projection

    β grows from 1 to `beta.end`, from exploring sparsity patterns (β = 0 is Top-KAST) to training one (β → ∞ is IMP).

    Args:
        beta: the sharpness over training, a schedule or a number; `inf` is the hard mask.
        project: False leaves out the projection (the paper's ablation): the model is soft-masked, and not sparse,
            until finetuning begins with the hard mask of that moment.
        scale_beta: with blocks of h·w entries, scale the end of β by √(h·w), as the paper does.
        solver: "newton", or "sinkhorn" for the paper's iteration (tolerance 0.01, at most 100 iterations).
        init: where Sinkhorn starts: "cold" (the default), "cached" (the last step's dual) or "threshold" (the hard
            threshold, the paper's "sorting").

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=Spartan(beta=linear(1, 20)), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    beta: Schedule | float = linear(1.0, 10.0)
    project: bool = True
    scale_beta: bool = True
    solver: str = "newton"
    init: str | None = None

    name = "spartan"
    year = 2022
    mask_rule = "soft top-k of |θ| at sharpness β, projected to the top k"
    gradient_rule = "∇σ(θ)·g: through the soft mask, straight through the projection"
    reference = "Tai, Tian & Lim, Spartan: Differentiable sparsity via regularized transportation, NeurIPS 2022"

    def __post_init__(self) -> None:
        beta = as_schedule(self.beta)
        if not (beta.start >= 0 and beta.end >= 0):
            raise ValueError(f"Spartan: beta={self.beta!r}; the sharpness must be at least 0 throughout")
        if self.solver not in ("newton", "sinkhorn"):
            raise ValueError(f'Spartan: solver={self.solver!r} is unknown; "newton" and "sinkhorn" are accepted')
        starts = (None,) if self.solver == "newton" else (None, "cold", "cached", "threshold")
        if self.init not in starts:
            raise ValueError(f"Spartan: init={self.init!r} with solver={self.solver!r}; accepted: {starts}")

    @property
    def sparse_from(self) -> Literal["warmup", "finetune"]:  # type: ignore[override]
        """From when the model is truly sparse."""
        return "warmup" if self.project else "finetune"

    @property
    def refuses_nm(self) -> str:  # type: ignore[override]
        """Newton's method solves one mask per group of m."""
        return "" if self.solver == "newton" else "solver='sinkhorn' iterates on a single dual; use solver='newton'"

    def beta_at(self, problem: Problem, at: Moment) -> list[float]:
        """β, its end scaled for blocks."""
        return scaled_beta(as_schedule(self.beta), self.scale_beta, problem, at)

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """The dual of the soft mask and the threshold of the hard one."""
        beta = self.beta_at(solver.problem, at)
        if math.isinf(beta[0]):
            solver.solve(solver.k)
        elif self.solver == "newton":
            solver.solve(solver.k, beta)
        else:
            start = "threshold" if self.init == "threshold" else None
            cached = solver.dual.mus() if self.init == "cached" and solver.dual is not None else None
            solver.sinkhorn(solver.k, beta, cached or [start] * len(beta))

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """Π_k(θ ⊙ softtopk(|θ|)), with the gradient of the soft mask."""
        if solver.dual is None:  # β = inf
            return HARD
        return SOFT if self.project else UNPROJECTED
