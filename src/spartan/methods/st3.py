"""Straight-through soft thresholding for sparse training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method, masked, straight_through
from spartan.methods.registry import register
from spartan.ops import rows
from spartan.ops.rows import RowThreshold
from spartan.patterns import magnitude
from spartan.schedules import Moment, Schedule, cubic, delayed
from spartan.sharding import cuts_rows, sum_over_cuts
from spartan.targets import Target


@register
@dataclass(frozen=True)
class ST3(Method):
    """ST-3: soft thresholding at the budget's magnitude, rescaled, dense gradient straight through.

        τ = the largest magnitude that is not kept (with N:M, of each group)
        w = s · sign(θ) · max(|θ| − τ, 0)       with a unit's mean magnitude u: s · θ · max(1 − τ/u, 0)
        θ ← θ − η · ∇L(w)                       straight through, for every θ

    s makes up for the lost magnitude, per output channel: with r = Σ_kept|θ| / Σ|θ| of the channel, s = 1.01/(r + 0.01)
    (a unit that spans several channels takes their mean).

    Args:
        rescale: False leaves out s.
        ramp: how the sparsity grows over the warm-up, from 0 to 1 of the final one; the paper's is dense for 5 of 100
            epochs, then a cubic that ends at half the run.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=ST3(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    rescale: bool = True
    ramp: Schedule = delayed(cubic(0.0, 1.0), 0.1)  # of the warm-up: a twentieth of the run

    name = "st3"
    year = 2023
    mask_rule = "top-k of |θ|, every step, shrunk by the threshold"
    gradient_rule = "g, straight through"
    reference = (
        "Vanderschueren & De Vleeschouwer, Are straight-through gradients and soft-thresholding all you need for "
        "sparse training?, WACV 2023"
    )
    refuses_nm = ""
    warmup = 0.5
    finetune = 0.0

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """The magnitude threshold for the budget."""
        group.threshold = group.top(thetas, group.k)

    @torch.no_grad()
    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """s · max(1 − τ/u, 0), so that w does not jump."""
        u, keep = group.scores(thetas), self.keep(group, thetas)
        tau = level(group, u)
        mask = [masked(shrink(x, t), kept) for x, t, kept in zip(u, tau, keep, strict=True)]
        if self.rescale:
            mask = [m * s for m, s in zip(mask, channel_scales(group, thetas, keep), strict=True)]
        return mask

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ times the mask, straight through."""
        mask, keep = group.expand(self.freeze(group, thetas, at)), group.expand(self.keep(group, thetas))
        return [
            straight_through(theta, masked(theta.detach() * m.to(theta.dtype), kept))
            for theta, m, kept in zip(thetas, mask, keep, strict=True)
        ]

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """g."""
        return list(grads)


def level(group: Group, u: Sequence[Tensor]) -> list[float | Tensor]:
    """τ ≥ 0 for each tensor: the largest score strictly below every kept one, so that what is kept survives it.

    This is the threshold's value, unless units equal to it are kept: then the next smaller score. 0 if there is none.
    With N:M it is one per group of m, given at each of its units.
    """
    assert group.threshold is not None
    if isinstance(group.threshold, RowThreshold):
        return [rows.below(x, group.threshold.n, group.threshold.m).clamp(min=0.0) for x in u]
    value, cut = group.threshold.value, group.threshold.cut
    if not isinstance(cut, Tensor) and not cut:
        return [max(value, 0.0)] * len(u)
    smaller = group.largest_over_ranks(torch.stack([_largest(masked(x, x < value)) for x in u]).max())
    if isinstance(cut, Tensor):  # the host does not know whether there are ties
        smaller = torch.where(cut > 0, smaller, torch.as_tensor(value).to(smaller.dtype).clamp(min=0.0))
    return [smaller] * len(u)


def _largest(x: Tensor) -> Tensor:
    """The largest of what may be an empty shard of numbers that are at least 0."""
    return x.max() if x.numel() else x.new_zeros(())


def shrink(u: Tensor, tau: float | Tensor) -> Tensor:
    """1 − τ/u above τ, without cancellation; 1 elsewhere, for others to mask."""
    above = u > tau
    return torch.where(above, (u - tau) / torch.where(above, u, 1.0), 1.0)


def channel_scales(group: Group, thetas: Sequence[Tensor], keep: Sequence[Tensor]) -> list[Tensor]:
    """s = 1.01/(r + 0.01) per unit, r the share of its output channels' magnitude that is kept."""
    found = []
    for i, (theta, kept, slab) in enumerate(zip(thetas, group.expand(keep), group.slabs(), strict=True)):
        dense = magnitude(theta)
        scale = torch.empty_like(dense)
        views = (_per_target(slab, x) for x in (dense, masked(dense, kept), scale))
        for before, after, s in zip(*views, strict=True):
            r = (_mean(slab[0], after) + 1e-6) / (_mean(slab[0], before) + 1e-6)
            s.copy_(1.01 / (r + 0.01))
        found.append(group.pattern.reduce(scale) / group.sizes[i])
    return found


def _mean(target: Target, x: Tensor) -> Tensor:
    """The mean over each output channel, whole even where shards cut channels."""
    axes = tuple(range(1, x.ndim))
    if not cuts_rows(target.parameter):
        return x.mean(axes, keepdim=True)
    return sum_over_cuts(target.parameter, x.sum(axes, keepdim=True)) / math.prod(target.shape[1:])


def _per_target(targets: Sequence[Target], x: Tensor) -> list[Tensor]:
    """One view per target of a tensor over all of them, which stand there in the order of their memory."""
    if len(targets) == 1:
        return [x]
    found, start = [], 0
    for target, flat in zip(targets, x.split([t.numel for t in targets]), strict=True):
        rows = tuple(math.prod(target.shape[i + 1 :]) for i in range(len(target.shape)))
        found.append(flat.as_strided(target.shape, target.dense_stride or rows, x.storage_offset() + start))
        start += target.numel
    return found
