"""Reads units of several weights strip by strip, on a CPU."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import Flags, Grads
from spartan.solvers.chunks.masks import why_no_chunks
from spartan.solvers.chunks.pieces import as_bytes
from spartan.solvers.chunks.strips import Strip, add_up, cut_into_strips, grid_of, matrix_of, spread
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import times


class ChunkSums(TorchSolver):
    """What is added up over units, and over outputs."""

    name = "chunks"

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        found = [grid_of(problem, i) for i in range(len(problem.targets))]
        self.grids = [grid for grid in found if grid is not None]
        self._strips = cut_into_strips(self.grids, self.theta.views)
        self._scores: tuple[object, Tensor] | None = None  # of which θ, and u; the same of squares
        self._squared: tuple[object, Tensor] | None = None

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Blocks, rows or columns of matrices on a CPU, and many weights."""
        own = "units of one weight" if problem.pattern.single or problem.pattern.rows else ""
        if any(grid_of(problem, i) is None for i in range(len(problem.targets))):
            own = own or "units that are no blocks of matrices in row-major order"
        return why_no_chunks(problem, kernels, own)

    # ------------------------------------------------------------------ from weights to units

    def scores(self) -> Tensor:
        """u = v/c of every unit, read once as long as θ stays."""
        if self._scores is None or self._scores[0] != self._now():
            self._scores = self._now(), self.magnitudes(self.values())
        return self._scores[1]

    def magnitudes(self, slabs: Sequence[Tensor]) -> Tensor:
        """u = Σ|x| of every unit, by its cost and the value power."""
        if not self.alike(slabs) or any(x.requires_grad for x in slabs):
            return super().magnitudes(slabs)
        x = self.matrices(slabs)
        u = self._sum(lambda strip: torch.abs(strip.of(x[strip.i]), out=strip.room[0]))
        return times(self.problem, u, self.problem.factors)

    def squares(self) -> Tensor:
        """Σ θ² over every unit, read once as long as θ stays."""
        if self._squared is None or self._squared[0] != self._now():
            x = self.matrices(self.values())
            found = self._sum(lambda strip: torch.square(strip.of(x[strip.i]), out=strip.room[0]))
            self._squared = self._now(), found
        return self._squared[1]

    def _now(self) -> object:
        """Which θ it is."""
        return [x._version for x in self.theta.views], self.power, self.problem.factors

    def products(self, grads: Grads) -> Tensor:
        """G = Σ g·θ over every unit; a missing gradient counts as zero."""
        if not self.alike(grads):
            return super().products(grads)
        g, x = self.matrices(grads), self.matrices(self.values())
        return self._sum(lambda strip: torch.mul(strip.of(g[strip.i]), strip.of(x[strip.i]), out=strip.room[0]), grads)

    def _sum(self, make: Callable[[Strip], Tensor], there: Grads | None = None) -> Tensor:
        """The sum over each unit of what is made of each strip, of those targets that are there."""
        found = torch.zeros(self.count, dtype=self.dtype)
        sums = self.by_grid(found)
        for strip in self._strips:
            if there is None or there[strip.i] is not None:
                add_up(strip, self.grids[strip.i], make(strip), sums[strip.i])
        return found

    def scales_of_rows(self, kept: Tensor) -> Tensor:
        """1.01/(r + 0.01) per unit, r the share of its output channels' magnitude that is kept; the mean over a unit."""
        if any(grid.turned for grid in self.grids):
            return super().scales_of_rows(kept)
        x = self.matrices(self.values())
        sums = [torch.zeros(2, grid.down * grid.rows, dtype=self.dtype) for grid in self.grids]
        for strip, (keep,) in self.strips(kept):
            whole, left = sums[strip.i][:, strip.rows]
            u = torch.abs(strip.of(x[strip.i]), out=strip.room[0])
            whole.copy_(u.sum(2).view(-1))
            left.copy_(u.mul_(keep).sum(2).view(-1))
        found = torch.empty(self.count, dtype=self.dtype)
        for grid, scales, (whole, left) in zip(self.grids, self.by_grid(found), sums, strict=True):
            r = (left / (grid.across * grid.columns) + 1e-6) / (whole / (grid.across * grid.columns) + 1e-6)
            scales.copy_((1.01 / (r + 0.01)).view(grid.down, grid.rows).mean(1, keepdim=True))
        return found

    # ------------------------------------------------------------------ how tensors lie

    def strips(self, *numbers: Tensor, of: Grads | None = None) -> Iterator[tuple[Strip, list[Tensor]]]:
        """Each strip, and what is said of its units at every column; only of those targets that are there."""
        matrices = [self.by_grid(as_bytes(x)) for x in numbers]
        for strip in self._strips:
            if of is None or of[strip.i] is not None:
                pairs = zip(matrices, strip.across, strict=False)
                yield strip, [spread(strip, self.grids[strip.i], each[strip.i], out) for each, out in pairs]

    def by_grid(self, units: Tensor) -> list[Tensor]:
        """What is said of units, as a matrix for each target; views."""
        return [grid.of(units[here]) for grid, here in zip(self.grids, self.problem.slices, strict=True)]

    def matrices(self, tensors: Grads) -> list[Tensor]:
        """Tensors that lie as the weights do, as matrices."""
        none = torch.empty(0)
        return [none if x is None else matrix_of(grid, x) for grid, x in zip(self.grids, tensors, strict=True)]

    def alike(self, tensors: Grads) -> bool:
        """Whether tensors lie in memory as the weights do."""
        return all(x is None or (x.is_contiguous() and x.dtype == self.dtype) for x in tensors)
