"""Answers problems of blocks, rows and columns of a weight by Triton kernels."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import Grads
from spartan.solvers.forms import Form, Mask
from spartan.solvers.triton import units
from spartan.solvers.triton.single import ByMagnitude
from spartan.solvers.triton.tables import Addresses, Pieces

TILE = 2048  # entries that a program holds at once


class Grid(NamedTuple):
    """How a matrix divides into units: how many down, the rows of each, how many across, the columns of each.

    `step` is the way in memory from one row to the next. `columns` is where in a row each column lies, None in order.
    """

    down: int
    h: int
    across: int
    w: int
    step: int
    columns: Tensor | None


class BlockSolver(ByMagnitude):
    """Launches the kernels of units that are rectangles of a weight seen as a matrix."""

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Rectangles, in weights whose places fit 32 bits."""
        if problem.pattern.rows is not None or None in _sides(problem):
            return f"no kernels for {problem.pattern!r}"
        return "a weight of 2³¹ entries or more" if any(t.local.numel() >= 1 << 31 for t in problem.targets) else ""

    def prepare(self) -> None:
        """Tables of the units, by segment."""
        problem, device = self.problem, self.device
        weights = [t.axes.matrix(t.local) for t in problem.targets]
        pairs = zip(weights, _sides(problem), strict=True)
        grids = [grid_of(weight, *side) for weight, side in pairs if weight is not None and side is not None]
        widest = max(g.w for g in grids)
        self._tile: dict[str, Any] = {"W": min(TILE, 1 << (widest - 1).bit_length())}
        self._tile["U"] = TILE // self._tile["W"]
        self._tile["INLINE"] = inline = all(g.columns is None for g in grids)
        self._grain = math.gcd(8, *(side for g in grids for side in (g.w, g.step))) if inline else 1
        owners: dict[str, Any] = {"owners": problem.segment_of, "segments": len(problem.segments)}
        numbers = [g.down * g.across for g in grids]
        self.ranked = Pieces(numbers, problem.unit_costs, problem.factors, device, smallest=self._tile["U"], **owners)
        columns, rows = [torch.empty(0, dtype=torch.int32)], []
        for g in grids:
            rows.append((g.h, g.across, g.w, g.step, sum(c.numel() for c in columns)))
            if not self._tile["INLINE"]:
                columns.append(torch.arange(g.across * g.w, dtype=torch.int32) if g.columns is None else g.columns)
        bases = torch.tensor([here.start for here in problem.slices], dtype=torch.int64).to(device)
        self._grids = bases, torch.tensor(rows, dtype=torch.int32).to(device), torch.cat(columns).to(device)
        # u and G = Σ g·θ of every unit; what the gradients sum of each piece.
        self._u, self._pulls = (torch.zeros(sum(numbers), dtype=torch.float32, device=device) for _ in range(2))
        self._sums = torch.zeros(self.ranked.count, 4, dtype=torch.float64, device=device)
        self._u_by_target = [self._u[here] for here in problem.slices]
        self.topk = self.make_topk(numbers, problem.unit_costs, None, device, **owners, replay=self.kernels.replay)

    def _over_units(self, kernel: Any, *arguments: Any, **kinds: Any) -> None:
        kernel[(self.ranked.count,)](*arguments, num_warps=8, **self._tile, **kinds)

    def _read_at_once(self, *tables: Addresses) -> int:
        """So many entries lie side by side wherever a unit has them, in memory that can be read as one word."""
        return self._grain if all(table.aligned for table in tables) else 1

    def competing(self) -> list[Tensor]:
        """u of every unit, summed from θ anew."""
        x, p = self.kernels, self.ranked
        tables = x.to_thetas.of(self._theta.views), p.table, *self._grids, p.factors, self._u
        kinds = {"DTYPE": x.dtype, "GRAIN": self._read_at_once(x.to_thetas)}
        x.replay(("sum units", *kinds.values()), lambda: self._over_units(units.sum_units, *tables, **kinds))
        return self._u_by_target

    def scores(self) -> Tensor:
        """u of every unit, summed in the kernels' order: one at the threshold must not come out above it."""
        if self.power != 1.0:
            return super().scores()
        self.competing()
        self.kernels.replay.flush()
        return self._u.clone()

    def project(self, form: Form) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters."""
        soft = form.mask is Mask.SOFT
        x, p, states = self.kernels, self.ranked, self.topk.states
        where = x.to_parameters.of(x.parameters), x.to_thetas.of(self._theta.views), p.table, p.segments, *self._grids
        rest, kinds = (self._u, states.floats, states.ints), {"SOFT": soft, "DTYPE": x.dtype}
        kinds["GRAIN"] = self._read_at_once(x.to_parameters, x.to_thetas)
        x.write(("project", soft, kinds["GRAIN"]), lambda: self._over_units(units.project, *where, *rest, **kinds))

    def through_mask(self, form: Form, grads: Grads) -> None:
        """Through the soft mask, in place."""
        x, p, floats, out = self.kernels, self.ranked, self.topk.states.floats, self.flags.residuals
        where = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), p.table, p.segments, *self._grids
        kinds = {**x.kinds(grads), "GRAIN": self._read_at_once(x.to_grads, x.to_thetas)}

        def launch_pull() -> None:
            self._over_units(units.pull, *where, self._u, self._pulls, floats, self._sums, **kinds)

        def launch_turn() -> None:
            rest = p.factors, p.costs, self._u, self._pulls, floats, out
            self._over_units(units.through_mask, *where, *rest, **kinds)

        self.pull_back(form, ("through_mask", *kinds.values()), launch_pull, launch_turn, where[0], floats)

    def where(self, form: Form, grads: Grads) -> None:
        """Zero where not kept, in place."""
        x, p, states = self.kernels, self.ranked, self.topk.states
        tables = x.to_grads.of(grads), p.table, p.segments, *self._grids, self._u, states.floats, states.ints
        kinds = {"GRAD": x.kinds(grads)["GRAD"], "GRAIN": self._read_at_once(x.to_grads)}
        x.replay(("where_kept", *kinds.values()), lambda: self._over_units(units.where_kept, *tables, **kinds))


def _sides(problem: Problem) -> list[tuple[int, int] | None]:
    """The rows and columns of a unit of each target."""
    return [problem.pattern.sides(t.axes.shape(t.shape)) for t in problem.targets]


def grid_of(weight: Tensor, h: int, w: int) -> Grid:
    """The grid of a weight, seen as a matrix, with units of h × w.

    Example:
        >>> grid_of(torch.empty(8, 4, 2, 2), 4, 8)
        Grid(down=2, h=4, across=2, w=8, step=16, columns=None)
    """
    wide = math.prod(weight.shape[1:])
    columns = torch.zeros((), dtype=torch.int64)
    for n, stride in zip(weight.shape[1:], weight.stride()[1:], strict=True):
        columns = columns[..., None] + stride * torch.arange(n)
    # Of rows that are units the order does not matter, only that each lies in one piece.
    whole = w == wide and weight.stride(0) == wide
    inline = whole or bool((columns.reshape(-1) == torch.arange(wide)).all())
    where = None if inline else columns.reshape(-1).int()
    return Grid(weight.shape[0] // h, h, wide // w, w, weight.stride(0), where)
