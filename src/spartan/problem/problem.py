"""The problem: which units there are, what they cost, and who competes with whom for how much.

Budgets of the whole model and of each layer are the same question, a segmented top-k: units with a value per cost u and
a cost c, and segments of whole targets with a budget k each. It says nothing of how it is answered; that is `solvers`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spartan.distributed import Ranks, is_dtensor, local
from spartan.problem.budgets import Budget, balanced_scales, by_name, check_sparsity, divide
from spartan.problem.costs import Cost, as_cost
from spartan.problem.patterns import Pattern, Place, Unstructured, check_pattern
from spartan.problem.targets import Globs, Target, find_targets, unwrap
from spartan.scalars import as_plain


@dataclass(frozen=True)
class Segment:
    """Targets, by number, that compete for one budget: `whole` times the scheduled density, less what is `reserved`.

    Usually the whole is what its targets cost and nothing is reserved. A target at its `min_density` is a segment of
    its own; what such targets keep is reserved of the budget that the others share.
    """

    targets: tuple[int, ...]
    sparsity: float  # fraction of the whole that is gone at the end
    total: float  # what its targets cost
    whole: float
    reserved: float = 0.0
    index: int = 0  # its place among all segments of the model; negative for a target that was set apart

    def budget(self, pattern: Pattern, grown: float) -> float:
        """k, when the sparsity has grown to that fraction of the final one."""
        k = self.whole * pattern.density_at(1.0 - self.sparsity * grown)
        left = k - self.reserved
        # Rounded down, so that both together are no more than the budget.
        return left if math.fsum((left, self.reserved, -k)) <= 0 else math.nextafter(left, 0.0)


class Stretch(NamedTuple):
    """Units of one segment that follow one another, there and in the vector of all units on this process."""

    here: slice
    segment: int
    start: int | None  # position of the first in its segment; None where a shard scatters them
    target: int  # the first that they belong to


@dataclass(eq=False)
class Problem:
    """Targets, their units and costs, and the segments they compete in. Units stand target after target.

    Size, cost and factor of a unit are numbers per target, never tensors per unit.
    """

    targets: list[Target]
    pattern: Pattern
    prices: list[float]  # c: cost of one parameter of each target
    value_power: float  # p in v = Σ cᵖ|θ|
    segments: list[Segment]
    floors: list[float]  # least density of each target
    counted: int  # parameters that density is a fraction of
    untouched: int  # of these, the ones that are no target and stay dense
    sparsity: float = 0.0  # fraction of what is counted that is gone at the end; in parts, that of the whole
    scales: list[float] = field(default_factory=list)  # what each target's magnitudes are multiplied by; 1 by default
    numbers: list[int] = field(default_factory=list)  # the targets' among all of the model; filled in for parts

    def __post_init__(self) -> None:
        self.numbers = self.numbers or list(range(len(self.targets)))
        self.scales = self.scales or [1.0] * len(self.targets)
        shapes = [t.axes.shape(t.shape) for t in self.targets]
        self.total = math.fsum(c * t.numel for c, t in zip(self.prices, self.targets, strict=True)) + self.untouched
        self.sizes = [self.pattern.unit_size(s) for s in shapes]  # entries per unit
        self.unit_costs = [c * n for c, n in zip(self.prices, self.sizes, strict=True)]
        # Units on this process; `all_units` counts those of the whole weights.
        self.units = [t.local.numel() // n for t, n in zip(self.targets, self.sizes, strict=True)]
        self.all_units = [t.numel // n for t, n in zip(self.targets, self.sizes, strict=True)]
        self.set_scales(self.scales)
        # Ties are cut by position in the weight. Single weights stand in the order of memory instead, where it has no
        # gaps, so that they are read as they lie; where that is row-major, as it mostly is, both are the same. On an
        # accelerator they are worked on as one tensor besides.
        self.joined = self.pattern.single and all(stands_by_memory(t) for t in self.targets)
        self.by_memory = self.joined or (self.pattern.single and all(lies_in_some_order(t) for t in self.targets))
        # Where weights lie in shards: the processes that hold the others, and where units stand in the whole.
        self.ranks = Ranks.of([t.parameter for t in self.targets])
        self.places: list[Place] = []
        if any(is_dtensor(t.parameter) for t in self.targets):
            found = [self.pattern.place(t.parameter) for t in self.targets]
            self.places = [p for p in found if p is not None]
            assert len(self.places) == len(found), "check_shards() lets no unit be cut"
        self.asked = list(self.segments)  # before any target is set apart
        self._divide()

    def _divide(self) -> None:
        """Where segments begin and end."""
        self._budgets: tuple[float, list[float]] = math.nan, []
        sizes = [{self.sizes[i] for i in segment.targets} for segment in self.segments]
        self._unit_sizes = [of.pop() if len(of) == 1 else None for of in sizes]
        self.segment_of = [0] * len(self.targets)
        self.first_position = [0] * len(self.targets)  # of a target's units in its segment
        for number, segment in enumerate(self.segments):
            position = 0
            for i in segment.targets:
                self.segment_of[i], self.first_position[i] = number, position
                position += self.all_units[i]
        self.stretches: list[Stretch] = []
        for i, here in enumerate(self.slices):
            first = self.places[i].first if self.places else 0
            start = None if first is None else self.first_position[i] + first
            last = self.stretches[-1] if self.stretches else None
            follows = last is not None and last.segment == self.segment_of[i] and last.start is not None
            if follows and last is not None and start == (last.start or 0) + last.here.stop - last.here.start:
                self.stretches[-1] = last._replace(here=slice(last.here.start, here.stop))
            else:
                self.stretches.append(Stretch(here, self.segment_of[i], start, i))

    def set_scales(self, scales: Sequence[float]) -> None:
        """Multiply the magnitudes of each target by these: u = v / c_unit = factor · Σ|θ|."""
        self.scales = list(scales)
        each = zip(self.prices, self.sizes, self.scales, strict=True)
        self.factors = [scale * c ** (self.value_power - 1.0) / n for c, n, scale in each]

    @property
    def slices(self) -> list[slice]:
        """Where the units of each target are in the vector of all."""
        found, start = [], 0
        for n in self.units:
            found.append(slice(start, start + n))
            start += n
        return found

    def members(self, segment: int) -> tuple[int, ...]:
        """The targets of a segment."""
        return self.segments[segment].targets

    def budgets(self, grown: float) -> list[float]:
        """k of every segment, when the sparsity has grown to that fraction of the final one."""
        if self._budgets[0] != grown:  # they change in the warm-up only
            self._budgets = grown, [segment.budget(self.pattern, grown) for segment in self.segments]
        return list(self._budgets[1])

    def unit_size(self, segment: int) -> int | None:
        """Entries per unit, where all units of the segment have as many."""
        return self._unit_sizes[segment]

    def reduce(self, i: int, x: Tensor) -> Tensor:
        """The sum over each unit of target i of a tensor of its local shape."""
        target = self.targets[i]
        return target.flatten(x) if self.by_memory else target.axes.reduce(self.pattern, x)

    def expand(self, i: int, units: Tensor) -> Tensor:
        """Each unit's entry at all its places in target i."""
        target = self.targets[i]
        if self.by_memory:
            return target.unflatten(units.contiguous())
        return target.axes.expand(self.pattern, units, target.local.shape)

    def growing(self, i: int) -> Tensor | None:
        """Which entries of target i start from zero when a unit comes back; None for all of them."""
        here = self.targets[i].local
        found = self.pattern.growing(self.targets[i].axes.shape(here.shape), here.device)
        return None if found is None else self.targets[i].axes.turned(found)

    def positions(self, i: int, device: torch.device, which: Tensor | None = None) -> Tensor:
        """The positions, in their segment, of these units of target i, or of all of them on this process."""
        if self.places:
            return self.places[i].positions(device, which) + self.first_position[i]
        index = torch.arange(self.units[i], device=device) if which is None else which
        return index + self.first_position[i]

    # ------------------------------------------------------------------ parts

    def split(self) -> "list[Problem]":
        """Whole segments that are alike in device, dtype and layout; those that mix kinds are a part of their own."""

        def kind(i: int) -> tuple[object, ...]:
            t = self.targets[i]
            return t.parameter.device, t.parameter.dtype, is_dtensor(t.parameter), t.dense_stride is None

        found: dict[object, list[int]] = {}
        for number, segment in enumerate(self.segments):
            kinds = {kind(i) for i in segment.targets}
            found.setdefault(kinds.pop() if len(kinds) == 1 else "mixed", []).append(number)
        return [self] if len(found) == 1 else [self._part(numbers) for numbers in found.values()]

    def _part(self, numbers: Sequence[int]) -> "Problem":
        mine = [i for i, number in enumerate(self.segment_of) if number in numbers]
        segments = []
        for number in numbers:
            segment = self.segments[number]
            segments.append(replace(segment, targets=tuple(mine.index(i) for i in segment.targets)))
        targets = [self.targets[i] for i in mine]
        prices, floors, scales = ([of[i] for i in mine] for of in (self.prices, self.floors, self.scales))
        rest = segments, floors, 0, 0, self.sparsity, scales, [self.numbers[i] for i in mine]
        return Problem(targets, self.pattern, prices, self.value_power, *rest)

    # ------------------------------------------------------------------ layers at their least density

    def least(self, i: int) -> float:
        """What the fewest units cost that reach target i's `min_density`."""
        return math.ceil(self.floors[i] * self.all_units[i] - 1e-9) * self.unit_costs[i]

    def below_floor(self, kept: Sequence[float]) -> list[int]:
        """The targets that share a budget and keep less than their `min_density`, from the cost that each keeps."""
        sharing = [i for i, s in enumerate(self.segment_of) if len(self.members(s)) > 1]
        return [i for i in sharing if kept[i] < self.least(i) * (1.0 - 1e-12)]

    @property
    def apart(self) -> list[int]:
        """The targets that are segments of their own, at their `min_density`."""
        return [segment.targets[0] for segment in self.segments if segment.index < 0]

    def set_apart(self, which: Sequence[int]) -> None:
        """Make these targets segments of their own, at their `min_density`; the others share what is left."""
        shared, alone = [], []
        for segment in self.asked:
            least = {i: self.least(i) for i in segment.targets if i in which}
            rest = tuple(i for i in segment.targets if i not in least)
            total = math.fsum(self.all_units[i] * self.unit_costs[i] for i in rest)
            reserved = math.fsum(least.values())
            if math.fsum([*least.values(), -reserved]) > 0:
                reserved = math.nextafter(reserved, math.inf)
            shared.append(replace(segment, targets=rest, total=total, reserved=reserved))
            for i, floor in least.items():
                whole = self.all_units[i] * self.unit_costs[i]
                alone.append(Segment((i,), 0.0, whole, whole, whole - floor, -1 - self.numbers[i]))
        self.segments = [segment for segment in shared if segment.targets] + alone
        self._divide()


def stands_by_memory(target: Target) -> bool:
    """Whether the entries of a weight have the order of its memory, whatever it is."""
    return target.parameter.device.type != "cpu" and not is_dtensor(target.parameter)


def lies_in_some_order(target: Target) -> bool:
    """Whether it fills its memory without gaps."""
    return not is_dtensor(target.parameter) and target.dense_stride is not None


def make_problem(
    model: nn.Module,
    sparsity: float,
    *,
    pattern: Pattern | None = None,
    cost: Cost | Mapping[str, float] | None = None,
    budget: Budget = "global",
    include: Globs = None,
    exclude: Globs = None,
    count: str = "targets",
    min_density: float | Mapping[str, float] = 0.0,
    frozen_too: bool = False,
    scale: Callable[[Target], float] = lambda target: 1.0,
) -> Problem:
    """Targets, units, costs and budgets from the arguments a user gives; every mistake is an error here.

    `scale` is a method's: what it multiplies the magnitudes of each target by.
    """
    sparsity, budget, min_density = check_sparsity(sparsity), as_plain(budget), as_plain(min_density)
    pattern = check_pattern(Unstructured() if pattern is None else pattern)
    cost = as_cost(cost)
    if count not in ("targets", "model"):
        raise ValueError(f'count={count!r} is unknown; "targets" and "model" are accepted')
    targets = find_targets(model, include, exclude, frozen_too=frozen_too)
    for target in targets:
        try:
            _check_axes(target, pattern)
            pattern.check(target.axes.shape(target.shape), target.owner)
        except ValueError as error:
            raise ValueError(
                f"pattern: {error} of {target.name}; leave that layer dense with exclude=[{target.name!r}]"
            ) from None
    check_shards(targets, pattern)
    weights = sum(t.numel for t in targets)
    counted, untouched = weights, 0
    if count == "model":
        if not cost.counts_parameters or isinstance(budget, Mapping):
            raise ValueError('count="model" counts parameters: it goes with cost=Params() and a budget by rule')
        counted = sum(p.numel() for p in unwrap(model).parameters())
        untouched = counted - weights
        if sparsity * counted >= weights:
            raise ValueError(
                f'sparsity={sparsity!r} with count="model" asks {sparsity * counted:.0f} of {counted} parameters to go, '
                f"but the targets have only {weights}; the sparsity must stay under {weights / counted:.6f}"
            )
        sparsity = sparsity * counted / weights
    sparsity = pattern.check_budget(sparsity, budget, cost.value_power, weights / counted)
    prices = cost.per_parameter(model, targets)
    costs = [c * t.numel for c, t in zip(prices, targets, strict=True)]
    segments = []
    for index, (members, gone) in enumerate(divide(budget, sparsity, targets, costs)):
        total = math.fsum(costs[i] for i in members)
        segments.append(Segment(tuple(members), gone, total, total, index=index))
    least = min_density if isinstance(min_density, Mapping) else {"*": min_density}
    floors = by_name("min_density", least, 0.0, targets)
    gone = math.fsum(s.sparsity * s.total for s in segments) / (math.fsum(costs) + untouched)
    scales = [scale(target) for target in targets]
    if budget == "balanced":
        scales = [x * by for x, by in zip(scales, balanced_scales(targets), strict=True)]
    rest = segments, floors, counted, untouched, gone, scales
    problem = Problem(targets, pattern, prices, cost.value_power, *rest)
    _check_floors(problem, min_density)
    return problem


def _check_axes(target: Target, pattern: Pattern) -> None:
    """ValueError where a pattern has to know the axes of a weight and does not, or cannot turn them in shards."""
    if pattern.tells_inputs_from_outputs and not target.axes.known:
        raise ValueError(
            f"{pattern!r} has to know which axis is the inputs', which `is_transposed` of the module would say (False: "
            f"experts × outputs × inputs, True: experts × inputs × outputs) and does not for the shape {target.shape}"
        )
    if is_dtensor(target.parameter) and not (target.axes.plain or pattern.single):
        raise ValueError(
            f"{pattern!r} is not there for shards of weights that are experts or stand as inputs × outputs, as the "
            f"shape {target.shape}"
        )


def _check_floors(problem: Problem, asked: float | Mapping[str, float]) -> None:
    """ValueError where a `min_density` cannot be had."""
    segments = problem.segments
    alone = any(len(s.targets) == 1 for s in segments if len(segments) > 1)
    if any(problem.floors) and (problem.pattern.rows is not None or alone):
        raise ValueError(
            f"min_density={asked!r} is for layers that share a budget, and here each has its own: it goes with "
            'budget="global" or "balanced" and patterns whose units all compete'
        )
    for segment in segments:
        least = math.fsum(problem.least(i) for i in segment.targets)
        if least > segment.budget(problem.pattern, 1.0) * (1.0 + 1e-12):
            raise ValueError(
                f"min_density={asked!r} alone asks for {least / segment.total:.4%} of the cost, more than the "
                f"{1.0 - segment.sparsity:.4%} that a sparsity of {segment.sparsity:.6g} leaves"
            )


def check_shards(targets: Sequence[Target], pattern: Pattern) -> None:
    """ValueError, the same on every process, where a unit is cut, or a shard holds NaN or infinite weights."""
    parameters = [t.parameter for t in targets]
    bad = torch.zeros(2, len(parameters), dtype=torch.int32)
    for i, parameter in enumerate(parameters):
        bad[0, i] = is_dtensor(parameter) and pattern.place(parameter) is None
        bad[1, i] = not bool(torch.isfinite(local(parameter.detach())).all())
    bad = Ranks.of(parameters).largest(bad.to(local(parameters[0]).device)).cpu()
    for i in bad[0].nonzero().flatten().tolist():
        name = targets[i].name
        raise ValueError(
            f"pattern: the border of a shard cuts a unit of {pattern!r} in {name} of shape {targets[i].shape}, placed as "
            f"{getattr(parameters[i], 'placements', None)}; "
            "shard along the other dimension (fully_shard(…, shard_placement_fn=lambda p: Shard(1))), take blocks that "
            f"divide each process's rows, or leave that layer dense with exclude=[{name!r}]"
        )
    for i in bad[1].nonzero().flatten().tolist():
        raise ValueError(f"{targets[i].name} holds NaN or infinite weights; they cannot be ranked")
