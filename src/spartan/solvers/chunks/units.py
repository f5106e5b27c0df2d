"""Units of several weights on a CPU: what goes over all weights does so strip by strip; of units there are few."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import Flags, Grads
from spartan.solvers.chunks.masks import WORTH
from spartan.solvers.chunks.pieces import where_above
from spartan.solvers.chunks.strips import Strip, add_up, cut_into_strips, grid_of, matrix_of, spread
from spartan.solvers.forms import KEPT, LEAST, Form, Where
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import masked, times


class ChunkUnits(TorchSolver):
    """Plain torch for what is said of units; what they are read from and written to goes strip by strip, in place."""

    name = "chunks"

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        found = [grid_of(problem, i) for i in range(len(problem.targets))]
        self._grids = [grid for grid in found if grid is not None]
        self._strips = cut_into_strips(self._grids, self.theta.views)
        self._scores: tuple[object, Tensor] | None = None  # of which θ, and u

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Blocks, rows or columns of matrices on a CPU, and many weights."""
        kinds = {(t.parameter.device.type, t.parameter.dtype) for t in problem.targets}
        if kernels != "auto":
            return f"kernels={kernels!r}"
        if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.float64)}):
            return "not float32 or float64 on a CPU"
        if problem.pattern.single or problem.pattern.rows is not None:
            return "units of one weight"
        if not problem.ranks.alone:
            return "weights in shards"
        if any(grid_of(problem, i) is None for i in range(len(problem.targets))):
            return "units that are no blocks of matrices in row-major order"
        return "few weights" if sum(t.numel for t in problem.targets) <= WORTH else ""

    # ------------------------------------------------------------------ from weights to units

    def scores(self) -> Tensor:
        """u = v/c of every unit, read once as long as θ stays."""
        now = [x._version for x in self.theta.views], self.power, self.problem.factors
        if self._scores is None or self._scores[0] != now:
            self._scores = now, self.magnitudes(self.values())
        return self._scores[1]

    def magnitudes(self, slabs: Sequence[Tensor]) -> Tensor:
        """u = Σ|x| of every unit, by its cost and the value power."""
        if not self._alike(slabs) or any(x.requires_grad for x in slabs):
            return super().magnitudes(slabs)
        x = self._matrices(slabs)
        u = self._sum(lambda strip: torch.abs(strip.of(x[strip.i]), out=strip.room[0]))
        return times(self.problem, u, self.problem.factors)

    def products(self, grads: Grads) -> Tensor:
        """G = Σ g·θ over every unit; a missing gradient counts as zero."""
        if not self._alike(grads):
            return super().products(grads)
        g, x = self._matrices(grads), self._matrices(self.values())
        return self._sum(lambda strip: torch.mul(strip.of(g[strip.i]), strip.of(x[strip.i]), out=strip.room[0]), grads)

    def _sum(self, make: Callable[[Strip], Tensor], there: Grads | None = None) -> Tensor:
        """The sum over each unit of what is made of each strip, of those targets that are there."""
        found = torch.zeros(self.count, dtype=self.dtype)
        sums = self._by_grid(found)
        for strip in self._strips:
            if there is None or there[strip.i] is not None:
                add_up(strip, self._grids[strip.i], make(strip), sums[strip.i])
        return found

    # ------------------------------------------------------------------ and back

    def write(self, form: Form | None) -> None:
        """w = [kept] ⊙ mask ⊙ θ into the parameters; exactly +0.0 where not kept."""
        assert form is not None
        if form.own is not None:
            super().write(form)
            return
        kept = self.kept(form) if form.project else None
        mask = self.mask(form, torch.empty(0) if kept is None else kept)
        x, w = self._matrices(self.values()), self._matrices([t.local for t in self.problem.targets])
        if kept is None and mask is None:
            for to, value in zip(w, x, strict=True):
                to.copy_(value)
            return
        m = kept if mask is None else mask if kept is None else masked(mask, kept)
        assert m is not None
        for strip, each in self._spread(m):
            value, out = strip.of(x[strip.i]), strip.of(w[strip.i])
            if kept is None:
                torch.mul(value, each[0], out=out)
                continue
            if mask is not None:
                value = torch.mul(value, each[0], out=strip.room[0])
            where_above(value, each[0], 0.0, grad_input=out)

    def _where(self, form: Form, factors: Where, grads: Grads) -> list[Tensor | None]:
        """g times a factor on A, on B∖A and on the rest."""
        if factors.everywhere or not self._alike(grads):
            return super()._where(form, factors, grads)
        g, kept = self._matrices(grads), factors == KEPT
        for strip, (factor,) in self._spread(self.kept(form) if kept else self._factors(form, factors), of=grads):
            here = strip.of(g[strip.i])
            if kept:
                where_above(here, factor, 0.0, grad_input=here)
            else:
                here.mul_(factor)
        return list(grads)

    def _through_mask(self, form: Form, grads: Grads) -> list[Tensor | None]:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(G − c·a₁/a₂), as in plain torch."""
        if not self._alike(grads):
            return super()._through_mask(form, grads)
        mask = self.mask(form, torch.empty(0))
        assert mask is not None
        g, x = self._matrices(grads), self._matrices(self.values())
        if not form.couples:
            for strip, (m,) in self._spread(mask, of=grads):
                strip.of(g[strip.i]).mul_(m)
            return list(grads)
        slope = times(self.problem, self._slope(mask, self.products(grads)), self.problem.factors)
        for strip, (m, by) in self._spread(mask, slope, of=grads):
            signs = torch.sign(strip.of(x[strip.i]), out=strip.room[0])
            strip.of(g[strip.i]).mul_(m).addcmul_(signs, by)
        return list(grads)

    def _along(self, form: Form, grads: Grads) -> list[Tensor | None]:
        """g where kept; elsewhere the part of it along θ, unit by unit."""
        if not self._alike(grads):
            return super()._along(form, grads)
        g, x, kept = self._matrices(grads), self._matrices(self.values()), self.kept(form)
        squares = self._sum(lambda strip: torch.square(strip.of(x[strip.i]), out=strip.room[0]))
        parts = masked(self.products(grads) / squares, ~kept & (squares > 0))
        for strip, (keep, part) in self._spread(kept, parts, of=grads):
            here = strip.of(g[strip.i])
            where_above(here, keep, 0.0, grad_input=here).addcmul_(strip.of(x[strip.i]), part)
        return list(grads)

    def _damped(self, form: Form, by: Tensor, grads: Grads) -> list[Tensor | None]:
        """g where kept; elsewhere times so much of ‖w‖/‖θ‖, over the outputs that the unit has a part in."""
        if not self._alike(grads) or any(grid.turned for grid in self._grids):
            return super()._damped(form, by, grads)
        some = [g if usual else None for g, usual in zip(grads, by.tolist(), strict=True)]
        g, x = self._matrices(some), self._matrices(self.values())
        w = self._matrices([t.local for t in self.problem.targets])  # which the model holds now
        sums = [torch.zeros(2, grid.down, dtype=self.dtype) for grid in self._grids]
        for strip in self._strips:
            if some[strip.i] is not None:
                for of_rows, matrix in zip(sums[strip.i], (w, x), strict=True):
                    of_rows[strip.units] += torch.square(strip.of(matrix[strip.i]), out=strip.room[0]).sum((1, 2))
        shares, tiny = torch.ones(self.count, dtype=self.dtype), torch.finfo(self.dtype).tiny
        for i, (share, (left, whole)) in enumerate(zip(self._by_grid(shares), sums, strict=True)):
            if some[i] is not None:
                share.copy_(((left / whole.clamp(min=tiny)).sqrt() * by[i].to(self.dtype)).clamp(LEAST, 1.0)[:, None])
        for strip, (share,) in self._spread(shares.masked_fill_(self.kept(form), 1.0), of=some):
            strip.of(g[strip.i]).mul_(share)
        return list(grads)

    def add_decay(self, form: Form, grads: Grads, scale: Tensor | None = None) -> None:
        """Add to gradients for θ what the form adds whatever the loss, times the scale that they still have."""
        if self.power != 1.0 or not self._alike(grads):
            super().add_decay(form, grads, scale)
            return
        assert form.decay is not None
        g, x, by = self._matrices(grads), self._matrices(self.values()), 1.0 if scale is None else float(scale)
        for strip, (factor,) in self._spread(self._factors(form, form.decay), of=grads):
            strip.of(g[strip.i]).addcmul_(strip.of(x[strip.i]), factor, value=by)

    def pace(self, form: Form, which: Sequence[int]) -> None:
        """Of these parameters, which an optimizer has moved away from θ: let them go as far as the form says."""
        assert form.pace is not None
        some, targets = set(which), self.problem.targets
        moved = [t.local if i in some else None for i, t in enumerate(targets)]
        to, theta = self._matrices(moved), self._matrices(self.theta.views)
        for strip, (factor,) in self._spread(self._factors(form, form.pace), of=moved):
            here = strip.of(to[strip.i])
            torch.lerp(strip.of(theta[strip.i]), here, factor, out=here)

    # ------------------------------------------------------------------ how tensors lie

    def _spread(self, *numbers: Tensor, of: Grads | None = None) -> Iterator[tuple[Strip, list[Tensor]]]:
        """Each strip, and what is said of its units at every column; only of those targets that are there."""
        matrices = [self._by_grid(x) for x in numbers]
        for strip in self._strips:
            if of is None or of[strip.i] is not None:
                pairs = zip(matrices, strip.across, strict=False)
                yield strip, [spread(strip, self._grids[strip.i], each[strip.i], out) for each, out in pairs]

    def _by_grid(self, units: Tensor) -> list[Tensor]:
        """What is said of units, as a matrix for each target; views."""
        return [grid.of(units[here]) for grid, here in zip(self._grids, self.problem.slices, strict=True)]

    def _matrices(self, tensors: Grads) -> list[Tensor]:
        """Tensors that lie as the weights do, as matrices."""
        none = torch.empty(0)
        return [none if x is None else matrix_of(grid, x) for grid, x in zip(self._grids, tensors, strict=True)]

    def _alike(self, tensors: Grads) -> bool:
        """Whether tensors lie in memory as the weights do."""
        return all(x is None or (x.is_contiguous() and x.dtype == self.dtype) for x in tensors)
