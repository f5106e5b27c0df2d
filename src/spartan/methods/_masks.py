"""Masks that a method stores and rewires: what static, SET and RigL have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method, generator, masked, masked_gradients
from spartan.ops.parts import slack
from spartan.ops.select import Threshold
from spartan.schedules import Moment

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine

# What units cost together: a number, or one that is still on the device.
Spent = float | Tensor


class StoredMasks(Method):
    """Sparse from the first step: w = [kept] ⊙ θ, with the kept units of tensor i in `group.tensors["mask{i}"]`.

    No threshold decides what is kept; `group.threshold` tells what it costs.
    """

    sparse_from = "start"
    random = True
    budget = "erk"
    warmup = 0.0
    finetune = 0.25

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """A random mask."""
        nothing = [torch.zeros(n, dtype=torch.bool, device=t.device) for n, t in zip(group.units, thetas, strict=True)]
        self.store(group, *grow(group, nothing, 0.0, random_ranks(group, thetas, at)))

    def store(self, group: Group, masks: Sequence[Tensor], cost: Spent) -> None:
        """These are the kept units now, and this is what they cost."""
        for i, mask in enumerate(masks):
            group.tensors[f"mask{i}"] = mask
        group.threshold = Threshold(math.inf, cost=cost)

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """The stored masks."""
        return [group.tensors[f"mask{i}"] for i in range(len(thetas))]

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """w = [kept] ⊙ θ."""
        keep = group.expand(self.keep(group, thetas))
        return [masked(theta, kept) for theta, kept in zip(thetas, keep, strict=True)]

    def write_fast(self, group: Group, thetas: Sequence[Tensor], engine: Engine) -> bool:
        """[kept] ⊙ θ."""
        return engine.project_stored(self.keep(group, thetas))

    def transform_fast(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], engine: Engine
    ) -> bool:
        """[kept] ⊙ g."""
        return engine.where_stored(grads, self.keep(group, thetas))

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """[kept] ⊙ g."""
        keep = group.expand(self.keep(group, thetas))
        return masked_gradients(grads, keep)


class Rewiring(StoredMasks):
    """Every few steps, until the mask is fixed, some of the kept units give way to others."""

    refuses_nm = "it replaces a fraction of all kept weights, and with N:M each group would have to give up as many"

    every: int
    fraction: float

    grows_from_zero = True

    def __post_init__(self) -> None:
        who = type(self).__name__
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{who}: every={self.every!r} is not a number of optimizer steps; an int ≥ 1 is needed")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"{who}: fraction={self.fraction!r} is not a fraction of the kept units; 0 to 1 is needed")

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """A random mask, never rewired."""
        super().setup(group, thetas, at)
        group.tensors["rewired"] = torch.tensor(0)

    def period(self, at: Moment) -> int:
        """Steps between two updates of the mask."""
        return self.every

    def updates_at(self, step: int, at: Moment) -> bool:
        """Whether the mask is rewired at this step: not at the first, nor once it is fixed."""
        return 0 < step < at.freeze_step and step % self.period(at) == 0

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """Rewire the mask if it is time; while a warm-up lowers the budget, keep what is largest of it."""
        old = self.keep(group, thetas)
        if 0 < at.step <= at.warmup_steps:
            self.store(group, *fit(group, thetas, old))
        # Once per step, however often this is called; between its updates a run never looks at the tensor.
        if self.updates_at(at.step, at) and int(group.tensors["rewired"]) != at.step:
            group.tensors["rewired"] = torch.tensor(at.step)
            kept = self.keep(group, thetas)
            stay, cost = self.drop(group, thetas, kept, at)
            ranks = self.growth(group, thetas, at)
            if ranks is not None:
                new, spent = grow(group, stay, cost, ranks)
                self.begin(group, thetas, [now & ~before for now, before in zip(new, old, strict=True)])
                self.store(group, new, spent)

    def drop(
        self, group: Group, thetas: Sequence[Tensor], kept: list[Tensor], at: Moment
    ) -> tuple[list[Tensor], float]:
        """What stays: the kept units without the smallest in |θ|; and its cost."""
        return drop(group, kept, group.scores(thetas), self.fraction_at(at))

    def growth(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor] | None:
        """A rank per unit: which come first to fill the budget again. None changes nothing."""
        raise NotImplementedError

    def begin(self, group: Group, thetas: Sequence[Tensor], grown: list[Tensor]) -> None:
        """Where units that were not kept before start from."""
        start_at_zero(group, thetas, group.expand(grown))

    def fraction_at(self, at: Moment) -> float:
        """f_t = f/2 · (1 + cos(πt/T_end)), with T_end the step at which the mask is fixed."""
        return 0.5 * self.fraction * (1.0 + math.cos(math.pi * at.progress))


def random_ranks(group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
    """A random number per unit, of this run and step: the same for a weight, however it lies in memory."""
    rng, device = generator(at, thetas[0].device, stream=group.index), thetas[0].device
    if group.places:  # drawn for the whole weight, one after the other, so that processes agree
        return [
            place.cut_out(torch.rand(n, generator=rng, device=device))
            for place, n in zip(group.places, group.all_units, strict=True)
        ]
    if not group.fused:
        return [torch.rand(n, generator=rng, device=device) for n in group.units]
    flat = []
    for target in group.targets:
        drawn = torch.rand(target.shape, generator=rng, device=device)
        if target.dense_stride is not None:  # a fused group holds its weights in the order of their memory
            drawn = torch.empty_strided(target.shape, target.dense_stride, device=device).copy_(drawn)
            drawn = drawn.as_strided((target.numel,), (1,))
        flat.append(drawn.reshape(-1))
    return [torch.cat(flat)]


def cost_of(group: Group, masks: Sequence[Tensor]) -> float:
    """What the units of a mask cost."""
    counts = group.sum_over_ranks([mask.sum() for mask in masks]).tolist()
    return math.fsum(n * c for n, c in zip(counts, group.unit_costs, strict=True))


def first(
    group: Group, masks: Sequence[Tensor], cost: Spent, ranks: Sequence[Tensor], k: float
) -> tuple[list[Tensor], Spent]:
    """Of the units of a mask that costs so much, those of highest rank that fit a budget, and their cost.

    Exact for any cost, ties by position.
    """
    ranks = [torch.where(mask, rank, -math.inf) for mask, rank in zip(masks, ranks, strict=True)]
    threshold = group.select(ranks, k)
    found = group.keep(ranks, threshold)
    # Units from outside the mask are reached only once all of it is taken.
    return [keep & mask for keep, mask in zip(found, masks, strict=True)], _smaller(_spent(group, threshold, k), cost)


def _spent(group: Group, threshold: Threshold, k: float) -> Spent:
    """What fits a budget costs: known beforehand where all units cost the same, so that nobody waits for the device."""
    each = group.unit_costs[0]
    if any(c != each for c in group.unit_costs):
        return threshold.cost
    return each * math.floor((k + slack(k, each)) / each)


def _smaller(a: Spent, b: Spent) -> Spent:
    if isinstance(a, Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def fit(group: Group, thetas: Sequence[Tensor], kept: list[Tensor]) -> tuple[list[Tensor], Spent]:
    """The largest of the kept units that fit the budget of this moment, and their cost; the device is not waited for."""
    assert group.threshold is not None
    return first(group, kept, group.threshold.cost, group.scores(thetas), group.k)


def drop(
    group: Group, kept: list[Tensor], importance: Sequence[Tensor], fraction: float, up: bool = False
) -> tuple[list[Tensor], float]:
    """The kept units that the group has stored, without that fraction of their cost that matters least, and what they cost.

    Rounded to whole units: down, or `up`.
    """
    assert group.threshold is not None
    cost = group.threshold.cost
    if isinstance(cost, Tensor):  # units of different cost: only the device knows
        cost = cost_of(group, kept)
    k = fraction * cost + (up and fraction > 0) * (1.0 - 1e-6) * max(group.unit_costs)
    gone, less = first(group, kept, cost, [-u for u in importance], min(k, cost))
    stay = [mask & ~out for mask, out in zip(kept, gone, strict=True)]
    return stay, cost_of(group, stay) if isinstance(less, Tensor) else cost - less


def grow(group: Group, stay: list[Tensor], cost: float, ranks: Sequence[Tensor]) -> tuple[list[Tensor], Spent]:
    """The units that stay, which cost so much, and of all others those of highest rank that fit; and the cost of both."""
    others = [~mask for mask in stay]
    grown, more = first(group, others, group.total - cost, ranks, max(0.0, group.k - cost))
    return [mask | new for mask, new in zip(stay, grown, strict=True)], cost + more


def start_at_zero(group: Group, thetas: Sequence[Tensor], where: Sequence[Tensor]) -> None:
    """θ ← 0 there.

    In place, in the dense weights that the run owns: there a unit that is not kept still moves by momentum and weight
    decay, unseen by the model, and w would start from where it had drifted.
    """
    for theta, here in zip(thetas, where, strict=True):
        theta.masked_fill_(here, 0.0)


class ByGradient(Rewiring):
    """What grows has the largest Σ|g| over its unit, per cost: the gradient for w, dense, of the step just taken."""

    def observe(self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment) -> None:
        """Remember Σ|g| of every unit if the mask is rewired after this step."""
        if not self.updates_at(at.step + 1, at) or all(g is None for g in grads):
            return
        dense = [torch.zeros_like(theta) if g is None else g for theta, g in zip(thetas, grads, strict=True)]
        remember(group, "growth", group.scores(dense), grads)

    def growth(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor] | None:
        """Σ|g|; nothing where the loss has not reached."""
        return recall(group, "growth")


def remember(group: Group, what: str, units: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Keep one number per unit until the mask is rewired.

    A missing gradient counts as zero, but leaves what another optimizer's part of the step has shown.
    """
    for i, (u, g) in enumerate(zip(units, grads, strict=True)):
        if g is not None or f"{what}{i}" not in group.tensors:
            group.tensors[f"{what}{i}"] = u


def recall(group: Group, what: str) -> list[Tensor] | None:
    """What was remembered, once."""
    if f"{what}0" not in group.tensors:
        return None
    return [group.tensors.pop(f"{what}{i}") for i in range(len(group.units))]
