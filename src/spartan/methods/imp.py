"""Iterative magnitude pruning (the paper's Algorithm 1)."""

from dataclasses import dataclass

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.schedules import Moment, Schedule, linear
from spartan.solvers.forms import KEPT, Form, Mask
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class IMP(Method):
    """Iterative magnitude pruning: hard top-k by magnitude, gradient for what is kept.

        θ̃ = Π_k(θ)                      keep the k units of largest magnitude
        θ ← θ − η · [kept] ⊙ ∇L(θ̃)

    Args:
        ramp: how the sparsity grows over the warm-up, from 0 to 1 of the final one; `cubic(0, 1)` is the schedule of
            Zhu & Gupta.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=IMP(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    ramp: Schedule = linear(0.0, 1.0)

    name = "imp"
    year = 2018
    mask_rule = "top-k of |θ|, every step"
    gradient_rule = "g where kept, else 0"
    reference = "Zhu & Gupta, To prune, or not to prune, ICLR workshop 2018"
    refuses_nm = ""

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """Π_k(θ), with the gradient where kept."""
        return Form(Mask.ONE, KEPT)
