"""Straight-through soft thresholding for sparse training."""

import math
from dataclasses import dataclass

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.schedules import Moment, Schedule, cubic, delayed
from spartan.problem.targets import Target
from spartan.solvers.forms import STRAIGHT, Form, Shrunk
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class ST3(Method):
    """ST-3: soft thresholding at the budget's magnitude, rescaled, dense gradient straight through.

        τ = the largest magnitude that is not kept (with N:M, of each group)
        w = s · sign(θ) · max(|θ| − τ, 0)       with a unit's mean magnitude u: s · θ · max(1 − τ/u, 0)
        θ ← θ − η · ∇L(w)                       straight through, for every θ

    s makes up for the lost magnitude, per output channel: with r = Σ_kept|θ| / Σ|θ| of the channel, s = 1.01/(r + 0.01)
    (a unit that spans several channels takes their mean).

    The authors train with gradients clipped to a norm of 3 (`gradient_clip_val = 3.0`), which is left to the training
    loop here.

    Args:
        rescale: False leaves out s.
        sigma: True is ST-3^σ, which spreads the sparsity more evenly over layers: magnitudes compete as |θ|·√d, d being
            the sum of the weight's dimensions (`l1std` in its code), so that a layer's threshold is τ/√d.
        ramp: how the sparsity grows over the warm-up, from 0 to 1 of the final one; the paper's is dense for 5 of 100
            epochs, then a cubic that ends at half the run.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=ST3(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    rescale: bool = True
    sigma: bool = False
    ramp: Schedule = delayed(cubic(0.0, 1.0), 0.1)  # of the warm-up: a twentieth of the run

    name = "st3"
    year = 2023
    mask_rule = "top-k of |θ|, every step, shrunk by the threshold"
    gradient_rule = "g, straight through"
    reference = (
        "Vanderschueren & De Vleeschouwer, Are straight-through gradients and soft-thresholding all you need for "
        "sparse training?, WACV 2023"
    )
    refuses_nm = ""
    warmup = 0.5
    finetune = 0.0

    def scale(self, target: Target) -> float:
        """√d for ST-3^σ."""
        return math.sqrt(sum(target.shape)) if self.sigma else 1.0

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """s · θ · max(1 − τ/u, 0), straight through."""
        return Form(Shrunk(row_scale=self.rescale), STRAIGHT)
