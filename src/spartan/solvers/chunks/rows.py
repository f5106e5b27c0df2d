"""Moves weights of which n of every m are kept piece by piece: what is kept of θ, times masks, into the model."""

import torch
from torch import Tensor

from spartan.ops import columns
from spartan.solvers.chunks.row_gradients import ChunkRowGradients
from spartan.solvers.chunks.row_pieces import RowPiece, shrunk
from spartan.solvers.forms import Form, Mask, Shrunk, Stored


class ChunkRows(ChunkRowGradients):
    """Goes through n of every m weights in chunks; what they cannot do, plain torch does."""

    def serves(self, form: Form) -> bool:
        """Whether chunks can write what the form says."""
        return form.everything or self.plainly(form) or self.by_stored(form)

    def write(self, form: Form | None) -> None:
        """w = [kept] ⊙ mask ⊙ θ into the parameters; exactly +0.0 where not kept."""
        assert form is not None
        if isinstance(form.mask, Stored) and self.by_stored(form):
            mask = self.state.per_unit[form.mask.name]
            for piece, w in self.beside([t.local for t in self.problem.targets]):
                columns.only(piece.theta, piece.stored(mask, 0), w)
        elif not self.plainly(form):
            super().write(form)
        elif form.mask is Mask.SOFT:
            self._write_soft(form.project)
        elif isinstance(form.mask, Shrunk):
            for piece, w in self.beside([t.local for t in self.problem.targets]):
                times(piece, shrunk(piece, self.a.n, form.mask), w)
        else:
            for piece, w in self.beside([t.local for t in self.problem.targets]):
                columns.only(piece.theta, piece.kept(self.a.n, 0), w)

    def _write_soft(self, project: bool) -> None:
        missing = self.solved is not self.dual
        self.make_room()
        for piece, w in self.beside([t.local for t in self.problem.targets]):
            u, kept, n = piece.magnitude(0), piece.room.blocks[2], self.a.n
            order = self.solve_piece(piece, u) if missing else []
            m = self.soft(piece, u, 1)
            if project and order:
                columns.kept_above(u, n, order[n - 1], order[n], piece.room, kept)
            elif project:
                columns.keep(u, n, piece.room, kept)
            times(piece, columns.only(m, kept, m) if project else m, w)
        self.solved = self.dual


def times(piece: RowPiece, mask: Tensor, out: Tensor) -> None:
    """θ times a mask that is given as columns; +0.0 where it is 0, of which a product alone would make −0.0."""
    torch.addcmul(torch.zeros((), dtype=mask.dtype), piece.theta, piece.laid(mask, 0), out=out)
