"""Chooses n of every m weights on a CPU.

What is known of a row between two verbs is the center and the offset of its soft mask; what is kept is found where it is
read.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.ops import columns
from spartan.ops.columns import Room
from spartan.problem.problem import Problem
from spartan.solvers.base import Flags
from spartan.solvers.chunks import row_pieces
from spartan.solvers.chunks.masks import why_no_chunks
from spartan.solvers.chunks.row_pieces import RowPiece, cut_up
from spartan.solvers.forms import Form, Stored
from spartan.solvers.pools import Budgets
from spartan.solvers.rows import RowDuals, Rows
from spartan.solvers.torch import TorchSolver


class ChunkedRows(Rows):
    """Chooses units of vectors, whose rows lie one after the other, piece by piece."""

    def keep(self, ranks: Tensor, chosen: Any) -> Tensor:
        """Bool per unit."""
        m, rooms = self.problem.pattern.rows or 1, dict[int, Room]()
        found = torch.empty(ranks.shape, dtype=torch.bool)
        length = max(1, min(row_pieces.LENGTH // m, row_pieces.ROWS)) * m
        for x, out in zip(ranks.split(length), found.split(length), strict=True):
            size = len(x) // m
            if size not in rooms:
                rooms[size] = Room(m, size, x.dtype)
            room = rooms[size]
            u = torch.mul(x.view(-1, m).t(), 1.0, out=room.blocks[0])
            kept = columns.keep(u, chosen.n, room, room.blocks[1])
            laid = torch.mul(kept, 1.0, out=room.blocks[2].view(-1, m).t())  # bools of columns take ten times as long
            torch.gt(laid.t(), 0.5, out=out.view(-1, m))
        return found


class ChunkRowMasks(TorchSolver):
    """What is kept of every row, and soft masks."""

    name = "chunks"

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        self._pieces = [] if alias else cut_up(problem, self.theta.views)
        # The soft masks that centers and offsets of all rows are those of; they are found where w is first written.
        self.solved: RowDuals | None = None
        self._centers = self._offsets = torch.empty(0)

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """N:M on a CPU, and many weights."""
        own = "" if problem.pattern.rows else "no budgets of rows"
        if not all(t.parameter.is_contiguous() for t in problem.targets):
            own = own or "weights that are not in row-major order"
        if not all(t.axes.plain for t in problem.targets):
            own = own or "weights that are not outputs × inputs"
        return why_no_chunks(problem, kernels, own)

    def make_pools(self) -> Rows:
        """Who compares units with one another."""
        return ChunkedRows(self)

    def redivided(self) -> None:
        """The problem has other segments now."""
        super().redivided()
        self._pieces, self.solved = cut_up(self.problem, self.theta.views), None

    def beside(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[RowPiece, Tensor]]:
        """Each piece and that of other tensors, where there are any and they lie as the weights do."""
        flat = [None if x is None else self.problem.targets[i].flatten(x.detach()) for i, x in enumerate(tensors)]
        for piece in self._pieces:
            x = flat[piece.i]
            if x is not None:
                yield piece, x[piece.here]

    # ------------------------------------------------------------------ masks

    def solve(
        self,
        k: Budgets,
        beta: Sequence[float] | None = None,
        ranks: Tensor | None = None,
        learned: str | None = None,
        shifted: str | None = None,
    ) -> None:
        """n of every row; soft masks of magnitudes are found where they are written."""
        if self.power != 1.0 or (beta is not None and any(x is not None for x in (ranks, learned, shifted))):
            super().solve(k, beta, ranks, learned, shifted)
            return
        self.a, self.dual = self.pools.select(torch.empty(0), k), None
        if beta is not None:
            _, self.dual = self.pools.restored(None, [{"beta": x, "n": self.a.n} for x in beta])

    def solve_more(self, k: Budgets) -> None:
        """n of every row that are trained."""
        self.b = self.pools.select(torch.empty(0), k)

    def solve_piece(self, piece: RowPiece, u: Tensor) -> list[Tensor]:
        """Find the soft mask of a piece from its u, in block 0; its columns in order, if they were needed."""
        beta, center, offset = self.dual.beta[piece.segment], self._centers[piece.rows], self._offsets[piece.rows]
        return columns.solve(u, self.dual.n, beta, piece.room, center, offset)

    def solve_all(self) -> None:
        """Find the soft masks that are missing where a run goes on from a checkpoint: as they were."""
        if self.solved is not self.dual:
            self.make_room()
            for piece in self._pieces:
                self.solve_piece(piece, piece.magnitude(0))
            self.solved = self.dual

    def make_room(self) -> None:
        """For the soft masks of all rows."""
        if not len(self._centers):
            self._centers, self._offsets = torch.empty(2, self.count // self._pieces[0].m, dtype=self.dtype).unbind()

    def soft(self, piece: RowPiece, u: Tensor, block: int) -> Tensor:
        """The soft mask of a piece from its u, in this block."""
        center, offset = self._centers[piece.rows], self._offsets[piece.rows]
        return columns.soft(u, center, offset, self.dual.beta[piece.segment], piece.room.blocks[block])

    def plainly(self, form: Form) -> bool:
        """Whether A follows from |θ|."""
        return self.power == 1.0 and form.by_magnitude and not form.everything

    def by_stored(self, form: Form) -> bool:
        """Whether A is a stored mask of bools, and w what it leaves of θ."""
        known = isinstance(form.mask, Stored) and form.project and form.own is None and self.power == 1.0
        return known and self.state.per_unit[form.mask.name].dtype == torch.bool  # type: ignore[union-attr]
