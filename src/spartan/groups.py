"""Groups: targets that compete for one budget, seen as units with a value and a cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spartan.budgets import Budget, check_sparsity, divide
from spartan.costs import Cost, Params, as_cost
from spartan.kernels.engine import Rounded
from spartan.ops import rows
from spartan.ops.collective import Ranks
from spartan.ops.parts import Part, Parts, Spread
from spartan.ops.rows import RowDual, RowSoftMask, RowThreshold
from spartan.ops.select import Boundary, Threshold, boundary
from spartan.ops.soft_topk import Dual, Init, SoftMask, pull_ratio, sinkhorn, solve
from spartan.patterns import NM, Pattern, Unstructured, check_pattern, magnitude
from spartan.sharding import Place, Search, check_shards, is_dtensor, place, ranks_of
from spartan.targets import Target, find_targets, unwrap

if TYPE_CHECKING:  # Triton is imported where it runs
    from spartan.kernels.engine import Engine
    from spartan.kernels.frozen_engine import FrozenEngine
    from spartan.kernels.topk import TopK


@dataclass(eq=False)
class Group:
    """Targets that compete with one another.

    Methods see one tensor per target, or, where the group is `fused`, all of them laid end to end as one, in the order
    of memory (a single one keeps its dimensions, in that order). `k` is what they may cost now. What a method knows
    about the group lives here too: its threshold and dual, tensors of its own (masks, scores) and learned parameters, so
    that a method object itself holds settings only.
    """

    targets: list[Target]
    pattern: Pattern
    prices: list[float]  # c: cost of one parameter of each target
    power: float  # p in v = Σ cᵖ|θ|
    sparsity: float  # fraction of the cost that is gone at the end
    index: int = 0  # its place among the groups
    search: Search = field(default_factory=Search)  # for the threshold, where weights lie in shards
    fused: bool = False  # one tensor over all targets; every weight must be a unit, of the same cost
    k: float = math.nan
    threshold: Threshold | None = None
    dual: Dual | RowDual | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    learned: dict[str, nn.Parameter] = field(default_factory=dict)
    engine: Engine | None = None  # its kernels, where they run
    frozen_engine: FrozenEngine | None = None  # those of finetuning
    path: str = "plain torch"  # which of the two does the work, and why

    def __post_init__(self) -> None:
        self.total = math.fsum(c * t.numel for c, t in zip(self.prices, self.targets, strict=True))
        # What follows is one entry per tensor that methods see.
        whole, prices = [t.shape for t in self.targets], self.prices
        self.shapes = [tuple(t.local.shape) for t in self.targets]
        if self.fused:
            whole, prices = [shape_as_one(self.targets)], self.prices[:1]
            self.shapes = list(whole)
        self._scores_topk: TopK | None = None
        self.sizes = [self.pattern.unit_size(s) for s in whole]  # entries per unit
        self.unit_costs = [c * n for c, n in zip(prices, self.sizes, strict=True)]
        # Units on this process; `all_units` counts those of the whole tensors.
        self.units = [math.prod(s) // n for s, n in zip(self.shapes, self.sizes, strict=True)]
        self.all_units = [math.prod(s) // n for s, n in zip(whole, self.sizes, strict=True)]
        # Where the tensors are shards: the processes that hold the others, and where units stand in the whole.
        self.ranks: Ranks | None = ranks_of([t.parameter for t in self.targets])
        self.places: list[Place] = []
        if self.ranks is not None:
            found = [place(self.pattern, t.parameter) for t in self.targets]
            self.places = [p for p in found if p is not None]
            assert len(self.places) == len(found), "check_shards() lets no unit be cut"
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
        exact = self.engine.scores() if self.engine is not None and self.engine.has(thetas) else None
        if exact is not None and not (torch.is_grad_enabled() and any(t.requires_grad for t in thetas)):
            return exact
        found = []
        for theta, factor in zip(thetas, self.factors, strict=True):
            u = self.pattern.reduce(magnitude(theta))
            found.append(u if factor == 1.0 else u * factor)
        return found if exact is None else [Rounded.apply(u, like) for u, like in zip(found, exact, strict=True)]

    def parts(self, scores: Sequence[Tensor]) -> Parts:
        """The units as the solvers read them.

        On an accelerator as one vector: there a copy costs less than a launch per target and pass.
        """
        if self.ranks is not None:
            return self._spread(scores, self.ranks)
        if scores[0].device.type == "cpu":
            return [Part(u, c) for u, c in zip(scores, self.unit_costs, strict=True)]
        u = torch.cat(list(scores))
        if len(set(self.unit_costs)) == 1:
            return [Part(u, self.unit_costs[0])]
        costs = [torch.full_like(x, c, dtype=torch.float64) for x, c in zip(scores, self.unit_costs, strict=True)]
        return [Part(u, torch.cat(costs))]

    def _spread(self, scores: Sequence[Tensor], ranks: Ranks) -> Spread:
        """The units of this process, as part of all."""
        mine = [u if counted else u[:0] for u, counted in zip(scores, ranks.counts, strict=True)]
        starts = [sum(self.all_units[:i]) for i in range(len(scores))]
        positions = [
            lambda index, p=p, start=start: p.positions(index.device, index) + start
            for p, start in zip(self.places, starts, strict=True)
        ]
        parts = [Part(u, c) for u, c in zip(mine, self.unit_costs, strict=True)]
        return Spread(parts, self.all_units, ranks, positions)

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> Tensor:
        """One number per tensor that methods see, added up over the processes that hold shards of it; in float64."""
        x = torch.stack([t.double() for t in tensors])
        if self.ranks is None:
            return x
        return self.ranks.sum(torch.where(torch.tensor(self.ranks.counts, device=x.device), x, 0.0))

    def largest_over_ranks(self, x: Tensor) -> Tensor:
        """The largest of the processes' numbers."""
        return x if self.ranks is None else self.ranks.largest(x)

    def budget(self, grown: float) -> float:
        """What the group may cost when the sparsity has grown to that fraction of the final one."""
        density = 1.0 - self.sparsity * grown
        if isinstance(self.pattern, NM):
            density = self.pattern.n_at(density) / self.pattern.m
        return self.total * density

    def top(self, thetas: Sequence[Tensor], k: float) -> Threshold:
        """The threshold of the units of largest magnitude that fit a budget."""
        if self.engine is not None and self.engine.has(thetas):
            return self.engine.choose(k, None)[0]
        return self.select(self.scores(thetas), k)

    def soft_top(self, thetas: Sequence[Tensor], k: float, beta: float) -> tuple[Threshold, Dual | RowDual]:
        """The same, and the soft top-k mask of the magnitudes."""
        if self.engine is not None and self.engine.has(thetas):
            threshold, dual = self.engine.choose(k, beta)
            assert dual is not None
            return threshold, dual
        scores = self.scores(thetas)
        edge = self.boundary(scores, k)
        return edge.threshold, self.solve(scores, k, beta, start=edge)

    def solution(self) -> tuple[Threshold | None, Dual | RowDual | None]:
        """The threshold and the dual as they are now, to go back to."""
        threshold, dual = self.threshold, self.dual
        if self.engine is not None:
            threshold = None if threshold is None else threshold.host()
            dual = dual.host() if isinstance(dual, Dual) else dual
        return threshold, dual

    def go_on_from(self, threshold: Threshold | None, dual: Dual | RowDual | None) -> None:
        """Take over masks that were saved."""
        # A rescaled mask is a Sinkhorn iteration's, which kernels know nothing of.
        rescaled = isinstance(dual, Dual) and dual.scale != 1.0
        if self.engine is not None and threshold is not None and not isinstance(dual, RowDual) and not rescaled:
            threshold, dual = self.engine.restore(threshold, dual)
        self.threshold, self.dual = threshold, dual

    def boundary(self, scores: Sequence[Tensor], k: float) -> Boundary:
        """Where a budget runs out, going through the units from the highest score down.

        With N:M, where every m units have a budget of their own, it is n of each, rounded down to whole units.
        """
        if isinstance(self.pattern, NM):
            m = self.pattern.m
            n = min(m, math.floor(m * k / self.total + 1e-9))
            threshold = RowThreshold.of(n, m, cost=self.total * n / m)
            return Boundary(threshold, 0.0, math.inf, math.inf)
        if self._by_kernels(scores):
            return Boundary(self._topk().select(scores, k), 0.0, math.inf, math.inf)
        parts = self.parts(scores)
        if isinstance(parts, Spread):
            return self.search.boundary(parts, k)
        return boundary(parts, k)

    def _by_kernels(self, scores: Sequence[Tensor]) -> bool:
        able = self.engine is not None and self.engine.ranks_anything
        return able and all(u.dtype == torch.float32 and u.is_contiguous() for u in scores)

    def _topk(self) -> TopK:
        """The kernels' top-k over any scores."""
        if self._scores_topk is None:
            from spartan.kernels.topk import TopK

            self._scores_topk = TopK(self.units, self.unit_costs, None, self.targets[0].parameter.device)
        return self._scores_topk

    def select(self, scores: Sequence[Tensor], k: float) -> Threshold:
        """The threshold of the units of highest score that fit a budget."""
        return self.boundary(scores, k).threshold

    def solve(self, scores: Sequence[Tensor], k: float, beta: float, start: Boundary) -> Dual | RowDual:
        """The soft top-k mask of the scores; with N:M one of every m units."""
        if isinstance(start.threshold, RowThreshold):
            n, m = start.threshold.n, start.threshold.m
            # On an accelerator a copy costs less than a launch per target and pass.
            whole = scores if scores[0].device.type == "cpu" else [torch.cat(list(scores))]
            found = [rows.solve(u.reshape(-1, m), n, beta) for u in whole]
            center, offset = (torch.cat([each[i] for each in found]) for i in (0, 1))
            return RowDual(beta, center, offset, m, rows.PASSES[center.dtype])
        if self._by_kernels(scores):
            return self._topk().soft(scores, k, beta)
        return solve(self.parts(scores), k, beta, start=start)

    def sinkhorn(self, scores: Sequence[Tensor], k: float, beta: float, init: Init) -> Dual:
        """The same by the paper's iteration."""
        if self.ranks is not None and init == "threshold":
            kept = self.keep(scores, self.select(scores, k))
            least = [torch.where(keep, u, math.inf) for u, keep in zip(scores, kept, strict=True)]
            lowest = -torch.stack([x.min() if x.numel() else x.new_tensor(math.inf) for x in least]).min().double()
            init = beta * float(self.largest_over_ranks(lowest))
        return sinkhorn(self.parts(scores), k, beta, init=init)

    def masks(self, scores: Iterable[Tensor]) -> list[Tensor]:
        """The solved soft mask of each target's units, without a gradient."""
        assert self.dual is not None
        if not isinstance(self.dual, RowDual):
            return [self.dual.mask(u) for u in scores]
        found, start = [], 0
        for u in scores:
            found.append(self.dual.mask(u, start))
            start += u.numel()
        return found

    def soft_masks(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """The same, differentiable in the scores."""
        if isinstance(self.dual, RowDual):
            return list(RowSoftMask.apply(self.dual, *scores))
        return list(SoftMask.apply(self.dual, self.unit_costs, self.ranks, *scores))

    def pull_back(self, grads: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
        """c·a₁/a₂ of each target's units: how far the budget pulls them back, from ∂L/∂m and m(1−m) of every unit."""
        if isinstance(self.pattern, NM):
            m = self.pattern.m
            return [rows.pull_rows(g, s, m) for g, s in zip(grads, slopes, strict=True)]
        ratio = pull_ratio(grads, slopes, self.unit_costs, self.ranks)
        return [(ratio * c).to(g.dtype) for g, c in zip(grads, self.unit_costs, strict=True)]

    def keep(self, scores: Iterable[Tensor], threshold: Threshold) -> list[Tensor]:
        """Bool per unit: what a threshold keeps of each target."""
        found, start = [], 0
        for i, u in enumerate(scores):
            first = self.places[i].first if self.places else 0
            if first is not None or isinstance(threshold, RowThreshold):  # the latter asks for no position
                found.append(threshold.keep(u, start + (first or 0)))
            else:
                kept = u > threshold.value
                if threshold.cut > start:
                    kept |= (u == threshold.value) & (self.places[i].positions(u.device) + start < threshold.cut)
                found.append(kept)
            start += self.all_units[i]
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
            pattern.check(target.shape, target.owner)
        except ValueError as error:
            raise ValueError(
                f"pattern: {error} of {target.name}; leave that layer dense with exclude=[{target.name!r}]"
            ) from None
    check_shards([t.name for t in targets], [t.parameter for t in targets], pattern)
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
    if isinstance(pattern, NM):
        sparsity = _check_nm(pattern, sparsity, cost, budget, weights / counted)
    prices = cost.per_parameter(model, targets)
    costs = [c * t.numel for c, t in zip(prices, targets, strict=True)]
    groups = []
    shares = divide(budget, sparsity, targets, costs)
    for index, (members, s) in enumerate(shares):
        mine, c = [targets[i] for i in members], [prices[i] for i in members]
        groups.append(
            Group(mine, pattern, c, cost.value_power, s, index, Search(len(shares)), _should_fuse(mine, c, pattern))
        )
    return Plan(groups, counted, untouched, math.fsum(costs) + untouched)


def _check_nm(pattern: NM, sparsity: float, cost: Cost, budget: Budget, share: float) -> float:
    """The sparsity of the targets, exactly; errors for what would ask another one of some of them.

    `share` is the targets' share of what is counted.
    """
    if budget not in ("global", "uniform"):
        raise ValueError(
            f"budget={budget!r} with pattern={pattern!r}: every {pattern.m} weights have a budget of their own, so no "
            'layer can be sparser than another; leave the budget out, or pass "uniform"'
        )
    if cost.value_power != 1.0:
        raise ValueError(
            f"cost: value_power={cost.value_power:g} with pattern={pattern!r}: weights compete only with others of the "
            "same cost, so that a value power has nothing to weigh; leave it out"
        )
    if abs(sparsity - pattern.sparsity) > 1e-6:
        asked = "" if share == 1.0 else f' of all parameters, {sparsity:.6g} of the targets (count="model"),'
        raise ValueError(
            f"sparsity={sparsity * share:.6g}{asked} with pattern={pattern!r}, which keeps {pattern.n} of every "
            f"{pattern.m}; pass sparsity={pattern.sparsity * share:.10g}"
            + ("" if share == 1.0 else ' or count="targets"')
        )
    return pattern.sparsity


def _should_fuse(targets: Sequence[Target], prices: Sequence[float], pattern: Pattern) -> bool:
    """Whether a group is better handled as one tensor.

    On an accelerator, where a launch per target and operation takes longer than the work; on a CPU, tensors that fit
    the cache one by one are faster. A single tensor is one already; in the order of its memory kernels can read it.
    """
    kinds = {(t.parameter.dtype, t.parameter.device) for t in targets}
    alike = isinstance(pattern, Unstructured) and len(set(prices)) == 1 and len(kinds) == 1
    if any(is_dtensor(t.parameter) for t in targets):
        return False
    if not alike or targets[0].parameter.device.type == "cpu":
        return False
    if len(targets) > 1:
        return True
    order = memory_order(targets[0])
    return order is not None and order[0] == 0 and not targets[0].parameter.is_contiguous()


def memory_order(target: Target) -> list[int] | None:
    """The target's dimensions from the outermost in memory to the innermost; None where there are gaps."""
    strides = target.dense_stride
    return None if strides is None else sorted(range(len(strides)), key=lambda d: -strides[d])


def shape_as_one(targets: Sequence[Target]) -> tuple[int, ...]:
    """The shape of one tensor over all targets: flat; of a single one, its dimensions in the order of memory."""
    order = memory_order(targets[0])
    if len(targets) > 1 or order is None:
        return (sum(t.numel for t in targets),)
    return tuple(targets[0].shape[d] for d in order)
