"""Moves weights of which n of every m are kept piece by piece: what is kept of θ, times masks, into the model."""

import torch

from spartan.ops import columns
from spartan.solvers.chunks.row_gradients import ChunkRowGradients
from spartan.solvers.chunks.row_pieces import shrink
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
            mask, zero = self.state.per_unit[form.mask.name], torch.zeros((), dtype=self.dtype)
            flat = [self.problem.targets[i].flatten(x) for i, x in enumerate(self.theta.views)]
            for piece, w in self.beside([t.local for t in self.problem.targets]):
                torch.where(piece.of_units(mask), piece.shaped(flat[piece.i]), zero, out=piece.shaped(w))
        elif not self.plainly(form):
            super().write(form)
        elif form.mask is Mask.SOFT:
            self._write_soft(form.project)
        else:
            self._write_hard(form.mask if isinstance(form.mask, Shrunk) else None)

    def _write_soft(self, project: bool) -> None:
        missing = self.solved is not self.dual
        self.make_room()
        for piece, w in self.beside([t.local for t in self.problem.targets]):
            room, n = piece.room, self.a.n
            # The search takes blocks 1 to 3: u goes where θ is, which is read once more.
            u = piece.magnitude(piece.read(piece.theta, 0), 0)
            order = self.solve_piece(piece, u) if missing else []
            m, kept = self.soft(piece, u, 1), room.blocks[2]
            if project and order:
                columns.kept_above(u, n, order[n - 1], order[n], room, kept)
            elif project:
                columns.keep(u, n, room, kept)
            x = piece.read(piece.theta, 3).mul_(m)
            piece.write(columns.only(x, kept, x) if project else x, piece.columns(w))
        self.solved = self.dual

    def _write_hard(self, shrunk: Shrunk | None) -> None:
        for piece, w in self.beside([t.local for t in self.problem.targets]):
            theta, room = piece.read(piece.theta, 0), piece.room
            u, kept = piece.magnitude(theta, 1), room.blocks[2]
            if shrunk is None:
                x = theta
                columns.keep(u, self.a.n, room, kept)
            else:
                tau = room.lines[7]
                columns.keep(u, self.a.n, room, kept, below=tau)
                x = shrink(piece, u, tau, kept, shrunk).mul_(theta)
            piece.write(columns.only(x, kept, x), piece.columns(w))
