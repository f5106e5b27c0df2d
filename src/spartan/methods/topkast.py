"""Top-K always sparse training, or dual averaging (the paper's Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.budgets import check_sparsity
from spartan.groups import Group
from spartan.methods.base import Method, masked, masked_gradients, straight_through
from spartan.methods.registry import register
from spartan.ops.select import EVERYTHING, Threshold
from spartan.schedules import Moment


@register
@dataclass(frozen=True)
class TopKAST(Method):
    """Top-K always sparse training: hard top-k forward, dense gradient straight through.

        θ̃ = Π_k(θ)                      A: the k units of largest magnitude
        θ ← θ − η · [B] ⊙ ∇L(θ̃)         B ⊇ A: the units that get a gradient, by magnitude

    Args:
        backward_sparsity: fraction that gets no gradient; 0, the best setting of the paper, updates everything. It
            must not exceed the sparsity.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=TopKAST(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    backward_sparsity: float = 0.0

    name = "topkast"
    year = 2020
    mask_rule = "top-k of |θ|, every step"
    gradient_rule = "g, straight through (for B ⊇ A)"
    reference = "Jayakumar et al., Top-KAST: Top-K always sparse training, NeurIPS 2020"

    def __post_init__(self) -> None:
        check_sparsity(self.backward_sparsity, "TopKAST: backward_sparsity")

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """B must hold A."""
        if self.backward_sparsity > group.sparsity:
            raise ValueError(
                f"TopKAST: backward_sparsity={self.backward_sparsity} exceeds the sparsity {group.sparsity:.6g} of "
                f"{group.targets[0].name}; units that are used must get a gradient"
            )

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """A for the forward pass, B for the gradient."""
        scores = group.scores(thetas)
        group.threshold = group.select(scores, group.k)
        if self.backward_sparsity:
            b = group.select(scores, max(group.k, (1.0 - self.backward_sparsity) * group.total))
            group.tensors["B"] = torch.tensor([b.value, b.cut], dtype=torch.float64)

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ̃ = Π_k(θ), with the gradient of θ on B."""
        in_a = group.expand(self.keep(group, thetas))
        in_b = group.expand(group.keep(group.scores(thetas), self._b(group)))
        return [
            straight_through(masked(theta, b), masked(theta, a)) for theta, a, b in zip(thetas, in_a, in_b, strict=True)
        ]

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """[B] ⊙ g."""
        if not self.backward_sparsity:
            return list(grads)
        in_b = group.expand(group.keep(group.scores(thetas), self._b(group)))
        return masked_gradients(grads, in_b)

    def _b(self, group: Group) -> Threshold:
        if not self.backward_sparsity:
            return EVERYTHING
        value, cut = group.tensors["B"].tolist()
        return Threshold(value, int(cut))
