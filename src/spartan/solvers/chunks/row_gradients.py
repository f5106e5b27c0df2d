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
            mask = self.state.per_unit[form.mask.name]
            for piece, g in self.beside(grads):
                columns.only(g, piece.stored(mask, 0), g)
            return
        if by == KEPT:
            for piece, g in self.beside(grads):
                columns.only(g, piece.kept(self.a.n, 0), g)
            return
        factors = self._factors_of(by)
        for piece, g in self.beside(grads):
            g.mul_(factors(piece))

    def _factors_of(self, by: Where) -> Callable[[RowPiece], Tensor]:
        """The factors of a piece: c + (b − c)·[B] + (a − b)·[A]."""

        def factors(piece: RowPiece) -> Tensor:
            a, b, c = (_of(x, piece) for x in (by.a, by.b, by.c))
            if self.b is None:
                c = b  # everything is in B
            found = piece.kept(self.a.n, 0).mul_(a - b).add_(c)
            return found if c == b else found.add_(piece.kept(self.b.n, 1), alpha=b - c)

        return factors

    def add_decay(self, form: Form, grads: Grads, scale: Tensor | None = None) -> None:
        """Add to gradients for θ what the form adds whatever the loss, times the scale that they still have."""
        if not (self.plainly(form) and form.more is None and self._alike(grads)):
            super().add_decay(form, grads, scale)
            return
        assert form.decay is not None
        factors, alpha = self._factors_of(form.decay), 1.0 if scale is None else float(scale)
        for piece, g in self.beside(grads):
            g.add_(factors(piece).mul_(piece.theta), alpha=alpha)

    def pace(self, form: Form, which: Sequence[int]) -> None:
        """Of these parameters, which an optimizer has moved away from θ: let them go as far as the form says."""
        some = set(which)
        moved = [t.local if i in some else None for i, t in enumerate(self.problem.targets)]
        if not (self.plainly(form) and form.more is None and self._alike(moved)):
            super().pace(form, which)
            return
        assert form.pace is not None
        factors = self._factors_of(form.pace)
        for piece, x in self.beside(moved):
            torch.lerp(piece.theta, x, factors(piece), out=x)

    # ------------------------------------------------------------------ through masks

    def _pull(self, grads: Grads) -> None:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − a₁/a₂), with the sums over each row."""
        self.solve_all()
        for piece, g in self.beside(grads):
            room, (a1, a2, flat) = piece.room, piece.room.lines[:3]
            m = self.soft(piece, piece.magnitude(1), 1)
            pull, slope = piece.product(g, 3), torch.addcmul(m, m, m, value=-1.0, out=room.blocks[2])
            torch.sum(slope, 0, out=a2)
            torch.sum(times_slope(pull, m, grad_input=pull), 0, out=a1)
            # Where the mask is flat, so is what it pulls: a₁ = 0.
            ratio = a1.div_(a2.add_(torch.eq(a2, 0.0, out=flat)))
            pull.addcmul_(slope, ratio, value=-1.0)
            g.mul_(piece.laid(m, 0))
            found = piece.laid(pull, 1).mul_(torch.sign(piece.theta, out=room.blocks[2].view(-1)))
            g.add_(found, alpha=self.dual.beta[piece.segment] * piece.factor)

    def teach(self, form: Form, grads: Grads) -> None:
        """The gradient of learned ranks, into their `.grad`: g·θ of their unit, where their mask is stored."""
        if form.learned is None or not (self.turns(form) and self._alike(grads)):
            super().teach(form, grads)
            return
        parameter = self.state.learned[form.learned]
        fresh = parameter.grad is None
        whole = torch.empty_like(parameter.detach()) if parameter.grad is None else parameter.grad
        if fresh and any(g is None for g in grads):
            whole.zero_()
        for piece, g in self.beside(grads):
            out, x, theta = piece.of_units(whole), piece.shaped(g), piece.shaped(piece.theta)
            if fresh:
                torch.mul(x, theta, out=out)
            else:
                out.addcmul_(x, theta)
        parameter.grad = whole


def _of(numbers: PerSegment, piece: RowPiece) -> float:
    if isinstance(numbers, Tensor):
        return float(numbers[piece.i])
    return numbers if isinstance(numbers, float) else numbers[piece.segment]
