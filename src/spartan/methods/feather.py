"""Feather: a threshold between hard and soft, and less gradient for what is pruned."""

from dataclasses import dataclass

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment, Schedule, cubic
from spartan.solvers.forms import Form, Shrunk, Where
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class Feather(Method):
    """Feather: a threshold between hard and soft, straight-through gradient, scaled down where pruned.

        τ = the largest magnitude that is not kept (with N:M, of each group)
        w = sign(θ) · max(|θ|ᵖ − τᵖ, 0)^(1/p)    with a unit's mean magnitude u: θ · max(1 − (τ/u)ᵖ, 0)^(1/p)
        θ ← θ − η · (g where kept, κ·g elsewhere)

    The authors train with gradients clipped to a norm of 3 (`clip_grad_norm_(model.parameters(), 3)`), which is left to
    the training loop here.

    Args:
        p: 1 is soft thresholding, ∞ would be hard.
        pruned_gradient: κ; None is the paper's rule, for the whole model: 0.5 for a sparsity above 95%, 1 otherwise.
        ramp: how the sparsity grows over the warm-up, from 0 to 1 of the final one; cubic over the first half of the
            run, as in the paper.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=Feather(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    p: float = 3.0
    pruned_gradient: float | None = None
    ramp: Schedule = cubic(0.0, 1.0)

    name = "feather"
    year = 2023
    mask_rule = "top-k of |θ|, every step, shrunk most near the threshold"
    gradient_rule = "g where kept, κ·g elsewhere"
    reference = (
        "Glentis Georgoulakis, Retsinas & Maragos, Feather: An elegant solution to effective DNN sparsification, "
        "BMVC 2023"
    )
    refuses_nm = ""
    warmup = 0.5
    finetune = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.p < float("inf"):
            raise ValueError(f"Feather: p={self.p!r}; a finite number of at least 1 is needed")
        if self.pruned_gradient is not None and not 0 <= self.pruned_gradient <= 1:
            raise ValueError(f"Feather: pruned_gradient={self.pruned_gradient!r}; None or a number in [0, 1] is needed")

    def kappa(self, problem: Problem) -> float:
        """The gradient's factor where pruned: one for all, by the sparsity of the whole."""
        if self.pruned_gradient is not None:
            return float(self.pruned_gradient)
        return 0.5 if problem.sparsity > 0.95 + 1e-9 else 1.0

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """θ · max(1 − (τ/u)ᵖ, 0)^(1/p); g where kept, κ·g elsewhere."""
        kappa = self.kappa(solver.problem)
        return Form(Shrunk(self.p), Where(1.0, kappa, kappa))
