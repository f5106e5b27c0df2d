"""Masks by learned scores: what movement pruning and OptG have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method, masked, masked_gradients, straight_through
from spartan.schedules import Moment

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine


class ScoredMasks(Method):
    """w = θ ⊙ M with M = [score among the k largest]; what is learned, a number per unit, sees through M as if it were it.

    `ranked` tells the scores. They are what is learned, or something made from it. The kept units of tensor i are in
    `group.tensors["mask{i}"]` until the next are chosen.
    """

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """The units of largest score that fit the budget."""
        scores = self.ranked(group, thetas)
        group.threshold = group.select(scores, group.k)
        for i, mask in enumerate(group.keep(scores, group.threshold)):
            group.tensors[f"mask{i}"] = mask

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """The stored masks."""
        return [group.tensors[f"mask{i}"] for i in range(len(thetas))]

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """w = θ ⊙ M, straight through M to what is learned."""
        keep = self.keep(group, thetas)
        hard = [straight_through(s, kept.to(s.dtype)) for s, kept in zip(group.learned.values(), keep, strict=True)]
        product = [theta * m.to(theta.dtype) for theta, m in zip(thetas, group.expand(hard), strict=True)]
        return [
            straight_through(w, masked(w.detach(), kept))  # no −0.0
            for w, kept in zip(product, group.expand(keep), strict=True)
        ]

    def write_fast(self, group: Group, thetas: Sequence[Tensor], engine: Engine) -> bool:
        """θ ⊙ M."""
        return engine.project_stored(self.keep(group, thetas))

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """M ⊙ g; and for what is learned, into its `.grad`, Σ g·θ over each unit, kept or not."""
        for s, theta, g in zip(group.learned.values(), thetas, grads, strict=True):
            if g is not None:
                pull = group.pattern.reduce((g * theta).to(s.dtype))
                s.grad = pull if s.grad is None else s.grad + pull
        return masked_gradients(grads, group.expand(self.keep(group, thetas)))
