"""Chooses what is kept, and makes the masks that methods declare, one entry per unit."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.distributed import Ranks, sharded_dims
from spartan.ops.parts import CostGrid
from spartan.ops.soft_topk import Init
from spartan.problem.problem import Problem
from spartan.solvers.forms import Form, Mask, Shrunk, Stored
from spartan.solvers.pools import Budgets, Pools
from spartan.solvers.rows import Rows
from spartan.solvers.units import Units, masked, send


class Masks(Units):
    """The masks of a part of the problem.

    What is known of them: `a`, the selection that is kept; `b`, a larger one that some methods also train; `dual`, the
    soft mask. `k` is what every segment may cost now.
    """

    def __init__(self, problem: Problem, alias: bool = False) -> None:
        super().__init__(problem, alias)
        self.pools = self.make_pools()
        self.k: list[float] = [math.nan] * len(problem.segments)
        self.a: Any = None
        self.b: Any = None
        self.dual: Any = None
        self._costed: tuple[Tensor, Tensor] | None = None  # a stored mask, and what it costs

    def make_pools(self) -> Pools:
        """Who compares units with one another."""
        return Pools(self) if self.problem.pattern.rows is None else Rows(self)

    def solve(
        self,
        k: Budgets,
        beta: Sequence[float] | None = None,
        ranks: Tensor | None = None,
        learned: str | None = None,
        shifted: str | None = None,
    ) -> None:
        """Choose what is kept, A, for these budgets, and with a β the soft mask.

        By magnitude, by ranks of one's own, by those that are learned under this name, or by magnitudes that are
        shifted by what is learned per target under this name.
        """
        if learned is not None:
            ranks = self.state.learned[learned].detach()
        elif shifted is not None:
            ranks = self.shifted(shifted)
        ranks = self.scores() if ranks is None else ranks
        self.dual = None
        if beta is None:
            self.a = self.pools.select(ranks, k)
        else:
            self.a, self.dual = self.pools.solve(ranks, k, beta)

    def solve_more(self, k: Budgets) -> None:
        """Choose what is trained beside A, B, for these budgets, by magnitude."""
        self.b = self.select(k, self.scores())

    def shifted(self, name: str, u: Tensor | None = None) -> Tensor:
        """z = u − sigmoid(s) of every unit, s learned per target under this name; of given u differentiable."""
        if u is None:
            return self.shifted(name, self.scores()).detach()
        return u - self.of_targets(torch.sigmoid(self.state.learned_per_target[name]))

    def sinkhorn(self, k: Budgets, beta: Sequence[float], init: Sequence[Init]) -> None:
        """The same by the paper's iteration."""
        self.a, self.dual = self.pools.sinkhorn(self.scores(), k, beta, init)

    def select(self, k: Budgets, ranks: Tensor) -> Any:
        """A selection of the units of highest rank that fit the budgets."""
        return self.pools.select(ranks, k)

    def top(self, k: Budgets, ranks: Tensor, among: Tensor | None = None, near: str | None = None) -> Tensor:
        """Bool per unit: those of highest rank that fit the budgets, among all or some; exact, ties by position.

        Kernels begin to look where they found the last one that is called `near`.
        """
        if among is not None:
            ranks = torch.where(among, ranks, -math.inf)
        found = self.pools.keep(ranks, self.select(k, ranks))
        # Units from outside are reached only once all that they are chosen among is taken.
        return found if among is None else found & among

    def ranks(self, form: Form) -> Tensor:
        """What units compete by."""
        return self.scores() if form.learned is None else self.state.learned[form.learned].detach()

    def kept(self, form: Form) -> Tensor:
        """A: bool per unit."""
        if form.everything:
            return torch.ones(self.count, dtype=torch.bool, device=self.device)
        if form.stored is not None:
            return self.state.per_unit[form.stored]
        assert self.a is not None, "the method has chosen nothing, and stores no mask"
        return self.pools.keep(self.ranks(form), self.a)

    def trained(self, form: Form) -> Tensor | None:
        """B: bool per unit; None for all of them."""
        if form.more is not None:
            return self.state.per_unit[form.more]
        return None if self.b is None else self.pools.keep(self.ranks(form), self.b)

    def mask(self, form: Form, kept: Tensor) -> Tensor | None:
        """The mask of every unit, whatever it is outside A; None where it is 1."""
        if isinstance(form.mask, Stored):
            found = self.state.per_unit[form.mask.name]
            return None if found.dtype == torch.bool else found
        if form.mask is Mask.SOFT:
            return self.pools.soft(self.ranks(form), self.dual)
        return self._shrunk(form.mask, kept) if isinstance(form.mask, Shrunk) else None

    def room_beside(self, mask: Tensor) -> Tensor:
        """What the budgets leave beside a mask, by segment: no more, where sums of costs round."""
        problem, k = self.problem, self.k
        grids = [CostGrid(segment.total) for segment in problem.segments]
        each = zip(problem.segment_of, problem.unit_costs, strict=True)
        coarse, fine = zip(*(grids[s].split(cost) for s, cost in each), strict=True)
        if not any(fine):  # then they do not
            return (send(k, self.device) - self.cost_of(mask)).clamp(min=0.0)
        counts = self.sum_by_target(mask)[0]
        whole, rest = zip(*(grid.split(x) for grid, x in zip(grids, k, strict=True)), strict=True)
        left = send(whole, self.device) - self.segments_of(counts * self.constant(coarse))
        left += send(rest, self.device) - self.segments_of(counts * self.constant(fine))
        return torch.nextafter(left, torch.zeros_like(left)).clamp(min=0.0)

    def kept_cost(self, form: Form) -> Tensor | None:
        """What A costs, by segment, without waiting for it; None where that is not known."""
        if form.everything:
            return self.constant([segment.total for segment in self.problem.segments])
        if form.stored is None:
            return None if self.a is None or form.own is not None else self.a.cost
        mask = self.state.per_unit[form.stored]
        if mask.dtype != torch.bool:
            return None
        if self._costed is None or self._costed[0] is not mask:
            self._costed = mask, self.cost_of(mask)
        return self._costed[1]

    def weights(self, form: Form | None) -> list[Tensor]:
        """w = mask · θ of every target, zero outside A."""
        assert form is not None
        values = self.values()
        if form.own is not None:
            return form.own(self.per_target(values))
        kept = self.kept(form) if form.project else None
        mask = self.mask(form, kept) if kept is not None else self.mask(form, torch.empty(0))
        found = values
        if mask is not None:
            found = [x * m.to(x.dtype) for x, m in zip(found, self.spread(mask), strict=True)]
        if kept is not None:
            found = [masked(x, keep) for x, keep in zip(found, self.spread(kept), strict=True)]
        return self.per_target(found)

    def _shrunk(self, by: Shrunk, kept: Tensor) -> Tensor:
        """(1 − (τ/u)ᵖ)^(1/p) where kept."""
        u = self.scores()
        tau = self.pools.below(u, self.a).clamp(min=0.0)
        above = u > tau
        # Without cancellation: x = 1 − τ/u, and 1 − (1 − x)ᵖ = −expm1(p·log1p(−x)) keeps its digits where x is small.
        x = torch.where(above, (u - tau) / torch.where(above, u, 1.0), 1.0)
        mask = masked(x if by.p == 1.0 else (-torch.expm1(by.p * torch.log1p(-x))) ** (1.0 / by.p), kept)
        return mask * self.scales_of_rows(kept) if by.row_scale else mask

    def scales_of_rows(self, kept: Tensor) -> Tensor:
        """What a mask is multiplied by where outputs are to keep their size, per unit."""
        return row_scales(self, kept)


def row_scales(units: Units, kept: Tensor) -> Tensor:
    """1.01/(r + 0.01) per unit, r the share of its output channels' magnitude that is kept; the mean over a unit."""
    problem = units.problem
    slabs = [x.abs() if x.dtype.itemsize >= 4 else x.float().abs() for x in units.values()]
    rest = [masked(x, keep) for x, keep in zip(slabs, units.spread(kept), strict=True)]
    before, after = units.per_target(slabs), units.per_target(rest)
    sums, found = sums_of_outputs(problem, before, after), []
    for i, (target, x, (whole, left)) in enumerate(zip(problem.targets, before, sums, strict=True)):
        n = math.prod(target.axes.shape(target.shape)[1:])
        scale = 1.01 / ((left / n + 1e-6) / (whole / n + 1e-6) + 0.01)
        found.append(problem.reduce(i, target.axes.at_rows(scale, x)) / problem.sizes[i])
    return found[0] if len(found) == 1 else torch.cat(found)


def sums_of_outputs(problem: Problem, *tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum over what makes each output, of some tensors per target: a row for each of them."""
    each = zip(problem.targets, *tensors, strict=True)
    sums = [torch.stack([target.axes.rows(x).sum(1) for x in some]) for target, *some in each]
    _sum_over_cuts(problem, sums)
    return sums


def _sum_over_cuts(problem: Problem, sums: Sequence[Tensor]) -> None:
    """Sums of rows, in place, over the processes that hold parts of the rows: one reduction for all targets."""
    found: dict[tuple[int, ...], tuple[list[Any], list[int]]] = {}
    for i, target in enumerate(problem.targets):
        mesh: Any = getattr(target.parameter, "device_mesh", None)
        outputs = {0, 2 if target.axes.swapped else 1} if target.axes.stacked else {int(target.axes.swapped)}
        groups = [mesh.get_group(d) for d, dim in sharded_dims(target.parameter) if dim not in outputs]
        if groups:
            found.setdefault(tuple(map(id, groups)), (groups, []))[1].append(i)
    for groups, mine in found.values():
        ranks = Ranks(groups, [])
        reduced = ranks.sum(torch.cat([sums[i].reshape(-1) for i in mine]))
        problem.ranks.sent += ranks.sent
        for i, piece in zip(mine, reduced.split([sums[i].numel() for i in mine]), strict=True):
            sums[i].copy_(piece.view_as(sums[i]))
