"""The kernels of a group whose units are blocks, rows or columns of a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spartan.kernels import gradient, units
from spartan.kernels.tables import Pieces
from spartan.kernels.topk import TopK
from spartan.kernels.triton_engine import TritonEngine

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


class UnitEngine(TritonEngine):
    """Launches the kernels of one group of blocks.

    Args:
        grids: how each target divides into units.
        rest: as for single weights, with the costs and factors of whole units.
    """

    def __init__(self, grids: Sequence[Grid], *rest: Any) -> None:
        self.grids = list(grids)
        super().__init__(*rest)

    def _prepare(self, costs: Sequence[float], factors: Sequence[float]) -> None:
        device, numbers = self.thetas[0].device, [g.down * g.across for g in self.grids]
        widest = max(g.w for g in self.grids)
        self._tile = {"W": min(TILE, 1 << (widest - 1).bit_length())}
        self._tile["U"] = TILE // self._tile["W"]
        self._units = Pieces(numbers, costs, factors, device, smallest=self._tile["U"])
        self._tile["INLINE"] = all(g.columns is None for g in self.grids)
        columns, rows = [torch.empty(0, dtype=torch.int32)], []
        for g in self.grids:
            rows.append((g.h, g.across, g.w, g.step, sum(c.numel() for c in columns)))
            if not self._tile["INLINE"]:
                columns.append(torch.arange(g.across * g.w, dtype=torch.int32) if g.columns is None else g.columns)
        self._grids = torch.tensor(rows, dtype=torch.int32).to(device), torch.cat(columns).to(device)
        # u and G = Σ g·θ of every unit; what the gradients sum of each piece.
        self._u, self._pulls = (torch.zeros(sum(numbers), dtype=torch.float32, device=device) for _ in range(2))
        self._sums = torch.zeros(self._units.count, 4, dtype=torch.float64, device=device)
        self._split = list(self._u.split(numbers))
        self.topk = TopK(numbers, costs, None, device)

    def _over_units(self, kernel: Any, *arguments: Any, **kinds: Any) -> None:
        kernel[(self._units.count,)](*arguments, **self._tile, num_warps=8, **kinds)

    def _values(self) -> Sequence[Tensor]:
        of, p = self._to_thetas.of(self.thetas), self._units
        tables = of, p.table, *self._grids, p.factors, self._u
        self._replay("sum", lambda: self._over_units(units.sum_units, *tables, DTYPE=self._dtype))
        return self._split

    def scores(self) -> list[Tensor]:
        """u of every unit, summed in the kernels' order: one at the threshold must not come out above it."""
        return [u.clone() for u in self._values()]

    def project(self, soft: bool) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters."""
        to, of = self._to_parameters.of(self.parameters), self._to_thetas.of(self.thetas)
        tables = to, of, self._units.table, *self._grids, self._u, self.state.floats, self.state.ints
        kinds = {"SOFT": soft, "DTYPE": self._dtype}
        self._weights(("project", soft), lambda: self._over_units(units.project, *tables, **kinds))

    def through_mask(self, grads: Sequence[Tensor | None]) -> None:
        """Through the soft mask, in place."""
        p, kinds = self._units, self._kinds(grads)
        where = self._to_grads.of(grads), self._to_thetas.of(self.thetas), p.table, *self._grids
        floats = self.state.floats

        def launch() -> None:
            self._over_units(units.pull, *where, self._u, self._pulls, floats, self._sums, **kinds)
            gradient.ratio[(1,)](self._sums, p.costs, p.count, floats, self.out, ROWS=512, num_warps=8)
            rest = p.factors, p.costs, self._u, self._pulls, floats, self.out
            self._over_units(units.through_mask, *where, *rest, **kinds)

        self._replay(("through_mask", kinds["GRAD"]), launch)

    def where_kept(self, grads: Sequence[Tensor | None]) -> None:
        """Zero where not kept, in place."""
        grad_type, state = self._kinds(grads)["GRAD"], (self.state.floats, self.state.ints)
        tables = self._to_grads.of(grads), self._units.table, *self._grids, self._u, *state
        self._replay(("where_kept", grad_type), lambda: self._over_units(units.where_kept, *tables, GRAD=grad_type))


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
