"""Turns gradients piece by piece, in place."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spartan.solvers.base import Grads
from spartan.solvers.chunks.masks import ChunkMasks, thresholds
from spartan.solvers.chunks.pieces import (
    Piece,
    as_bytes,
    ones_where_kept,
    only_kept,
    slope_of,
    times_slope,
    value_of,
    where_above,
)
from spartan.solvers.chunks.search import largest_below
from spartan.solvers.forms import KEPT, LEAST, VJP, Along, Form, Mask, PerSegment, Shifted, Stored, Where

# What is kept of a piece: x there and +0.0 elsewhere, into a third tensor; it takes room 0.
Projection = Callable[[Piece, Tensor, Tensor], Tensor]


class ChunkGradients(ChunkMasks):
    """The gradients of a part of the problem."""

    def turns(self, form: Form) -> bool:
        """Whether chunks turn gradients as the form says."""
        if not self.by_pieces or self.rescaled or (form.own is not None and not isinstance(form.mask, Shifted)):
            return False
        if form.learned is not None and self.state.learned[form.learned].dtype != self.dtype:
            return False
        if isinstance(form.back, Along) or (form.damp is not None and not all(piece.row for piece in self._pieces)):
            return False
        return isinstance(form.back, Where) or form.mask is Mask.SOFT or isinstance(form.mask, (Stored, Shifted))

    def turn(self, form: Form | None, grads: Grads) -> Grads:
        """Gradients for w into gradients for θ, in place."""
        assert form is not None
        if not (self.turns(form) and self._alike(grads)):
            return super().turn(form, grads)
        grads = self.with_missing(form, grads)
        if all(g is None for g in grads):
            return grads
        self.teach(form, grads)
        if form.damp is not None:
            self._damp(form, form.damp.tolist(), grads)
        if isinstance(form.mask, Shifted):
            self._teach_shifts(form, form.mask.name, grads)
            self._only_kept(form, grads)
        elif isinstance(form.back, Where):
            self._scale(form, form.back, grads)
        elif form.couples:
            self._pull(grads)
        else:
            self._times_mask(form, grads)
        if self.power != 1.0:
            for piece, g in self.beside(grads):
                g.mul_(slope_of(piece, self.power))
        return grads

    def _alike(self, grads: Grads) -> bool:
        """Whether gradients lie in memory as the weights do."""
        pairs = zip(grads, self.problem.targets, strict=True)
        return all(g is None or (g.stride() == t.local.stride() and g.dtype == t.local.dtype) for g, t in pairs)

    # ------------------------------------------------------------------ factors

    def projection(self, form: Form) -> Projection:
        """What keeps A of a piece, and only that."""
        if form.stored is not None:
            mask = as_bytes(self.state.per_unit[form.stored])

            def keep(piece: Piece, x: Tensor, out: Tensor) -> Tensor:
                ones = piece.room[0].copy_(mask[piece.units])
                return where_above(x, ones, 0.0, grad_input=out)

            return keep
        read, chosen = self.reader_for(form), thresholds(self.a)
        return lambda piece, x, out: only_kept(piece, read(piece), chosen[piece.segment], x, out)

    def _only_kept(self, form: Form, grads: Grads) -> None:
        keep = self.projection(form)
        for piece, g in self.beside(grads):
            keep(piece, g, g)

    def _scale(self, form: Form, by: Where, grads: Grads) -> None:
        """g times a factor on A, on B∖A and on the rest."""
        if by == KEPT:
            self._only_kept(form, grads)
        elif not by.everywhere:
            factors = self._factors_of(form, by)
            for piece, g in self.beside(grads):
                g.mul_(factors(piece))

    def _damp(self, form: Form, by: Sequence[float], grads: Grads) -> None:
        """g outside A times so much of ‖w‖/‖θ‖ of its output; the model holds w."""
        keep, weights = self.projection(form), self._flat([t.local for t in self.problem.targets])
        for piece, g in self.beside(grads):
            w = weights[piece.i]
            if not by[piece.i] or w is None:
                continue
            left, whole = (
                torch.mul(x, x, out=piece.room[0]).view(-1, piece.row).sum(1)
                for x in (w[piece.here], value_of(piece, self.power))
            )
            tiny = torch.finfo(self.dtype).tiny
            share = left.div_(whole.clamp_(min=tiny)).sqrt_().mul_(by[piece.i]).clamp_(LEAST, 1.0)
            keep(piece, g, piece.room[1])
            g.sub_(piece.room[1]).view(-1, piece.row).mul_(share[:, None])
            g.add_(piece.room[1])

    def _factors_of(self, form: Form, by: Where) -> Callable[[Piece], Tensor]:
        """The factors of a piece, in room 1: c + (b − c)·[B] + (a − b)·[A]; takes room 2."""
        in_a = self._members(form, form.stored, self.a) if by.divides else None
        in_b = None
        if by.divides_the_rest and (form.more is not None or self.b is not None):
            in_b = self._members(form, form.more, self.b)

        def factors(piece: Piece) -> Tensor:
            a, b, c = (_of(x, piece) for x in (by.a, by.b, by.c))
            c = b if in_b is None else c  # everything is in B
            found = piece.room[1]
            if in_a is None:
                found.fill_(c)
            else:
                in_a(piece, found).mul_(a - b).add_(c)
            return found if in_b is None else found.add_(in_b(piece, piece.room[2]), alpha=b - c)

        return factors

    def _members(self, form: Form, stored: str | None, chosen: object) -> Callable[[Piece, Tensor], Tensor]:
        """What writes 1 where a piece is in a set that is stored or selected, else 0."""
        if form.everything and stored is None and chosen is self.a:
            return lambda piece, out: out.fill_(1.0)
        if stored is not None:
            mask = as_bytes(self.state.per_unit[stored])
            return lambda piece, out: out.copy_(mask[piece.units])
        read, found = self.reader_for(form), thresholds(chosen)  # type: ignore[arg-type]
        return lambda piece, out: ones_where_kept(piece, read(piece), found[piece.segment], out)

    def add_decay(self, form: Form, grads: Grads, scale: Tensor | None = None) -> None:
        """Add to gradients for θ what the form adds whatever the loss, times the scale that they still have."""
        if not (self.by_pieces and form.own is None and self._alike(grads)):
            super().add_decay(form, grads, scale)
            return
        assert form.decay is not None
        factors, alpha = self._factors_of(form, form.decay), 1.0 if scale is None else float(scale)
        for piece, g in self.beside(grads):
            found = factors(piece).mul_(value_of(piece, self.power))
            if self.power != 1.0:
                found.mul_(slope_of(piece, self.power))
            g.add_(found, alpha=alpha)

    def pace(self, form: Form, which: Sequence[int]) -> None:
        """Of these parameters, which an optimizer has moved away from θ: let them go as far as the form says."""
        targets, some = self.problem.targets, set(which)
        moved = [t.local if i in some else None for i, t in enumerate(targets)]
        if not (self.by_pieces and form.own is None and self._alike(moved)):
            super().pace(form, which)
            return
        assert form.pace is not None
        factors = self._factors_of(form, form.pace)
        for piece, x in self.beside(moved):
            torch.lerp(piece.theta, x, factors(piece), out=x)

    # ------------------------------------------------------------------ through masks

    def _times_mask(self, form: Form, grads: Grads) -> None:
        """m·g, where masks have no slope in θ."""
        if isinstance(form.mask, Stored):
            mask = self.state.per_unit[form.mask.name]
            for piece, g in self.beside(grads):
                g.mul_(mask[piece.units])
            return
        soft, read = self.soft_masks(), self.reader_for(form)
        for piece, g in self.beside(grads):
            g.mul_(soft(piece, read(piece), piece.room[1]))

    def _ratios(self, form: Form, grads: Grads) -> list[float]:
        """a₁/a₂ of every segment: how far its budget pulls a unit back; 0 where the mask is flat."""
        problem, soft, read = self.problem, self.soft_masks(), self.reader_for(form)
        a1, a2 = [0.0] * len(problem.targets), [0.0] * len(problem.segments)
        flat = self._flat(grads)
        for piece in self._pieces:
            m = soft(piece, read(piece), piece.room[0])
            slope = float(torch.dot(m, torch.sub(1.0, m, out=piece.room[1])))
            a2[piece.segment] += piece.cost * slope
            g = flat[piece.i]
            if g is not None:
                rest = times_slope(value_of(piece, self.power), m, grad_input=piece.room[2])
                a1[piece.i] += float(torch.dot(g[piece.here], rest))
        ratios = []
        for s, segment in enumerate(problem.segments):
            # A target with a NaN or infinite gradient is left out, as in `Pools.pulled_back`.
            finite = math.fsum(a1[i] for i in segment.targets if math.isfinite(a1[i]))
            ratios.append(finite / a2[s] if a2[s] else 0.0)
        return ratios

    def _pull(self, grads: Grads) -> None:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − c·a₁/a₂), in place."""
        form = Form(Mask.SOFT, VJP.THROUGH)
        ratios, soft, read = self._ratios(form, grads), self.soft_masks(), self.reader_for(form)
        for piece, g in self.beside(grads):
            m, value = soft(piece, read(piece), piece.room[0]), value_of(piece, self.power)
            # q = sign(θ)·m(1−m) makes it g·(m + βqu'θ) − βqu'c·a₁/a₂, with u' = ∂u/∂|θ|.
            q = torch.sign(value, out=piece.room[1])
            q = times_slope(q, m, grad_input=q)
            slope = self.dual.beta[piece.segment] * piece.factor
            g.mul_(m.addcmul_(q, value, value=slope))
            g.sub_(q, alpha=slope * piece.cost * ratios[piece.segment])

    # ------------------------------------------------------------------ what is learned

    def teach(self, form: Form, grads: Grads) -> None:
        """The gradient of learned ranks, into their `.grad`: g·θ of their unit, or the slope of the soft mask."""
        if form.learned is None or form.mask is Mask.ONE:  # a hard mask has no slope
            return
        if not (self.turns(form) and self._alike(grads)):
            super().teach(form, grads)
            return
        parameter = self.state.learned[form.learned]
        fresh = parameter.grad is None
        whole = torch.empty_like(parameter.detach()) if parameter.grad is None else parameter.grad
        soft = self.soft_masks() if form.mask is Mask.SOFT else None
        ratios, read = self._ratios(form, grads) if soft else [], self.reader_for(form)
        flat = self._flat(grads)
        for piece in self._pieces:
            g, out = flat[piece.i], whole[piece.units] if fresh else piece.room[2]
            out = out.zero_() if g is None else torch.mul(g[piece.here], value_of(piece, self.power), out=out)
            if soft is not None:
                out.sub_(piece.cost * ratios[piece.segment])
                times_slope(out, soft(piece, read(piece), piece.room[1]), grad_input=out)
                out.mul_(self.dual.beta[piece.segment])
            if not fresh:
                whole[piece.units].add_(out)
        parameter.grad = whole

    def _teach_shifts(self, form: Form, name: str, grads: Grads) -> None:
        """∂L/∂s = −sigmoid'(s)·Σ g·sign(θ)·(∂|θ|/∂u) over what is kept, where its mask shrinks at all."""
        parameter, shifts = self.state.learned_per_target[name], self.shifts(name)
        read, chosen = self.reader_for(form), thresholds(self.a)
        below, sums = largest_below(self._pieces, read, chosen), [0.0] * len(shifts)
        for piece, g in self.beside(grads):
            if shifts[piece.i] + below[piece.segment] > 0:
                signs = torch.sign(value_of(piece, self.power), out=piece.room[1])
                only_kept(piece, read(piece), chosen[piece.segment], signs, out=signs)
                sums[piece.i] -= float(torch.dot(g, signs)) / piece.factor
        found = torch.tensor([x * shift * (1.0 - shift) for x, shift in zip(sums, shifts, strict=True)])
        found = found.to(parameter.dtype)
        parameter.grad = found if parameter.grad is None else parameter.grad + found


def _of(numbers: PerSegment, piece: Piece) -> float:
    if isinstance(numbers, Tensor):
        return float(numbers[piece.i])
    return numbers if isinstance(numbers, float) else numbers[piece.segment]
