"""Masks that a method stores and rewires: what static, SET and RigL have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method, generator, masked, masked_gradients
from spartan.schedules import Moment


class StoredMasks(Method):
    """Sparse from the first step: w = [kept] ⊙ θ, with the kept units of tensor i in `group.tensors["mask{i}"]`."""

    sparse_from = "start"
    budget = "erk"
    warmup = 0.0
    finetune = 0.25

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """A random mask."""
        nothing = [torch.zeros(n, dtype=torch.bool, device=t.device) for n, t in zip(group.units, thetas, strict=True)]
        self.store(group, grow(group, nothing, random_ranks(group, thetas, at)))

    def store(self, group: Group, masks: Sequence[Tensor]) -> None:
        """These are the kept units now."""
        for i, mask in enumerate(masks):
            group.tensors[f"mask{i}"] = mask

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """The stored masks."""
        return [group.tensors[f"mask{i}"] for i in range(len(thetas))]

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """w = [kept] ⊙ θ."""
        keep = group.expand(self.keep(group, thetas))
        return [masked(theta, kept) for theta, kept in zip(thetas, keep, strict=True)]

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """[kept] ⊙ g."""
        keep = group.expand(self.keep(group, thetas))
        return masked_gradients(grads, keep)


class Rewiring(StoredMasks):
    """Every few steps, until the mask is fixed, some of the kept units give way to others."""

    every: int
    fraction: float

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

    def updates_at(self, step: int, at: Moment) -> bool:
        """Whether the mask is rewired at this step: not at the first, nor once it is fixed."""
        return 0 < step < at.freeze_step and step % self.every == 0

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """Rewire the mask if it is time; while a warm-up lowers the budget, keep what is largest of it."""
        kept = old = self.keep(group, thetas)
        if at.step <= at.warmup_steps:
            kept = fit(group, thetas, kept)
        # Once per step, however often this is called; between its updates a run never looks at the tensor.
        if self.updates_at(at.step, at) and int(group.tensors["rewired"]) != at.step:
            group.tensors["rewired"] = torch.tensor(at.step)
            kept = self.rewire(group, thetas, kept, at)
            start_at_zero(group, thetas, old, kept)
        self.store(group, kept)

    def rewire(self, group: Group, thetas: Sequence[Tensor], kept: list[Tensor], at: Moment) -> list[Tensor]:
        """The next mask."""
        raise NotImplementedError

    def fraction_at(self, at: Moment) -> float:
        """f_t = f/2 · (1 + cos(πt/T_end)), with T_end the step at which the mask is fixed."""
        return 0.5 * self.fraction * (1.0 + math.cos(math.pi * at.progress))


def random_ranks(group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
    """A random number per unit, of this run and step: the same for a weight, however it lies in memory."""
    rng, device = generator(at, thetas[0].device, stream=group.index), thetas[0].device
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
    counts = torch.stack([mask.sum() for mask in masks]).tolist()
    return math.fsum(n * c for n, c in zip(counts, group.unit_costs, strict=True))


def first(group: Group, masks: Sequence[Tensor], ranks: Sequence[Tensor], k: float) -> list[Tensor]:
    """Of the units of a mask, those of highest rank that fit a budget; exact for any cost, ties by position."""
    ranks = [torch.where(mask, rank, -math.inf) for mask, rank in zip(masks, ranks, strict=True)]
    found = group.keep(ranks, group.select(ranks, k))
    return [keep & mask for keep, mask in zip(found, masks, strict=True)]


def fit(group: Group, thetas: Sequence[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """The largest of the kept units that fit the budget of this moment."""
    return first(group, kept, group.scores(thetas), group.k)


def drop(group: Group, thetas: Sequence[Tensor], kept: list[Tensor], fraction: float) -> list[Tensor]:
    """The kept units without that fraction of their cost, rounded down to whole units, that is smallest in |θ|."""
    smallest_first = [-u for u in group.scores(thetas)]
    gone = first(group, kept, smallest_first, fraction * cost_of(group, kept))
    return [mask & ~out for mask, out in zip(kept, gone, strict=True)]


def grow(group: Group, stay: list[Tensor], ranks: Sequence[Tensor]) -> list[Tensor]:
    """The units that stay, and of all others those of highest rank that fit the rest of the budget."""
    others = [~mask for mask in stay]
    grown = first(group, others, ranks, max(0.0, group.k - cost_of(group, stay)))
    return [mask | new for mask, new in zip(stay, grown, strict=True)]


def start_at_zero(group: Group, thetas: Sequence[Tensor], old: list[Tensor], new: list[Tensor]) -> None:
    """θ ← 0 for the units that were not kept before.

    In place, in the dense weights that the run owns: there a unit that is not kept still moves by momentum and weight
    decay, unseen by the model, and w would start from where it had drifted.
    """
    grown = group.expand([now & ~before for now, before in zip(new, old, strict=True)])
    for theta, where in zip(thetas, grown, strict=True):
        theta.masked_fill_(where, 0.0)
