"""No sparsity at all: the control of every comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.ops.select import Threshold
from spartan.schedules import Moment, constant


@register
@dataclass(frozen=True)
class Dense(Method):
    """Dense training, untouched: w = θ.

    Counts steps and weights like the others, holds no second copy of the weights and changes nothing.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> spartan.Sparsifier(model, sparsity=0.9, total_steps=10, method="dense").stats.density
        1.0
    """

    name = "dense"
    year = 1986
    mask_rule = "everything is kept"
    gradient_rule = "g"
    reference = "Rumelhart, Hinton & Williams, Learning representations by back-propagating errors, 1986"
    sparse_from = "never"
    refuses_nm = ""
    identity = True
    ramp = constant(0.0)

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """Keep everything."""
        group.threshold = Threshold(-math.inf, cost=group.total)

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """w = θ."""
        return list(thetas)

    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """All ones."""
        return [torch.ones(n, dtype=t.dtype, device=t.device) for n, t in zip(group.units, thetas, strict=True)]
