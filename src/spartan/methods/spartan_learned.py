"""Spartan with learned values: the soft mask has parameters of its own."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from spartan.methods.base import Method, scaled_beta
from spartan.methods.registry import register
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment, Schedule, as_schedule, linear
from spartan.solvers.forms import KEPT, VJP, Form, Mask
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class SpartanLearned(Method):
    """Spartan with learned values: the soft top-k mask ranks auxiliary parameters φ instead of magnitudes.

        σ(θ; φ) = θ ⊙ softtopk(φ, k, β)             soft masking
        θ̃       = Π_k(σ(θ; φ))                      projection onto the budget: the k units of largest φ
        θ ← θ − η · ∂σ/∂θ · ∇L(θ̃)                   dual averaging, for both: the gradient ignores the projection
        φ ← φ − η · ∂σ/∂φ · ∇L(θ̃)

    The paper names this extension without an experiment; what follows is this library's. φ holds one number per unit
    and starts at its magnitude (the value per cost by which Spartan ranks), so that the first mask is Spartan's. It is
    trained by the optimizer of the weights, without weight decay, which would only soften the mask.

    Magnitudes drift apart while the weights train, and the same β gives Spartan a mask that sharpens; φ moves through
    the mask alone, which a soft mask hardly lets it: at Spartan's own β the mask stays soft and the weights small. So β
    is counted in units of 1/φ̄, φ̄ the mean of φ at the start: then it means the same for weights of any size, and the
    values of φ move at the pace of the weights.

    Args:
        beta: the sharpness over training, a schedule or a number; `inf` is the hard mask, which teaches φ nothing.
        scale_beta: with blocks of h·w entries, scale the end of β by √(h·w), as Spartan does.
        relative: False takes β as it is, as Spartan does.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=SpartanLearned(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    beta: Schedule | float = linear(1.0, 10.0)
    scale_beta: bool = True
    relative: bool = True

    name = "spartan-learned"
    year = 2022
    mask_rule = "soft top-k of learned values φ at sharpness β, projected to the top k"
    gradient_rule = "∇σ(θ; φ)·g for θ and φ: through the soft mask, straight through the projection"
    needs = "one learned value per unit"
    reference = "Tai, Tian & Lim, Spartan: Differentiable sparsity via regularized transportation, NeurIPS 2022"
    refuses_nm = ""
    learned_options = {"weight_decay": 0.0}  # noqa: RUF012

    def __post_init__(self) -> None:
        beta = as_schedule(self.beta)
        if not (beta.start >= 0 and beta.end >= 0):
            raise ValueError(f"SpartanLearned: beta={self.beta!r}; the sharpness must be at least 0 throughout")

    def beta_at(self, problem: Problem, at: Moment) -> list[float]:
        """β, its end scaled for blocks; counted in units of 1/φ̄ once a run has measured it."""
        return scaled_beta(as_schedule(self.beta), self.scale_beta, problem, at)

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """φ = |θ|, per unit; and φ̄ of every segment, kept for each of its targets."""
        u, problem = solver.scores(), solver.problem
        solver.state.learned["phi"] = nn.Parameter(u.clone())
        means = torch.ones(len(problem.targets), dtype=torch.float64)
        if self.relative:
            sums = solver.sum_by_segment(u)[0].tolist()
            for i, s in enumerate(problem.segment_of):
                units = sum(problem.all_units[j] for j in problem.members(s))
                means[i] = sums[s] / units or 1.0
        solver.state.per_target["scale"] = means

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """The dual of the soft mask and the threshold of the hard one."""
        problem = solver.problem
        scale = solver.state.per_target["scale"].tolist()
        beta = [x / scale[problem.members(s)[0]] for s, x in enumerate(self.beta_at(problem, at))]
        solver.solve(solver.k, None if math.isinf(beta[0]) else beta, learned="phi")

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """Π_k(θ ⊙ softtopk(φ)): m·g for θ, the slope of the mask for φ."""
        if solver.dual is None:  # β = inf, which teaches φ nothing
            return Form(Mask.ONE, KEPT, learned="phi")
        return Form(Mask.SOFT, VJP.THROUGH, learned="phi")
