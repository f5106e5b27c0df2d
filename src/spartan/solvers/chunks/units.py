"""Units of several weights on a CPU: what goes over all weights does so strip by strip; of units there are few."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spartan.solvers.base import Grads
from spartan.solvers.chunks.pieces import where_above
from spartan.solvers.chunks.unit_sums import ChunkSums
from spartan.solvers.forms import KEPT, LEAST, Along, Form, Where
from spartan.solvers.units import masked, times


class ChunkUnits(ChunkSums):
    """Plain torch for what is said of units; what they are read from and written to goes strip by strip, in place."""

    def write(self, form: Form | None) -> None:
        """w = [kept] ⊙ mask ⊙ θ into the parameters; exactly +0.0 where not kept."""
        assert form is not None
        if form.own is not None:
            super().write(form)
            return
        kept = self.kept(form) if form.project else None
        mask = self.mask(form, torch.empty(0) if kept is None else kept)
        x, w = self.matrices(self.values()), self.matrices([t.local for t in self.problem.targets])
        if kept is None and mask is None:
            for to, value in zip(w, x, strict=True):
                to.copy_(value)
            return
        m = kept if mask is None else mask if kept is None else masked(mask, kept)
        assert m is not None
        for strip, each in self.strips(m):
            value, out = strip.of(x[strip.i]), strip.of(w[strip.i])
            if kept is None:
                torch.mul(value, each[0], out=out)
                continue
            if mask is not None:
                value = torch.mul(value, each[0], out=strip.room[0])
            where_above(value, each[0], 0.0, grad_input=out)

    def _where(self, form: Form, factors: Where, grads: Grads) -> list[Tensor | None]:
        """g times a factor on A, on B∖A and on the rest."""
        if factors.everywhere or not self.alike(grads):
            return super()._where(form, factors, grads)
        g, kept = self.matrices(grads), factors == KEPT
        for strip, (factor,) in self.strips(self.kept(form) if kept else self._factors(form, factors), of=grads):
            here = strip.of(g[strip.i])
            if kept:
                where_above(here, factor, 0.0, grad_input=here)
            else:
                here.mul_(factor)
        return list(grads)

    def _through_mask(self, form: Form, grads: Grads) -> list[Tensor | None]:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(G − c·a₁/a₂), as in plain torch."""
        if not self.alike(grads):
            return super()._through_mask(form, grads)
        mask = self.mask(form, torch.empty(0))
        assert mask is not None
        g, x = self.matrices(grads), self.matrices(self.values())
        if not form.couples:
            for strip, (m,) in self.strips(mask, of=grads):
                strip.of(g[strip.i]).mul_(m)
            return list(grads)
        slope = times(self.problem, self._slope(mask, self.products(grads)), self.problem.factors)
        for strip, (m, by) in self.strips(mask, slope, of=grads):
            signs = torch.sign(strip.of(x[strip.i]), out=strip.room[0])
            strip.of(g[strip.i]).mul_(m).addcmul_(signs, by)
        return list(grads)

    def _along(self, form: Form, grads: Grads) -> list[Tensor | None]:
        """g where kept; elsewhere the part of it along θ, unit by unit, damped as the form says."""
        if not self.alike(grads):
            return super()._along(form, grads if form.damp is None else super()._damped(form, form.damp, grads))
        g, x, kept, squares = self.matrices(grads), self.matrices(self.values()), self.kept(form), self.squares()
        parts = masked(self.products(grads) / squares, ~kept & (squares > 0))
        if form.damp is not None:
            parts *= self._shares(form, form.damp)
        for strip, (keep, part) in self.strips(kept, parts, of=grads):
            here = strip.of(g[strip.i])
            where_above(here, keep, 0.0, grad_input=here).addcmul_(strip.of(x[strip.i]), part)
        return list(grads)

    def _damped(self, form: Form, by: Tensor, grads: Grads) -> list[Tensor | None]:
        """g where kept; elsewhere times so much of ‖w‖/‖θ‖, over the outputs that the unit has a part in."""
        if isinstance(form.back, Along):
            return list(grads)  # of which it only leaves a part
        if not self.alike(grads):
            return super()._damped(form, by, grads)
        some = [g if usual else None for g, usual in zip(grads, by.tolist(), strict=True)]
        g, shares = self.matrices(some), self._shares(form, by)
        for strip, (share,) in self.strips(shares.masked_fill_(self.kept(form), 1.0), of=some):
            strip.of(g[strip.i]).mul_(share)
        return list(grads)

    def _shares(self, form: Form, by: Tensor) -> Tensor:
        """What gradients are damped by, of every unit: a mask is the same all over a unit, and Σ w² is m²·Σ θ²."""
        squares, kept = self.squares(), self.kept(form)
        mask = self.mask(form, kept)
        left = masked(squares if mask is None else squares * mask * mask, kept)
        found, tiny = torch.ones_like(squares), torch.finfo(self.dtype).tiny
        each = zip(self.grids, *map(self.by_grid, (left, squares, found)), by.to(self.dtype), strict=True)
        for grid, of_w, of_theta, shares, usual in each:
            if usual:
                one, other = (x.sum(int(not grid.turned), keepdim=True) for x in (of_w, of_theta))
                shares.copy_(((one / other.clamp(min=tiny)).sqrt() * usual).clamp(LEAST, 1.0))
        return found

    def add_decay(self, form: Form, grads: Grads, scale: Tensor | None = None) -> None:
        """Add to gradients for θ what the form adds whatever the loss, times the scale that they still have."""
        if self.power != 1.0 or not self.alike(grads):
            super().add_decay(form, grads, scale)
            return
        assert form.decay is not None
        g, x, by = self.matrices(grads), self.matrices(self.values()), 1.0 if scale is None else float(scale)
        for strip, (factor,) in self.strips(self._factors(form, form.decay), of=grads):
            strip.of(g[strip.i]).addcmul_(strip.of(x[strip.i]), factor, value=by)

    def pace(self, form: Form, which: Sequence[int]) -> None:
        """Of these parameters, which an optimizer has moved away from θ: let them go as far as the form says."""
        assert form.pace is not None
        some, targets = set(which), self.problem.targets
        moved = [t.local if i in some else None for i, t in enumerate(targets)]
        to, theta = self.matrices(moved), self.matrices(self.theta.views)
        for strip, (factor,) in self.strips(self._factors(form, form.pace), of=moved):
            here = strip.of(to[strip.i])
            torch.lerp(strip.of(theta[strip.i]), here, factor, out=here)
