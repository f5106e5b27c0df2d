"""Soft threshold reparameterization: thresholds that are learned, one per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spartan.groups import Group
from spartan.methods.base import Method, masked
from spartan.methods.registry import register
from spartan.ops.select import Threshold
from spartan.schedules import Moment


@register
@dataclass(frozen=True)
class STR(Method):
    """STR: soft thresholding with a learned threshold per layer, shifted together to meet the budget.

        z = |θ| − sigmoid(s)                          s: one learned number per layer
        w = sign(θ) · min(max(z − λ, 0), |θ|)         λ: the largest z that is not kept, a constant for the gradient
        θ ← θ − η · [kept] ⊙ g,  s ← s − η · (∂w/∂s)ᵀ g

    The learned thresholds decide how the budget is spread over the layers of a group. With a unit's mean magnitude u in
    the place of |θ|, w = θ · min(max(z − λ, 0), u)/u.

    Args:
        exact: False is the paper's own form, λ = 0: weight decay on s steers the sparsity, `sparsity` is not met.
        init: s at the start. The paper's ResNet-50 starts from −3200, where sigmoid(s) and its slope are 0, and relies
            on weight decay over 100 epochs to bring s up; −5 learns from the first step.
        decay: weight decay of s; the paper's is that of the weights, and is what makes its own form sparse. None is the
            optimizer's default, which is 0 where each of its parameter groups has one of its own, as in the recipes. For
            the exact form it hardly matters: it moves all thresholds together, and λ takes that back.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method="str", warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    exact: bool = True
    init: float = -5.0
    decay: float | None = None

    name = "str"
    year = 2020
    mask_rule = "top-k of |θ| − sigmoid(s), s learned per layer, shrunk by the threshold"
    gradient_rule = "VJP: g where kept, else 0; s learns too"
    needs = "one learned threshold per layer"
    reference = "Kusupati et al., Soft threshold weight reparameterization for learnable sparsity, ICML 2020"
    refuses_nm = "its learned thresholds divide the budget among layers, and with N:M there is nothing to divide"

    def __post_init__(self) -> None:
        if not math.isfinite(self.init):
            raise ValueError(f"STR: init={self.init!r}; a finite number is needed")
        if self.decay is not None and not 0 <= self.decay < math.inf:
            raise ValueError(
                f"STR: decay={self.decay!r} is not a weight decay; None or a number of at least 0 is needed"
            )

    @property
    def learned_options(self) -> dict[str, Any]:  # type: ignore[override]
        """The weight decay of s."""
        return {} if self.decay is None else {"weight_decay": self.decay}

    @property
    def sparse_from(self) -> Literal["warmup", "never"]:  # type: ignore[override]
        """From when the model meets its sparsity."""
        return "warmup" if self.exact else "never"

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """s, one entry per target."""
        u = group.scores(thetas)[0]
        group.learned["s"] = nn.Parameter(torch.full((len(group.targets),), self.init, dtype=u.dtype, device=u.device))

    def scores(self, group: Group, u: Sequence[Tensor]) -> list[Tensor]:
        """z = u − sigmoid(s) of every unit."""
        t = torch.sigmoid(group.learned["s"])
        if group.fused:
            sizes = torch.tensor([target.numel for target in group.targets], device=t.device)
            return [u[0] - t.repeat_interleave(sizes, output_size=u[0].numel())]
        return [x - t[i] for i, x in enumerate(u)]

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """λ for the budget; the paper's own form has none."""
        if not self.exact:
            group.threshold = Threshold(0.0)
            return
        group.threshold = group.select(self.scores(group, group.scores(thetas)), group.k)

    @torch.no_grad()
    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """z above λ."""
        assert group.threshold is not None
        return group.keep(self.scores(group, group.scores(thetas)), group.threshold)

    def mask(self, group: Group, thetas: Sequence[Tensor], keep: Sequence[Tensor]) -> list[Tensor]:
        """min(max(z − λ, 0), u)/u per unit, differentiable in θ and s."""
        u = group.scores(thetas)
        z = self.scores(group, u)
        shift = below(group, [x.detach() for x in z])
        found = []
        for x, over, kept in zip(u, z, keep, strict=True):
            live = kept & (x > 0)  # a kept zero stays free to move, as where nothing is subtracted
            top, bottom = torch.where(live, torch.minimum(over - shift, x), 1.0), torch.where(live, x, 1.0)
            found.append(masked(top / bottom, kept))
        return found

    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """The mask as it is, so that w does not jump."""
        with torch.no_grad():
            return self.mask(group, thetas, self.keep(group, thetas))

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ times the mask."""
        keep = self.keep(group, thetas)
        mask = group.expand(self.mask(group, thetas, keep))
        return [
            masked(theta * m.to(theta.dtype), kept)
            for theta, m, kept in zip(thetas, mask, group.expand(keep), strict=True)
        ]


def below(group: Group, z: Sequence[Tensor]) -> float | Tensor:
    """λ: the largest z strictly below every kept one; −∞ if there is none."""
    assert group.threshold is not None
    value, cut = group.threshold.value, group.threshold.cut
    if not isinstance(cut, Tensor) and not cut:
        return value
    there = [torch.where(x < value, x, -math.inf).max() for x in z if x.numel()]  # a shard may be empty
    smaller = group.largest_over_ranks(torch.stack([z[0].new_tensor(-math.inf), *there]).max())
    if isinstance(cut, Tensor):  # the host does not know whether there are ties
        smaller = torch.where(cut > 0, smaller, torch.as_tensor(value).to(smaller.dtype))
    return smaller
