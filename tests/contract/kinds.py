"""Methods of the kinds that the base class must carry but the library does not ship yet, written as a user would.

One learns scores, one updates masks every few steps and looks at dense gradients, one draws random numbers each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spartan.groups import Group
from spartan.methods.base import Method, generator, masked, straight_through
from spartan.ops.select import select
from spartan.schedules import Moment


@dataclass(frozen=True)
class LearnedScores(Method):
    """Keep the units whose learned scores are largest; scores learn straight through the mask."""

    name = "test-learned"
    year = 2020
    mask_rule = "top-k of learned scores"
    gradient_rule = "VJP"
    needs = "one score per unit"
    reference = "a test"
    learned_options = {"weight_decay": 0.0}  # noqa: RUF012

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        for i, u in enumerate(group.scores(thetas)):
            group.learned[f"phi{i}"] = nn.Parameter(u.detach().clone())

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        group.threshold = select(group.parts([p.detach() for p in group.learned.values()]), group.k)

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        assert group.threshold is not None
        return group.keep([p.detach() for p in group.learned.values()], group.threshold)

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        keep = self.keep(group, thetas)
        soft = [straight_through(phi, k.to(phi.dtype)) for phi, k in zip(group.learned.values(), keep, strict=True)]
        product = [theta * m for theta, m in zip(thetas, group.expand(soft), strict=True)]
        return [straight_through(w, masked(w, k)) for w, k in zip(product, group.expand(keep), strict=True)]


@dataclass(frozen=True)
class Regrowing(Method):
    """Sparse from the start; every third step the weakest kept units make room for those with large gradients."""

    name = "test-regrowing"
    year = 2020
    mask_rule = "kept by |θ|, grown by |g|, every 3 steps"
    gradient_rule = "VJP"
    needs = "dense gradients"
    reference = "a test"
    sparse_from = "start"
    budget = "erk"
    warmup = 0.0

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        for i, u in enumerate(group.scores(thetas)):
            group.tensors[f"mask{i}"] = torch.zeros_like(u, dtype=torch.bool)
            group.tensors[f"growth{i}"] = u.detach().clone()

    def observe(self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment) -> None:
        for i, g in enumerate(grads):
            if g is not None:
                group.tensors[f"growth{i}"] = group.pattern.reduce(g.abs())

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        if at.step % 3:
            return
        rank = []
        for i, u in enumerate(group.scores(thetas)):
            mask, growth = group.tensors[f"mask{i}"], group.tensors[f"growth{i}"]
            strong = mask & (u >= torch.quantile(u[mask], 0.3)) if mask.any() else mask
            rank.append(torch.where(strong, 2.0 + u / (1.0 + u), growth / (1.0 + growth)))
        threshold = select(group.parts(rank), group.k)
        for i, keep in enumerate(group.keep(rank, threshold)):
            group.tensors[f"mask{i}"] = keep

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        return [group.tensors[f"mask{i}"] for i in range(len(thetas))]

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        keep = group.expand(self.keep(group, thetas))
        return [masked(theta, k) for theta, k in zip(thetas, keep, strict=True)]


@dataclass(frozen=True)
class Sampled(Method):
    """A new random mask every step, larger weights more likely to be kept."""

    name = "test-sampled"
    year = 2021
    mask_rule = "top-k of |θ| times noise"
    gradient_rule = "straight through, times the noise"
    random = True
    needs = "random numbers"
    reference = "a test"

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        noisy = [u * self._noise(u, at, i) for i, u in enumerate(group.scores(thetas))]
        threshold = select(group.parts(noisy), group.k)
        for i, keep in enumerate(group.keep(noisy, threshold)):
            group.tensors[f"mask{i}"] = keep

    def _noise(self, u: Tensor, at: Moment, i: int) -> Tensor:
        return torch.rand(u.shape, dtype=u.dtype, device=u.device, generator=generator(at, u.device, i)) + 0.5

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        return [group.tensors[f"mask{i}"] for i in range(len(thetas))]

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        keep = group.expand(self.keep(group, thetas))
        noise = group.expand([self._noise(u, at, i) for i, u in enumerate(group.scores(thetas))])
        product = [theta * n for theta, n in zip(thetas, noise, strict=True)]
        return [straight_through(w, masked(w, k)) for w, k in zip(product, keep, strict=True)]
