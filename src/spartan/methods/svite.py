"""SViTE: sparse vision transformers by dynamic sparse training, of weights or of whole attention heads."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.methods.registry import register
from spartan.methods.stored import ByGradient
from spartan.problem.schedules import Moment
from spartan.solvers.base import Grads
from spartan.solvers.forms import STRAIGHT, Form, Stored
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import times


@register
@dataclass(frozen=True)
class SViTE(ByGradient):
    """SViTE: for vision transformers, drop weights or heads now and then, grow as many where the gradient is largest.

        θ ← θ − η · ∇L(M ⊙ θ)                                 at every step, straight through the mask
        M ← M minus the ⌈f_t·|M|⌉ units of least importance    every n steps, in each layer, until the mask is fixed
        M ← M plus as many of the others, largest in Σ|∇L(w)|, from θ = 0
        f_t = f_min + (f − f_min)/2 · (1 + cos(πt/T))          f_min = 0.005, T the whole run; the last update at 80% of it

    As in its code the optimizer sees the gradients of all weights: AdamW's moments of a pruned one go on, and are its
    own when it grows from θ = 0; SGD's momentum begins anew there. The update comes after the step whose gradient it
    takes.

    The importance of a weight or a block is Σ|θ|. With `pattern=Heads(count)`, the paper's S²ViTE, that of a head is
    |Σ A·∂L/∂A| with A its output: to first order what the loss would change by without it. Summed over the batch this
    is |Σ w·g| over the head's value rows (less the part of their bias), and is taken from there; the paper takes
    magnitudes image by image. Likewise heads grow by Σ|g| over the value rows, in the place of ‖∂L/∂A‖₁: rows that get
    a gradient whether the head is alive or not. The paper's structured form drops neurons of the MLP too; here a
    sparsifier has one pattern.

    A grown head starts with zero values, and with the queries and keys that θ holds there. If both were zero, as in the
    paper's code, the gradient of each would be zero because of the other, unless its bias is not.

    Args:
        every: n, optimizer steps between two updates of the mask. None is a hundredth of the run; the paper's are
            15,000 of 1.5 million (DeiT-Tiny, DeiT-Small) and 7,000 of 750,000 (DeiT-Base).
        fraction: f, of the kept units, what the first updates replace.
        importance: "magnitude" or "taylor"; None is "taylor" for heads and "magnitude" for everything else.

    Example:
        >>> attention = torch.nn.MultiheadAttention(16, num_heads=4)
        >>> s = spartan.Sparsifier(
        ...     attention, 0.5, 100, SViTE(), pattern=spartan.Heads(4), include="in_proj_weight"
        ... )
        >>> s.layers()[0].kept == 2 * 3 * 4 * 16
        True
    """

    every: int | None = None  # type: ignore[assignment]
    fraction: float = 0.5
    importance: str | None = None

    name = "svite"
    year = 2021
    mask_rule = "random; every n steps the least |θ| (heads: |Σ w·g|) give way to the largest |g|"
    gradient_rule = "g, straight through; what grows starts from 0"
    needs = "dense gradients"
    reference = "Chen et al., Chasing sparsity in vision transformers: an end-to-end exploration, NeurIPS 2021"
    finetune = 0.2
    rounds_up = True

    def __post_init__(self) -> None:
        if self.every is not None:
            super().__post_init__()
        elif not 0 <= self.fraction <= 1:
            raise ValueError(f"SViTE: fraction={self.fraction!r} is not a fraction of the kept units; 0 to 1 is needed")
        if self.importance not in (None, "magnitude", "taylor"):
            raise ValueError(
                f'SViTE: importance={self.importance!r} is unknown; None, "magnitude" and "taylor" are accepted'
            )

    def period(self, at: Moment) -> int:
        """n; by default 1% of the run."""
        return max(1, round(at.total_steps / 100)) if self.every is None else self.every

    def fraction_at(self, at: Moment) -> float:
        """f_t, a cosine over the whole run."""
        low = min(0.005, self.fraction)
        return low + 0.5 * (self.fraction - low) * (1.0 + math.cos(math.pi * min(1.0, at.step / at.total_steps)))

    def updates_at(self, at: Moment) -> bool:
        """After n steps, 2n, … until the mask is fixed."""
        taken = at.step + 1
        return 0 < taken < at.freeze_step and taken % self.period(at) == 0

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """[kept] ⊙ θ, straight through."""
        return Form(Stored("mask"), STRAIGHT)

    def taylor(self, solver: TorchSolver) -> bool:
        """Whether importance is the loss's first-order change."""
        return solver.problem.pattern.judged_by_loss if self.importance is None else self.importance == "taylor"

    def observe(self, solver: TorchSolver, grads: Grads, at: Moment) -> None:
        """Remember Σ|g|, and |Σ w·g| where it decides; of a head, by its values."""
        growing = [solver.problem.growing(i) for i in range(len(grads))]
        pairs = zip(grads, growing, strict=True)
        grads = [g if g is None or rows is None else g * rows for g, rows in pairs]
        super().observe(solver, grads, at)
        if not self.taylor(solver) or all(g is None for g in grads):
            return
        weights = solver.weights(self.form(solver, at))
        wide = [torch.zeros_like(w) if g is None else w * g for w, g in zip(weights, grads, strict=True)]
        found = solver.reduce(solver.dense([x.to(solver.dtype) for x in wide])).abs()
        self.remember(solver, "taylor", times(solver.problem, found, solver.problem.factors), grads)

    def importance_of(self, solver: TorchSolver, at: Moment) -> Tensor:
        """|θ|, or what the loss would change by."""
        found = solver.state.per_unit.pop("taylor", None) if self.taylor(solver) else None
        return solver.scores() if found is None else found

    def begin(self, solver: TorchSolver, grown: Tensor) -> None:
        """From zero, of a head its values only; without SGD's momentum, but with Adam's moments."""
        solver.restart(grown, growing=True)
        solver.forget(grown, ["momentum_buffer"])
