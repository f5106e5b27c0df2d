"""Turns gradients for w into gradients for θ where every m weights have a budget of their own, on a CPU, in place."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spartan.ops import columns
from spartan.solvers.base import Grads
from spartan.solvers.chunks.pieces import times_slope
from spartan.solvers.chunks.row_masks import ChunkRowMasks
from spartan.solvers.chunks.row_pieces import RowPiece
from spartan.solvers.forms import KEPT, Form, PerSegment, Stored, Where


class ChunkRowGradients(ChunkRowMasks):
    """The gradients of a part of the problem."""

    def turns(self, form: Form) -> bool:
        """Whether chunks turn gradients as the form says."""
        plainly = self.plainly(form)
        if form.damp is not None or not (plainly or self.by_stored(form)):
            return False
        if form.learned is not None and self.state.learned[form.learned].dtype != self.dtype:
            return False
        if isinstance(form.back, Where):
            return (plainly and form.more is None) or form.back.everywhere or form.back == KEPT
        return form.couples

    def _alike(self, grads: Grads) -> bool:
        """Whether gradients lie in memory as the weights do."""
        pairs = zip(grads, self.problem.targets, strict=True)
        return all(g is None or (g.stride() == t.local.stride() and g.dtype == t.local.dtype) for g, t in pairs)

    def turn(self, form: Form | None, grads: Grads) -> Grads:
        """Gradients for w into gradients for θ, in place."""
        assert form is not None
        if not (self.turns(form) and self._alike(grads)):
            return super().turn(form, grads)
        if all(g is None for g in grads):
            return grads
        self.teach(form, grads)
        if form.couples:
            self._pull(grads)
        elif isinstance(form.back, Where) and not form.back.everywhere:
            self._scale(form, form.back, grads)
        return grads

    # ------------------------------------------------------------------ factors

    def _scale(self, form: Form, by: Where, grads: Grads) -> None:
        """g times a factor on A, on B∖A and on the rest."""
        if isinstance(form.mask, Stored):
            mask, zero = self.state.per_unit[form.mask.name], torch.zeros((), dtype=self.dtype)
            for piece, g in self.beside(grads):
                x = piece.shaped(g)
                torch.where(piece.of_units(mask), x, zero, out=x)
            return
        if by != KEPT:
            factors = self._factors_of(by)
            for piece, g in self.beside(grads):
                f = factors(piece, piece.read(piece.theta, 0))
                x = piece.columns(g)
                piece.write(piece.read(x, 0).mul_(f), x)
            return
        for piece, g in self.beside(grads):
            x, u = piece.columns(g), piece.magnitude(piece.read(piece.theta, 0), 0)
            kept = columns.keep(u, self.a.n, piece.room, piece.room.blocks[1])
            piece.write(columns.only(piece.read(x, 0), kept, piece.room.blocks[0]), x)

    def _factors_of(self, by: Where) -> Callable[[RowPiece, Tensor], Tensor]:
        """The factors of a piece from its θ, in block 2: c + (b − c)·[B] + (a − b)·[A]; takes block 1."""

        def factors(piece: RowPiece, theta: Tensor) -> Tensor:
            a, b, c = (_of(x, piece) for x in (by.a, by.b, by.c))
            if self.b is None:
                c = b  # everything is in B
            u, room = piece.magnitude(theta, 1), piece.room
            found = columns.keep(u, self.a.n, room, room.blocks[2]).mul_(a - b).add_(c)
            if c != b:
                found.add_(columns.keep(u, self.b.n, room, room.blocks[3]), alpha=b - c)
            return found

        return factors

    def add_decay(self, form: Form, grads: Grads, scale: Tensor | None = None) -> None:
        """Add to gradients for θ what the form adds whatever the loss, times the scale that they still have."""
        if not (self.plainly(form) and form.more is None and self._alike(grads)):
            super().add_decay(form, grads, scale)
            return
        assert form.decay is not None
        factors, alpha = self._factors_of(form.decay), 1.0 if scale is None else float(scale)
        for piece, g in self.beside(grads):
            theta, x = piece.read(piece.theta, 0), piece.columns(g)
            added = factors(piece, theta).mul_(theta)
            piece.write(piece.read(x, 0).add_(added, alpha=alpha), x)

    def pace(self, form: Form, which: Sequence[int]) -> None:
        """Of these parameters, which an optimizer has moved away from θ: let them go as far as the form says."""
        some = set(which)
        moved = [t.local if i in some else None for i, t in enumerate(self.problem.targets)]
        if not (self.plainly(form) and form.more is None and self._alike(moved)):
            super().pace(form, which)
            return
        assert form.pace is not None
        factors = self._factors_of(form.pace)
        for piece, parameter in self.beside(moved):
            theta, x = piece.read(piece.theta, 0), piece.columns(parameter)
            f = factors(piece, theta)
            piece.write(torch.lerp(theta, piece.read(x, 1), f, out=theta), x)

    # ------------------------------------------------------------------ through masks

    def _pull(self, grads: Grads) -> None:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − a₁/a₂), with the sums over each row."""
        self.solve_all()
        for piece, given in self.beside(grads):
            theta, room, at = piece.read(piece.theta, 0), piece.room, piece.columns(given)
            m = self.soft(piece, piece.magnitude(theta, 1), 1)
            slope, pulled = torch.addcmul(m, m, m, value=-1.0, out=room.blocks[2]), room.blocks[3]
            a1, a2, flat = room.lines[:3]
            torch.sum(slope, 0, out=a2)
            torch.mul(theta, piece.read(at, 3), out=pulled)
            torch.sum(times_slope(pulled, m, grad_input=pulled), 0, out=a1)
            torch.eq(a2, 0.0, out=flat)
            # Where the mask is flat, so is what it pulls: a₁ = 0.
            ratio = a1.div_(a2.add_(flat))
            pulled.addcmul_(slope, ratio.neg_())
            pulled.mul_(torch.sign(theta, out=theta))
            g = piece.read(at, 0).mul_(m)
            piece.write(g.add_(pulled, alpha=self.dual.beta[piece.segment] * piece.factor), at)

    def teach(self, form: Form, grads: Grads) -> None:
        """The gradient of learned ranks, into their `.grad`: g·θ of their unit, where their mask is stored."""
        if form.learned is None or not (self.turns(form) and self._alike(grads)):
            super().teach(form, grads)
            return
        parameter = self.state.learned[form.learned]
        fresh = parameter.grad is None
        whole = torch.empty_like(parameter.detach()) if parameter.grad is None else parameter.grad
        flat = [None if g is None else self.problem.targets[i].flatten(g.detach()) for i, g in enumerate(grads)]
        thetas = [self.problem.targets[i].flatten(theta) for i, theta in enumerate(self.theta.views)]
        for piece in self._pieces:
            g, out = flat[piece.i], piece.of_units(whole)
            if g is None and fresh:
                out.zero_()
            elif g is None:
                continue
            elif fresh:
                torch.mul(piece.shaped(g), piece.shaped(thetas[piece.i]), out=out)
            else:
                out.addcmul_(piece.shaped(g), piece.shaped(thetas[piece.i]))
        parameter.grad = whole


def _of(numbers: PerSegment, piece: RowPiece) -> float:
    if isinstance(numbers, Tensor):
        return float(numbers[piece.i])
    return numbers if isinstance(numbers, float) else numbers[piece.segment]
