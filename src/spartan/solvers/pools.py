"""Chooses masks where the units of a segment all compete for one budget: exact selection, soft masks, and their gradient.

`Rows` has the same verbs where every m units have a budget of their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spartan.ops.newton import Dual, Root, search
from spartan.ops.parts import Part, check_budget, extrema
from spartan.ops.select import Boundary, Threshold, boundary
from spartan.ops.soft_topk import Init, local_moments, sinkhorn
from spartan.solvers.units import Units, masked

Budgets = Sequence[float] | Tensor  # k of every segment
Edge = tuple[Boundary, tuple[float, float]]  # where a budget runs out, and the smallest and the largest rank


@dataclass(frozen=True, eq=False)
class Selection:
    """What is kept of every segment: units above `value`, and of those equal to it the ones at positions below `cut`.

    `cost` is what they cost. All three have an entry per segment and lie on the device.
    """

    value: Tensor
    cut: Tensor
    cost: Tensor

    @classmethod
    def of(cls, found: Sequence[Threshold], device: torch.device) -> "Selection":
        """From thresholds that the host knows."""
        each = [f.value for f in found], [f.cost for f in found]
        value, cost = (torch.tensor(x, dtype=torch.float64, device=device) for x in each)
        return cls(value, torch.tensor([f.cut for f in found], device=device), cost)

    def decisive(self) -> list[Tensor]:
        """The numbers that decide what is kept."""
        return [self.value, self.cut]

    def saved(self) -> list[dict[str, float]]:
        """Plain numbers for every segment."""
        each = zip(self.value.tolist(), self.cut.tolist(), self.cost.tolist(), strict=True)
        return [{"value": v, "cut": n, "cost": c} for v, n, c in each]


@dataclass(frozen=True, eq=False)
class Duals:
    """A solved soft mask of every segment: m = scale · sigmoid(β(u − center) + offset); tensors lie on the device."""

    beta: tuple[float, ...]
    center: Tensor
    offset: Tensor
    scale: tuple[float, ...]
    passes: Tensor
    residual: Tensor

    @classmethod
    def of(cls, found: Sequence[Dual], device: torch.device) -> "Duals":
        """From duals that the host knows."""
        numbers = [(d.center, d.offset, float(d.passes), d.residual) for d in found]
        center, offset, passes, residual = torch.tensor(numbers, dtype=torch.float64, device=device).unbind(1)
        return cls(tuple(d.beta for d in found), center, offset, tuple(d.scale for d in found), passes, residual)

    def each(self) -> list[Dual]:
        """As plain numbers; waits for the device."""
        rows = torch.stack((self.center, self.offset, self.passes.double(), self.residual), 1).tolist()
        return [
            Dual(beta, center, offset, scale, int(passes), residual)
            for beta, scale, (center, offset, passes, residual) in zip(self.beta, self.scale, rows, strict=True)
        ]

    def decisive(self) -> list[Tensor]:
        """The numbers that decide the mask."""
        return [self.center, self.offset]

    def mus(self) -> list[float]:
        """μ of every segment."""
        return [dual.mu for dual in self.each()]

    def mu(self) -> Tensor:
        """μ of the first segment, still on the device."""
        return math.log(self.scale[0]) + self.offset[0] - self.beta[0] * self.center[0]

    def saved(self) -> list[dict[str, float]]:
        """Plain numbers for every segment."""
        return [dict(vars(dual)) for dual in self.each()]


class Pools:
    """Segments whose units all compete, on one process."""

    def __init__(self, units: Units) -> None:
        self.units, self.problem = units, units.problem

    def parts(self, ranks: Tensor, segment: int) -> list[Part]:
        """The units of a segment as the operators read them.

        On an accelerator as one vector: there a copy costs less than a launch per target and pass.
        """
        problem, members = self.problem, self.problem.members(segment)
        each = [Part(ranks[problem.slices[i]], problem.unit_costs[i]) for i in members]
        if ranks.device.type == "cpu" or len(each) == 1:
            return each
        u = torch.cat([part.u for part in each])
        if len({part.c for part in each}) == 1:
            return [Part(u, each[0].c)]
        return [Part(u, torch.cat([torch.full_like(part.u, part.c, dtype=torch.float64) for part in each]))]  # type: ignore[arg-type]

    def select(self, ranks: Tensor, k: Budgets) -> Any:
        """The units of highest rank that fit the budgets: exact for any cost, ties by position."""
        found = self.boundaries(ranks, dict(enumerate(numbers(k))), ends=False)
        return Selection.of([edge.threshold for edge, _ in found.values()], self.units.device)

    def boundaries(self, ranks: Tensor, k: Mapping[int, float], ends: bool = True) -> dict[int, Edge]:
        """Where the budgets of some segments run out, and with `ends` their smallest and largest rank."""
        found = {}
        for s, budget in k.items():
            parts = self.parts(ranks, s)
            prices = [self.problem.unit_costs[i] for i in self.problem.members(s)]
            found[s] = boundary(parts, budget, prices), extrema(parts) if ends else (0.0, 0.0)
        return found

    def solve(self, ranks: Tensor, k: Budgets, beta: Sequence[float]) -> tuple[Any, Any]:
        """The same, and the soft top-k mask at sharpness β."""
        found = self.solve_some(ranks, dict(enumerate(numbers(k))), beta)
        thresholds, duals = zip(*found.values(), strict=True)
        return Selection.of(thresholds, self.units.device), Duals.of(duals, self.units.device)

    def solve_some(
        self, ranks: Tensor, k: Mapping[int, float], beta: Sequence[float]
    ) -> dict[int, tuple[Threshold, Dual]]:
        """The same for some segments, by number."""
        edges, roots = self.boundaries(ranks, k), {}
        for s, (edge, ends) in edges.items():
            total = self.problem.segments[s].total
            roots[s] = Root(check_budget(k[s], total), total, beta[s], edge, ends, ranks.dtype)
        search(roots, lambda pending: self.moments(ranks, pending))
        duals = {s: root.dual or Dual(root.beta, 0.0, root.goal) for s, root in roots.items()}
        return {s: (edges[s][0].threshold, dual) for s, dual in duals.items()}

    def moments(self, ranks: Tensor, roots: Mapping[int, Root]) -> list[tuple[float, float]]:
        """F and D of these segments, each at the present dual of its root: one reduction for all of them."""
        here = [local_moments(self.counted(ranks, s), x.beta, x.center, x.offset) for s, x in roots.items()]
        return [(f, f - f2) for f, f2 in self.problem.ranks.sum(torch.stack(here)).tolist()]

    def counted(self, ranks: Tensor, segment: int) -> list[Part]:
        """The units of a segment that this process counts."""
        return self.parts(ranks, segment)

    def sinkhorn(self, ranks: Tensor, k: Budgets, beta: Sequence[float], init: Sequence[Init]) -> tuple[Any, Any]:
        """The same by the paper's iteration, from the hard threshold or a given μ₀ of every segment."""
        chosen, starts = self.select(ranks, k), list(init)
        if "threshold" in starts:
            lowest = -self.units.max_by_segment(-torch.where(self.keep(ranks, chosen), ranks, math.inf))
            lowest = torch.where(torch.isinf(lowest), self.units.max_by_segment(ranks), lowest)  # nothing is kept
            starts = [-b * u for b, u in zip(beta, lowest.tolist(), strict=True)]
        given = [None if start is None or isinstance(start, str) else float(start) for start in starts]
        parts = [self.counted(ranks, s) for s in range(len(self.problem.segments))]
        budgets = [check_budget(x, s.total) for x, s in zip(numbers(k), self.problem.segments, strict=True)]
        found = sinkhorn(parts, budgets, beta, given, self.problem.ranks)
        return chosen, Duals.of(found, self.units.device)

    def keep(self, ranks: Tensor, chosen: Selection) -> Tensor:
        """Bool per unit: what a selection keeps."""
        found, on_host = [], ranks.device.type == "cpu"
        values: Any = chosen.value.tolist() if on_host else chosen.value
        cuts: Any = chosen.cut.tolist() if on_host else chosen.cut
        for here, s, start, target in self.problem.stretches:
            u, value, cut = ranks[here], values[s], cuts[s]
            if on_host and start is not None:
                found.append(Threshold(value, cut).keep(u, start))
                continue
            if start is None:
                position = self.problem.positions(target, u.device)
            else:
                position = torch.arange(start, start + u.numel(), device=u.device)
            found.append((u > value) | ((u == value) & (position < cut)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def soft(self, ranks: Tensor, duals: Duals) -> Tensor:
        """The soft mask of every unit."""
        found, on_host = [], ranks.device.type == "cpu"  # there numbers are faster than tensors
        centers, offsets = (x.tolist() if on_host else x for x in (duals.center, duals.offset))
        for here, s, _, _ in self.problem.stretches:
            m = (ranks[here] - centers[s]).mul_(duals.beta[s]).add_(offsets[s]).sigmoid_()
            found.append(m if duals.scale[s] == 1.0 else m.mul_(duals.scale[s]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def below(self, ranks: Tensor, chosen: Selection) -> Tensor:
        """τ, at every unit: the largest rank of its segment strictly below every kept one; −∞ where there is none.

        This is the selection's value, unless units equal to it are kept: then the next smaller rank.
        """
        value = self.units.at_units(chosen.value).to(ranks.dtype)
        if ranks.device.type == "cpu" and not chosen.cut.any():  # the host knows that nothing equal to it is kept
            return value
        smaller = self.units.max_by_segment(torch.where(ranks < value, ranks, -math.inf))
        return self.units.at_units(torch.where(chosen.cut > 0, smaller, chosen.value.to(ranks.dtype)))

    def pulled_back(self, pulls: Tensor, slopes: Tensor) -> Tensor:
        """c·a₁/a₂ at every unit: how far the budget pulls it back, from ∂L/∂m and m(1−m); 0 where the mask is flat.

        A target with a NaN or infinite gradient is left out of a₁: its own gradient says so, and the others', which a
        loss scaler may have found good already, stay finite.
        """
        units, costs = self.units, self.units.constant(self.problem.unit_costs)
        a1, a2 = units.sum_by_target(pulls * slopes, slopes)
        a1, a2 = units.segments_of(masked(a1, torch.isfinite(a1))), units.segments_of(a2 * costs)
        ratio = torch.where(a2 != 0, a1 / a2, 0.0)
        if len(set(self.problem.unit_costs)) == 1:
            return units.at_units(ratio * costs[0]).to(pulls.dtype)
        owners = units.constant(self.problem.segment_of)
        return units.of_targets(ratio[owners] * costs).to(pulls.dtype)

    def restored(
        self, chosen: Sequence[dict[str, Any]] | None, duals: Sequence[dict[str, Any]] | None
    ) -> tuple[Any, Any]:
        """What `saved` gave, of every segment."""
        device = self.units.device
        a = None if chosen is None else Selection.of([Threshold(**{**x, "cut": int(x["cut"])}) for x in chosen], device)
        if duals is None:
            return a, None
        return a, Duals.of([replace(Dual(**x), passes=int(x["passes"])) for x in duals], device)


def numbers(k: Budgets) -> list[float]:
    """Budgets as the host knows them."""
    return k.tolist() if isinstance(k, Tensor) else list(k)
