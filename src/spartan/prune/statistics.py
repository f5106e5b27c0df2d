"""Adds up what criteria want to know of the inputs of a layer."""

import torch
from torch import Tensor

from spartan.prune.layout import Layout


class Statistics:
    """Σx² of every input of a layer, or with `moments` Σ x xᵀ, for each group of its rows.

    Args:
        layout: the layer.
        moments: whether products of inputs are summed too.
    """

    def __init__(self, layout: Layout, moments: bool) -> None:
        self.moments, self.dtype = moments, layout.dtype
        shape = (layout.groups, layout.columns, layout.columns)[: 3 if moments else 2]
        self.sums = torch.zeros(shape, dtype=layout.dtype, device=layout.target.local.device)
        self.samples = [0] * layout.groups

    def add(self, groups: range, x: Tensor) -> None:
        """Inputs of some groups: (groups, or 1 for all of them) × samples × columns."""
        x = x.to(self.dtype)
        mine = self.sums[groups.start : groups.stop]
        if not self.moments:
            mine += x.square().sum(1)
        elif len(x) == len(groups):
            mine.baddbmm_(x.mT, x)  # without a second matrix of that size
        else:
            mine += x.mT @ x
        for group in groups:
            self.samples[group] += x.shape[1]

    @property
    def finite(self) -> bool:
        """Whether all inputs were numbers, and none too large to square."""
        return bool(torch.isfinite(self.sums).all())
