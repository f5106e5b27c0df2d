"""RigL: the rigged lottery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods._masks import Rewiring, drop, grow
from spartan.methods.registry import register
from spartan.schedules import Moment


@register
@dataclass(frozen=True)
class RigL(Rewiring):
    """RigL: drop the smallest weights now and then, grow as many where the gradient is largest.

        θ ← θ − η · M ⊙ ∇L(M ⊙ θ)                             at every step
        M ← M minus the ⌊f_t·|M|⌋ units smallest in |θ|        every n steps, in each layer, until the mask is fixed
        M ← M plus as many of the others, largest in |∇L(M ⊙ θ)|, from θ = 0
        f_t = f/2 · (1 + cos(πt/T_end))                        T_end: when finetuning begins, at 75% by default

    The gradient is the one of the step just taken, for all weights, accumulated as the optimizer sees it. (In the
    paper's code the mask's update takes the place of that step.) A unit that is dropped and grown again at once keeps
    its value. Layers share a budget with `budget="global"`.

    Args:
        every: n, optimizer steps between two updates of the mask.
        fraction: f, of the kept units, what the first updates replace.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=1000, method=RigL(every=50))
        >>> int((model.weight != 0).sum())
        16
    """

    every: int = 100
    fraction: float = 0.3

    name = "rigl"
    year = 2020
    mask_rule = "random; every n steps the smallest of |θ| give way to the largest of |g|"
    gradient_rule = "g where kept, else 0"
    needs = "dense gradients, every n steps"
    reference = "Evci et al., Rigging the lottery: making all tickets winners, ICML 2020"

    def observe(self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment) -> None:
        """Remember Σ|g| of every unit, per cost, if the mask is rewired after this step."""
        if not self.updates_at(at.step + 1, at) or all(g is None for g in grads):
            return
        dense = [torch.zeros_like(theta) if g is None else g for theta, g in zip(thetas, grads, strict=True)]
        for i, (u, g) in enumerate(zip(group.scores(dense), grads, strict=True)):
            # A missing gradient counts as zero, but leaves what another optimizer's part of the step has shown.
            if g is not None or f"growth{i}" not in group.tensors:
                group.tensors[f"growth{i}"] = u

    def rewire(self, group: Group, thetas: Sequence[Tensor], kept: list[Tensor], at: Moment) -> list[Tensor]:
        """Drop by |θ|, grow by |g|; nothing where the loss has not reached."""
        if "growth0" not in group.tensors:
            return kept
        growth = [group.tensors.pop(f"growth{i}") for i in range(len(thetas))]
        return grow(group, drop(group, thetas, kept, self.fraction_at(at)), growth)
