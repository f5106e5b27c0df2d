"""SR-STE: the sparse-refined straight-through estimator."""

import math
from dataclasses import dataclass

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.schedules import Moment
from spartan.solvers.forms import STRAIGHT, Form, Mask, Where
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class SRSTE(Method):
    """SR-STE: hard top-k forward, gradient straight through, and a decay of what is not kept.

        w = M ⊙ θ                                  M: the units of largest magnitude
        θ ← θ − η · (∇L(w) + λ · (1 − M) ⊙ θ)      straight through, for every θ

    The decay makes pruned weights stay pruned, so that masks settle. It is made for `NM(n, m)` and works with any
    pattern. As in the paper, masks change to the end and there is no warm-up; `warmup` and `finetune` give either. One
    budget over a whole model at 98% wants a warm-up: without it layers may lose all their weights at once.

    The decay is added in the optimizer's step, once, after gradients are accumulated, unscaled and clipped.

    Args:
        decay: λ, on the scale of SGD's `weight_decay`, which comes on top. 0 is the plain straight-through estimator,
            that is Top-KAST with a dense gradient.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> s = spartan.Sparsifier(model, sparsity=0.5, total_steps=10, method=SRSTE(), pattern=spartan.NM(2, 4))
        >>> (model.weight.view(-1, 4) != 0).sum(1)
        tensor([2, 2, 2, 2])
    """

    decay: float = 2e-4

    name = "srste"
    year = 2021
    mask_rule = "top-k of |θ|, every step"
    gradient_rule = "g, straight through, plus λθ where not kept"
    reference = "Zhou et al., Learning N:M fine-grained structured sparse neural networks from scratch, ICLR 2021"
    refuses_nm = ""
    warmup = 0.0
    finetune = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < math.inf:
            raise ValueError(f"SRSTE: decay={self.decay!r} is not a decay; a finite number ≥ 0 is needed, such as 2e-4")

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """M ⊙ θ, straight through, and λ · (1 − M) ⊙ θ."""
        return Form(Mask.ONE, STRAIGHT, Where(0.0, self.decay, self.decay) if self.decay else None)
