"""Sees the weights of a part of the problem as one flat vector of units, and adds up over it.

Methods work on such vectors: one entry per unit that this process holds, target after target. What is said of a segment
or of a target is a short vector; `at_units` and `of_targets` spread it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from spartan.problem.problem import Problem
from spartan.solvers.theta import Theta


@dataclass
class MethodState:
    """What a method knows about a part of the problem, by name; it is saved with the run."""

    per_unit: dict[str, Tensor] = field(default_factory=dict)
    per_target: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    # Parameters that join the optimizer, with an entry per unit or per target.
    learned: dict[str, nn.Parameter] = field(default_factory=dict)
    learned_per_target: dict[str, nn.Parameter] = field(default_factory=dict)

    def parameters(self) -> list[nn.Parameter]:
        """All that is learned."""
        return [*self.learned.values(), *self.learned_per_target.values()]


class Units:
    """The units of a part of the problem.

    Args:
        problem: the part.
        alias: whether θ is the parameter itself.
    """

    def __init__(self, problem: Problem, alias: bool = False) -> None:
        # On an accelerator a launch per target takes longer than the work; on a CPU tensors that fit the cache one by
        # one are faster. Slabs are what is worked on at a time.
        self.problem, self.theta, self.state = problem, Theta(problem.targets, problem.joined, alias), MethodState()
        self.joined = self.theta.flat is not None
        here = [t.local for t in problem.targets]
        self.device = here[0].device
        # Solves never run in half precision.
        self.dtype = torch.float64 if any(x.dtype == torch.float64 for x in here) else torch.float32
        self.count = sum(problem.units)
        self._constants: dict[tuple[object, ...], Tensor] = {}
        self.power = 1.0  # α, where methods see ψ = sign(θ)·|θ|^α in the place of θ

    def slabs(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """One tensor per target as what is worked on at a time; a missing one counts as zero beside others."""
        if not self.joined or all(x is None for x in tensors):
            return list(tensors[:1] if self.joined else tensors)
        pairs = zip(tensors, self.problem.targets, strict=True)
        return [self.theta.join([torch.zeros_like(t.local) if x is None else x for x, t in pairs])]

    def dense(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The same with zeros in the place of missing ones."""
        pairs = zip(tensors, self.problem.targets, strict=True)
        found = self.slabs([torch.zeros_like(t.local) if x is None else x for x, t in pairs])
        return [x for x in found if x is not None]

    def per_target(self, slabs: Sequence[Tensor]) -> list[Tensor]:
        """The reverse: one tensor per target."""
        return self.theta.split(slabs[0]) if self.joined else list(slabs)

    def values(self) -> list[Tensor]:
        """θ, or ψ, by slab."""
        thetas = self.theta.slabs
        return thetas if self.power == 1.0 else [power_of(theta, self.power) for theta in thetas]

    def reduce(self, slabs: Sequence[Tensor]) -> Tensor:
        """The sum over every unit."""
        if self.joined:
            return slabs[0]
        found = [self.problem.reduce(i, x) for i, x in enumerate(slabs)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def spread(self, units: Tensor) -> list[Tensor]:
        """Each unit's entry at all its places, by slab."""
        if self.joined:
            return [units]
        return [self.problem.expand(i, units[here]) for i, here in enumerate(self.problem.slices)]

    def magnitudes(self, slabs: Sequence[Tensor]) -> Tensor:
        """u = Σ|x| of every unit, by its cost and the value power."""
        wide = [x if x.dtype.itemsize >= 4 else x.float() for x in slabs]
        u = self.reduce(torch._foreach_abs(wide))
        return times(self.problem, u, self.problem.factors)

    def scores(self) -> Tensor:
        """u = v/c of every unit: what they compete by, unless a method says otherwise."""
        return self.magnitudes(self.values())

    def products(self, grads: Sequence[Tensor | None]) -> Tensor:
        """G = Σ g·θ over every unit; a missing gradient counts as zero."""
        wide, slabs = self.dtype, zip(self.slabs(grads), self.values(), strict=True)
        return self.reduce(
            [torch.zeros_like(v, dtype=wide) if g is None else g.to(wide) * v.to(wide) for g, v in slabs]
        )

    def constant(self, numbers: Sequence[float]) -> Tensor:
        """Numbers on the device, sent there once, since sending makes the host wait; whole ones as integers."""
        kind = torch.int64 if all(isinstance(x, int) for x in numbers) else torch.float64
        key = kind, *numbers  # 1 and 1.0 are equal
        if key not in self._constants:
            here = torch.tensor(numbers, dtype=kind)
            here = here.pin_memory() if self.device.type == "cuda" else here  # from there the host need not wait
            self._constants[key] = here.to(self.device, non_blocking=True)
        return self._constants[key]

    def at_units(self, per_segment: Tensor) -> Tensor:
        """One number per segment at each of its units; a scalar where there is one segment."""
        if len(per_segment) == 1:
            return per_segment[0]
        return self.of_targets(per_segment[self.constant(self.problem.segment_of)])

    def of_targets(self, per_target: Tensor) -> Tensor:
        """One number per target at each of its units; differentiable."""
        if per_target.requires_grad:  # going back through what is below, a GPU adds up in any order
            return torch.cat([x.expand(n) for x, n in zip(per_target.unbind(), self.problem.units, strict=True)])
        return per_target.repeat_interleave(self.constant(self.problem.units), output_size=self.count)

    def sum_by_target(self, *vectors: Tensor) -> Tensor:
        """Σ over each target, in float64, of several vectors at once: a row each."""
        slices = self.problem.slices
        here = torch.stack([torch.stack([x[s].sum(dtype=torch.float64) for s in slices]) for x in vectors])
        ranks = self.problem.ranks
        return here if ranks.alone else ranks.sum(ranks.counted(here))

    def sum_by_segment(self, *vectors: Tensor) -> Tensor:
        """Σ over each segment, in float64, of several vectors at once: a row each."""
        return self.segments_of(self.sum_by_target(*vectors))

    def segments_of(self, per_target: Tensor) -> Tensor:
        """Sums per target (the last dimension) as sums per segment."""
        problem = self.problem
        if len(problem.segments) == 1:
            return per_target.sum(-1, keepdim=True)
        found = per_target.new_zeros(*per_target.shape[:-1], len(problem.segments))
        return found.index_add(-1, self.constant(problem.segment_of), per_target)

    def max_by_segment(self, x: Tensor) -> Tensor:
        """The largest of each segment; −∞ where there is none."""
        found = x.new_full((len(self.problem.segments),), -math.inf)
        for stretch in self.problem.stretches:
            if stretch.here.stop > stretch.here.start:
                found[stretch.segment] = torch.maximum(found[stretch.segment], x[stretch.here].max())
        return self.problem.ranks.largest(found)

    def cost_of(self, mask: Tensor) -> Tensor:
        """What the units of a mask cost, by segment."""
        counts = self.sum_by_target(mask)[0]
        return self.segments_of(counts * self.constant(self.problem.unit_costs))


def times(problem: Problem, u: Tensor, factors: Sequence[float]) -> Tensor:
    """One entry per unit, times a number per target."""
    if len(set(factors)) == 1:
        return u if factors[0] == 1.0 else u * factors[0]
    return torch.cat([u[here] * factor for here, factor in zip(problem.slices, factors, strict=True)])


def power_of(theta: Tensor, alpha: float) -> Tensor:
    """ψ = sign(θ)·|θ|^α."""
    return theta * theta.abs().pow(alpha - 1.0)


def send(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Numbers to a device, in float64, without waiting for it."""
    here = torch.tensor(list(numbers), dtype=torch.float64)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def masked(x: Tensor, keep: Tensor) -> Tensor:
    """x where kept and exactly +0.0 elsewhere (a product would leave −0.0)."""
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))
