"""Groups: targets that compete for one budget, seen as units with a value and a cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from spartan.budgets import Budget, check_sparsity, divide
from spartan.costs import Cost, Params, as_cost
from spartan.ops.parts import Part, Parts
from spartan.ops.select import Boundary, Threshold, boundary
from spartan.ops.soft_topk import Dual, Init, sinkhorn, solve
from spartan.patterns import Pattern, Unstructured, check_pattern, magnitude
from spartan.targets import Target, find_targets, unwrap


@dataclass(eq=False)
class Group:
    """Targets that compete with one another.

    Methods see one tensor per target, or, where the group is `fused`, all of them laid end to end as one. `k` is what
    they may cost now. What a method knows about the group lives here too: its threshold and dual, tensors
    of its own (masks, scores) and learned parameters, so that a method object itself holds settings only.
    """

    targets: list[Target]
    pattern: Pattern
    prices: list[float]  # c: cost of one parameter of each target
    power: float  # p in v = Σ cᵖ|θ|
    sparsity: float  # fraction of the cost that is gone at the end
    index: int = 0  # its place among the groups
    fused: bool = False  # one tensor over all targets; every weight must be a unit, of the same cost
    k: float = math.nan
    threshold: Threshold | None = None
    dual: Dual | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    learned: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = math.fsum(c * t.numel for c, t in zip(self.prices, self.targets, strict=True))
        # What follows is one entry per tensor that methods see.
        shapes, prices = [t.shape for t in self.targets], self.prices
        if self.fused:
            shapes, prices = [(sum(t.numel for t in self.targets),)], self.prices[:1]
        self.shapes = shapes
        self.sizes = [self.pattern.unit_size(s) for s in shapes]  # entries per unit
        self.unit_costs = [c * n for c, n in zip(prices, self.sizes, strict=True)]
        self.units = [math.prod(s) // n for s, n in zip(shapes, self.sizes, strict=True)]
        # u = v / c_unit = factor · Σ|θ|
        self.factors = [c ** (self.power - 1.0) / n for c, n in zip(prices, self.sizes, strict=True)]

    def slabs(self) -> list[list[Target]]:
        """The targets behind each tensor that methods see."""
        return [self.targets] if self.fused else [[t] for t in self.targets]

    def size_of_units(self) -> list[int]:
        """Entries per unit of each target."""
        return self.sizes * len(self.targets) if self.fused else self.sizes

    def cost_of_units(self) -> list[float]:
        """Cost of a unit of each target."""
        return self.unit_costs * len(self.targets) if self.fused else self.unit_costs

    def scores(self, thetas: Sequence[Tensor]) -> list[Tensor]:
        """u = v/c of every unit, flat, one tensor per target; differentiable in θ."""
        found = []
        for theta, factor in zip(thetas, self.factors, strict=True):
            u = self.pattern.reduce(magnitude(theta))
            found.append(u if factor == 1.0 else u * factor)
        return found

    def parts(self, scores: Sequence[Tensor]) -> Parts:
        """The units as the solvers read them.

        On an accelerator as one vector: there a copy costs less than a launch per target and pass.
        """
        if scores[0].device.type == "cpu":
            return [Part(u, c) for u, c in zip(scores, self.unit_costs, strict=True)]
        u = torch.cat(list(scores))
        if len(set(self.unit_costs)) == 1:
            return [Part(u, self.unit_costs[0])]
        costs = [torch.full_like(x, c, dtype=torch.float64) for x, c in zip(scores, self.unit_costs, strict=True)]
        return [Part(u, torch.cat(costs))]

    def boundary(self, scores: Sequence[Tensor], k: float) -> Boundary:
        """Where a budget runs out, going through the units from the highest score down."""
        return boundary(self.parts(scores), k)

    def select(self, scores: Sequence[Tensor], k: float) -> Threshold:
        """The threshold of the units of highest score that fit a budget."""
        return self.boundary(scores, k).threshold

    def solve(self, scores: Sequence[Tensor], k: float, beta: float, start: Boundary) -> Dual:
        """The soft top-k mask of the scores."""
        return solve(self.parts(scores), k, beta, start=start)

    def sinkhorn(self, scores: Sequence[Tensor], k: float, beta: float, init: Init) -> Dual:
        """The same by the paper's iteration."""
        return sinkhorn(self.parts(scores), k, beta, init=init)

    def keep(self, scores: Iterable[Tensor], threshold: Threshold) -> list[Tensor]:
        """Bool per unit: what a threshold keeps of each target."""
        found, start = [], 0
        for u in scores:
            found.append(threshold.keep(u, start))
            start += u.numel()
        return found

    def expand(self, units: Iterable[Tensor]) -> list[Tensor]:
        """One entry per unit, spread over each tensor's shape."""
        return [self.pattern.expand(x, s) for x, s in zip(units, self.shapes, strict=True)]


@dataclass(frozen=True)
class Plan:
    """The groups of a model, and what their budget is counted against."""

    groups: list[Group]
    counted: int  # parameters that density is a fraction of
    untouched: int  # of these, the ones that are no target and stay dense
    total: float  # their cost


def make_plan(
    model: nn.Module,
    sparsity: float,
    *,
    pattern: Pattern | None = None,
    cost: Cost | Mapping[str, float] | None = None,
    budget: Budget = "global",
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    count: str = "targets",
) -> Plan:
    """Targets, units, costs and budgets from the arguments a user gives; every mistake is an error here."""
    sparsity = check_sparsity(sparsity)
    pattern = check_pattern(Unstructured() if pattern is None else pattern)
    cost = as_cost(cost)
    if count not in ("targets", "model"):
        raise ValueError(f'count={count!r} is unknown; "targets" and "model" are accepted')
    targets = find_targets(model, include, exclude)
    for target in targets:
        try:
            pattern.unit_size(target.shape)
        except ValueError as error:
            raise ValueError(
                f"pattern: {error} of {target.name}; leave that layer dense with exclude=[{target.name!r}]"
            ) from None
        if not torch.isfinite(target.parameter).all():
            raise ValueError(f"{target.name} holds NaN or infinite weights; they cannot be ranked")
    weights = sum(t.numel for t in targets)
    counted, untouched = weights, 0
    if count == "model":
        if not isinstance(cost, Params) or isinstance(budget, Mapping):
            raise ValueError('count="model" counts parameters: it goes with cost=Params() and a budget by rule')
        counted = sum(p.numel() for p in unwrap(model).parameters())
        untouched = counted - weights
        if sparsity * counted >= weights:
            raise ValueError(
                f'sparsity={sparsity!r} with count="model" asks {sparsity * counted:.0f} of {counted} parameters to go, '
                f"but the targets have only {weights}; the sparsity must stay under {weights / counted:.6f}"
            )
        sparsity = sparsity * counted / weights
    prices = cost.per_parameter(model, targets)
    costs = [c * t.numel for c, t in zip(prices, targets, strict=True)]
    groups = []
    for index, (members, s) in enumerate(divide(budget, sparsity, targets, costs)):
        mine, c = [targets[i] for i in members], [prices[i] for i in members]
        groups.append(Group(mine, pattern, c, cost.value_power, s, index, fused=_should_fuse(mine, c, pattern)))
    return Plan(groups, counted, untouched, math.fsum(costs) + untouched)


def _should_fuse(targets: Sequence[Target], prices: Sequence[float], pattern: Pattern) -> bool:
    """Whether a group is better handled as one tensor.

    On an accelerator, where a launch per target and operation takes longer than the work; on a CPU, tensors that fit
    the cache one by one are faster.
    """
    kinds = {(t.parameter.dtype, t.parameter.device) for t in targets}
    alike = isinstance(pattern, Unstructured) and len(set(prices)) == 1 and len(kinds) == 1
    return alike and len(targets) > 1 and targets[0].parameter.device.type != "cpu"
