"""Iterative magnitude pruning (the paper's Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method, masked, masked_gradients
from spartan.methods.registry import register
from spartan.schedules import Moment, Schedule, linear

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine


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

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """The magnitude threshold for the budget."""
        group.threshold = group.top(thetas, group.k)

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ̃ = Π_k(θ)."""
        keep = group.expand(self.keep(group, thetas))
        return [masked(theta, kept) for theta, kept in zip(thetas, keep, strict=True)]

    def write_fast(self, group: Group, thetas: Sequence[Tensor], engine: Engine) -> bool:
        """[kept] ⊙ θ."""
        engine.project(soft=False)
        return True

    def transform_fast(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], engine: Engine
    ) -> bool:
        """[kept] ⊙ g."""
        engine.where_kept(grads)
        return True

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """[kept] ⊙ g."""
        keep = group.expand(self.keep(group, thetas))
        return masked_gradients(grads, keep)
