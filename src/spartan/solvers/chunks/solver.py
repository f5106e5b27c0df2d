"""Moves weights piece by piece: what is kept of θ, times masks that are made on the way, into the model."""

from collections.abc import Callable

import torch
from torch import Tensor

from spartan.solvers.chunks.masks import thresholds
from spartan.solvers.chunks.pieces import Piece, bounds, only_kept, scaled_rows, shifted_value, shrunk_mask, value_of
from spartan.solvers.chunks.search import largest_below
from spartan.solvers.chunks.vectors import ChunkVectors
from spartan.solvers.forms import Form, Mask, Shifted, Shrunk, Stored


class ChunkSolver(ChunkVectors):
    """Goes through the weights in chunks; what they cannot do, plain torch does."""

    name = "chunks"

    def serves(self, form: Form) -> bool:
        """Whether chunks can write what the form says."""
        if isinstance(form.mask, Shrunk):
            rows = not form.mask.row_scale or all(piece.row for piece in self._pieces)
            return self.by_pieces and form.by_magnitude and form.project and rows
        known = form.own is None or isinstance(form.mask, Shifted)
        return self.by_pieces and known and not (form.mask is Mask.SOFT and self.rescaled)

    def write(self, form: Form | None) -> None:
        """w = [kept] ⊙ mask ⊙ θ into the parameters; exactly +0.0 where not kept."""
        assert form is not None
        if not self.serves(form):
            super().write(form)
        elif form.by_magnitude and form.project and isinstance(form.mask, Mask) and self.power == 1.0:
            self._write_by_magnitude(form.mask is Mask.SOFT)
        else:
            self._write(form)

    def _write(self, form: Form) -> None:
        mask, project = self._masked(form), form.project and form.stored is None
        keep = self.projection(form) if form.stored is not None and form.project else None
        read = self.reader_for(form) if form.stored is None and not form.everything else None
        chosen = thresholds(self.a) if project else []
        for piece, parameter in self.beside([t.local for t in self.problem.targets]):
            value = value_of(piece, self.power)
            u = value if read is None else read(piece)
            x = value if mask is None else mask(piece, value, u)
            if keep is not None:
                keep(piece, x, parameter)
            elif project:
                only_kept(piece, u, chosen[piece.segment], x, out=parameter)
            else:
                parameter.copy_(x)

    def _write_by_magnitude(self, soft: bool) -> None:
        """The same where masks are 1 or soft and follow from |θ|."""
        read, chosen = self.reader(), thresholds(self.a)
        make = self.soft_masks() if soft else None
        for piece, parameter in self.beside([t.local for t in self.problem.targets]):
            threshold = chosen[piece.segment]
            if piece.factor != 1.0:
                u = read(piece)
                x = piece.theta if make is None else make(piece, u, piece.room[1]).mul_(piece.theta)
                only_kept(piece, u, threshold, x, out=parameter)
                continue
            # u is |θ| itself: half the time of the above.
            for place, bound in bounds(piece, threshold):
                torch.hardshrink(piece.theta[place], bound, out=parameter[place])
            if make is not None:
                parameter.mul_(make(piece, read(piece), piece.room[0]))

    def _masked(self, form: Form) -> Callable[[Piece, Tensor, Tensor], Tensor] | None:
        """What makes θ · mask of a piece from its θ, or ψ, and its u, in room 1; None where the mask is 1."""
        mask = form.mask
        if isinstance(mask, Stored):
            stored = self.state.per_unit[mask.name]
            if stored.dtype == torch.bool:
                return None
            return lambda piece, value, u: torch.mul(value, stored[piece.units], out=piece.room[1])
        if mask is Mask.SOFT:
            soft = self.soft_masks()
            return lambda piece, value, u: soft(piece, u, piece.room[1]).mul_(value)
        if isinstance(mask, Mask):
            return None
        chosen = thresholds(self.a)
        below = largest_below(self._pieces, self.reader_for(form), chosen)
        if isinstance(mask, Shifted):
            shifts = self.shifts(mask.name)

            def shifted(piece: Piece, value: Tensor, u: Tensor) -> Tensor:
                return shifted_value(piece, value, u, below[piece.segment], shifts[piece.i], piece.room[1])

            return shifted
        by = mask

        def shrunk(piece: Piece, value: Tensor, u: Tensor) -> Tensor:
            tau, found = below[piece.segment], piece.room[1]
            # Where nothing is subtracted the mask is 1.
            found = shrunk_mask(u, tau, by.p, found, piece.room[2]) if tau > 0 else found.fill_(1.0)
            if by.row_scale:
                scaled_rows(piece, value, u, chosen[piece.segment], found)
            return found.mul_(value)

        return shrunk
