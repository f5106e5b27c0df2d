"""Feather: a threshold between hard and soft, and less gradient for what is pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method, masked, straight_through
from spartan.methods.registry import register
from spartan.methods.st3 import level, shrink
from spartan.schedules import Moment, Schedule, cubic


@register
@dataclass(frozen=True)
class Feather(Method):
    """Feather: a threshold between hard and soft, straight-through gradient, scaled down where pruned.

        τ = the largest magnitude that is not kept (with N:M, of each group)
        w = sign(θ) · max(|θ|ᵖ − τᵖ, 0)^(1/p)    with a unit's mean magnitude u: θ · max(1 − (τ/u)ᵖ, 0)^(1/p)
        θ ← θ − η · (g where kept, κ·g elsewhere)

    Args:
        p: 1 is soft thresholding, ∞ would be hard.
        pruned_gradient: κ; None is the paper's rule, 0.5 where the sparsity, to a percent, exceeds 95% and 1 otherwise.
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

    def kappa(self, group: Group) -> float:
        """The gradient's factor where pruned."""
        if self.pruned_gradient is not None:
            return self.pruned_gradient
        # To a percent: with count="model" a sparsity of 0.95 is a little more of the targets.
        return 0.5 if round(group.sparsity, 2) > 0.95 else 1.0

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """The magnitude threshold for the budget."""
        group.threshold = group.top(thetas, group.k)

    @torch.no_grad()
    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """max(1 − (τ/u)ᵖ, 0)^(1/p), so that w does not jump."""
        u = group.scores(thetas)
        tau = level(group, u)
        # With x = 1 − τ/u, 1 − (1 − x)ᵖ = −expm1(p·log1p(−x)) keeps its digits where x is small.
        below = [shrink(x, t) for x, t in zip(u, tau, strict=True)]
        mask = [(-torch.expm1(self.p * torch.log1p(-x))) ** (1.0 / self.p) for x in below]
        return [masked(m, kept) for m, kept in zip(mask, self.keep(group, thetas), strict=True)]

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ times the mask; the gradient is that of θ where kept and of κ·θ elsewhere."""
        mask, keep = group.expand(self.freeze(group, thetas, at)), group.expand(self.keep(group, thetas))
        kappa = self.kappa(group)
        return [
            straight_through(torch.where(kept, theta, kappa * theta), masked(theta.detach() * m.to(theta.dtype), kept))
            for theta, m, kept in zip(thetas, mask, keep, strict=True)
        ]

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """g where kept, κ·g elsewhere."""
        kappa = self.kappa(group)
        if kappa == 1.0:
            return list(grads)
        keep = group.expand(self.keep(group, thetas))
        return [None if g is None else torch.where(kept, g, kappa * g) for g, kept in zip(grads, keep, strict=True)]
