"""SViTE: sparse vision transformers by dynamic sparse training, of weights or of whole attention heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.heads import Heads
from spartan.methods._masks import ByGradient, drop, recall, remember, start_at_zero
from spartan.methods.registry import register
from spartan.schedules import Moment


@register
@dataclass(frozen=True)
class SViTE(ByGradient):
    """SViTE: for vision transformers, drop weights or heads now and then, grow as many where the gradient is largest.

        θ ← θ − η · M ⊙ ∇L(M ⊙ θ)                             at every step
        M ← M minus the ⌈f_t·|M|⌉ units of least importance    every n steps, in each layer, until the mask is fixed
        M ← M plus as many of the others, largest in Σ|∇L(w)|, from θ = 0
        f_t = f_min + (f − f_min)/2 · (1 + cos(πt/T))          f_min = 0.005, T the whole run; the last update at 80% of it

    The importance of a weight or a block is Σ|θ|. With `pattern=Heads(count)`, the paper's S²ViTE, that of a head is
    |Σ A·∂L/∂A| with A its output: to first order what the loss would change by without it. Summed over the batch this
    is |Σ w·g| over the head's value rows (less the part of their bias), and is taken from there; the paper takes
    magnitudes image by image. Likewise heads grow by Σ|g| over the value rows, in the place of ‖∂L/∂A‖₁: rows that get
    a gradient whether the head is alive or not. The paper's structured form drops neurons of the MLP too; here a
    sparsifier has one pattern.

    A grown head starts with zero values, and with the queries and keys that θ holds there. If both were zero, as in the
    paper's code, the gradient of each would be zero because of the other, unless its bias is not.

    Args:
        every: n, optimizer steps between two updates of the mask. None is a hundredth of the run; the paper's are 15,000
            of 1.5 million (DeiT-Tiny, DeiT-Small) and 7,000 of 750,000 (DeiT-Base).
        fraction: f, of the kept units, what the first updates replace.
        importance: "magnitude" or "taylor"; None is "taylor" for heads and "magnitude" for everything else.

    Example:
        >>> attention = torch.nn.MultiheadAttention(16, num_heads=4)
        >>> s = spartan.Sparsifier(
        ...     attention, 0.5, 100, SViTE(), pattern=Heads(4), include="in_proj_weight"
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
    gradient_rule = "g where kept, else 0"
    needs = "dense gradients, every n steps"
    reference = "Chen et al., Chasing sparsity in vision transformers: an end-to-end exploration, NeurIPS 2021"
    finetune = 0.2

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

    def taylor(self, group: Group) -> bool:
        """Whether importance is the loss's first-order change."""
        return isinstance(group.pattern, Heads) if self.importance is None else self.importance == "taylor"

    def observe(self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment) -> None:
        """Remember Σ|g|, and |Σ w·g| where it decides, if the mask is rewired after this step."""
        if not self.updates_at(at.step + 1, at):
            return
        if isinstance(group.pattern, Heads):  # by their values
            values = [group.pattern.values(theta.shape, theta.device) for theta in thetas]
            grads = [None if g is None else g * rows for g, rows in zip(grads, values, strict=True)]
        super().observe(group, thetas, grads, at)
        if not self.taylor(group) or all(g is None for g in grads):
            return
        found = []
        for w, g, factor in zip(self.weights(group, thetas, at), grads, group.factors, strict=True):
            product = torch.zeros_like(w) if g is None else w * g
            wide = product if product.dtype == torch.float64 else product.float()
            found.append(group.pattern.reduce(wide).abs() * factor)
        remember(group, "taylor", found, grads)

    def drop(
        self, group: Group, thetas: Sequence[Tensor], kept: list[Tensor], at: Moment
    ) -> tuple[list[Tensor], float]:
        """What stays: the kept units without the least important ones, rounded up."""
        importance = recall(group, "taylor") if self.taylor(group) else None
        return drop(
            group, kept, group.scores(thetas) if importance is None else importance, self.fraction_at(at), up=True
        )

    def begin(self, group: Group, thetas: Sequence[Tensor], grown: list[Tensor]) -> None:
        """From zero; of a head, its values only."""
        where = group.expand(grown)
        if isinstance(group.pattern, Heads):
            where = [x & group.pattern.values(x.shape, x.device) for x in where]
        start_at_zero(group, thetas, where)
