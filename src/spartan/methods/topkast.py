"""Top-K always sparse training, or dual averaging (the paper's Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spartan.budgets import check_sparsity
from spartan.groups import Group
from spartan.methods.base import Method, masked, masked_gradients, straight_through
from spartan.methods.registry import register
from spartan.ops.select import EVERYTHING
from spartan.schedules import Moment

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine


@register
@dataclass(frozen=True)
class TopKAST(Method):
    """Top-K always sparse training: hard top-k forward, dense gradient straight through.

        θ̃ = Π_k(θ)                                   A: the k units of largest magnitude
        θ ← θ − η · [B] ⊙ (∇L(θ̃) + λ · r ⊙ θ)        B ⊇ A: the units that get a gradient, by magnitude
        r = 1 on A, 1/D on B∖A                       D: the density of the forward pass at this moment

    λ is the paper's exploration loss (Sec. 2.3): units that are used are held back a little, units at the door a lot,
    the rest not at all. The paper calls it L2 regularisation and prints |θ| and |θ|/D; it is taken here as
    λ/2 · Σ r·θ², on the scale of SGD's `weight_decay`, whose place it takes. Weight decay of the optimizer comes on
    top, on all units; set it to 0 for the targets to leave those outside B alone. The penalty ends where finetuning
    begins.

    It is added once per optimizer step, when gradients become those for θ, after they are accumulated, and is not
    scaled with the loss. With a GradScaler, call `scaler.unscale_(optimizer)` first, as the README does; fused
    optimizers need it, others unscale by themselves before they step.

    Args:
        backward_sparsity: fraction that gets no gradient; 0, the best setting of the paper, updates everything. It
            must not exceed the sparsity.
        exploration: λ; 0 leaves the penalty out, as Spartan's paper does. 1e-4 is ResNet-50's usual weight decay.
        every: optimizer steps between two choices of A and B; in between they are fixed. While the budget still
            changes, in the warm-up, they are chosen at every step. What is in B but not in A moves unseen for that
            long, which a short run does not bear.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=TopKAST(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    backward_sparsity: float = 0.0
    exploration: float = 0.0
    every: int = 1

    name = "topkast"
    year = 2020
    mask_rule = "top-k of |θ|, every step"
    gradient_rule = "g, straight through (for B ⊇ A)"
    reference = "Jayakumar et al., Top-KAST: Top-K always sparse training, NeurIPS 2020"
    refuses_nm = ""

    def __post_init__(self) -> None:
        check_sparsity(self.backward_sparsity, "TopKAST: backward_sparsity")
        if not 0 <= self.exploration < math.inf:
            raise ValueError(
                f"TopKAST: exploration={self.exploration!r} is not the weight of a penalty; a finite number ≥ 0 is "
                "needed, such as 1e-4"
            )
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"TopKAST: every={self.every!r} is not a number of optimizer steps; an int ≥ 1 is needed")

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """The penalty does not scale with the loss."""
        return not self.exploration

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """B must hold A."""
        if self.backward_sparsity > group.sparsity:
            raise ValueError(
                f"TopKAST: backward_sparsity={self.backward_sparsity} exceeds the sparsity {group.sparsity:.6g} of "
                f"{group.targets[0].name}; units that are used must get a gradient"
            )

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """A for the forward pass, B for the gradient."""
        if at.step % self.every and at.step > at.warmup_steps:
            return
        group.threshold, b = group.top(thetas, group.k), EVERYTHING
        if self.backward_sparsity:
            b = group.select(group.scores(thetas), max(group.k, (1.0 - self.backward_sparsity) * group.total))
            group.tensors["B"] = b.pair()
        if self.every > 1:  # θ moves on, so that thresholds would no longer tell what was chosen
            scores = group.scores(thetas)
            for i, (in_a, in_b) in enumerate(
                zip(group.keep(scores, group.threshold), group.keep(scores, b), strict=True)
            ):
                group.tensors[f"A{i}"], group.tensors[f"B{i}"] = in_a, in_b

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """A."""
        if self.every > 1:
            return [group.tensors[f"A{i}"] for i in range(len(thetas))]
        return super().keep(group, thetas)

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ̃ = Π_k(θ), with the gradient of θ on B."""
        in_a, in_b = group.expand(self.keep(group, thetas)), group.expand(self.updated(group, thetas))
        return [
            straight_through(masked(theta, b), masked(theta, a)) for theta, a, b in zip(thetas, in_a, in_b, strict=True)
        ]

    def write_fast(self, group: Group, thetas: Sequence[Tensor], engine: Engine) -> bool:
        """[A] ⊙ θ."""
        if self.every > 1:
            return False
        engine.project(soft=False)
        return True

    def transform_fast(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], engine: Engine
    ) -> bool:
        """Nothing is to be done where every unit gets its gradient as it is."""
        return not self.backward_sparsity and not self.exploration

    def penalty(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor] | None:
        """λ · [B] ⊙ r ⊙ θ."""
        if not self.exploration:
            return None
        on_a, off_a = self.exploration, self.exploration * group.total / group.k
        in_a = group.expand(self.keep(group, thetas))
        found = [torch.where(a, on_a * theta, off_a * theta) for theta, a in zip(thetas, in_a, strict=True)]
        if self.backward_sparsity:
            in_b = group.expand(self.updated(group, thetas))
            found = [masked(pull, b) for pull, b in zip(found, in_b, strict=True)]
        return found

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """[B] ⊙ g, and the penalty."""
        found = list(grads)
        if self.backward_sparsity:
            found = masked_gradients(grads, group.expand(self.updated(group, thetas)))
        added = self.penalty(group, thetas, at)
        if added is None or all(g is None for g in grads):
            return found
        return [pull if g is None else g + pull for g, pull in zip(found, added, strict=True)]

    def updated(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """B: bool per unit, what gets a gradient now."""
        if self.every > 1:
            return [group.tensors[f"B{i}"] for i in range(len(thetas))]
        b = EVERYTHING
        if self.backward_sparsity:
            assert group.threshold is not None
            value, cut = group.tensors["B"].unbind()
            on_device = isinstance(group.threshold.value, Tensor)
            # Of the same kind as A's.
            b = replace(group.threshold, value=value if on_device else float(value), cut=cut if on_device else int(cut))
        return group.keep(group.scores(thetas), b)
