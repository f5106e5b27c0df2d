"""Cuts weights into strips of whole rows that fit the cache, and reads units of several weights off them.

A unit is h × w entries of a weight seen as a matrix, so that what is said of units is a small matrix too. A strip adds up
over them row by row first, which is fast, then along rows; it spreads numbers the other way round.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spartan.ops.parts import CHUNK
from spartan.ops.rows import sums
from spartan.problem.problem import Problem


class UnitGrid(NamedTuple):
    """How a target divides into units, in the order of its memory."""

    rows: int  # entries of a unit, down
    columns: int  # and across
    down: int  # units
    across: int
    turned: bool  # whether its units stand column by column, as its memory has inputs before outputs

    def of(self, units: Tensor) -> Tensor:
        """What is said of its units, as a matrix that lies as the weight does."""
        return units.view(self.across, self.down).t() if self.turned else units.view(self.down, self.across)


class Strip(NamedTuple):
    """Some rows of a target: whole units, or a part of one row of them."""

    i: int  # number of the target
    rows: slice  # of the target as a matrix
    units: slice  # rows of its grid
    theta: Tensor  # units down × rows of each × columns
    room: tuple[Tensor, ...]  # two of its shape, for whatever is computed
    across: tuple[Tensor, ...]  # and two of units down × 1 × columns

    def of(self, matrix: Tensor) -> Tensor:
        """The same rows of another tensor."""
        return matrix[self.rows].view(self.theta.shape)


def grid_of(problem: Problem, i: int) -> UnitGrid | None:
    """How target i divides; None where its units are no blocks of the matrix in its memory."""
    target = problem.targets[i]
    axes, shape = target.axes, target.axes.shape(target.shape)
    sides = problem.pattern.sides(shape)
    if sides is None or not target.parameter.is_contiguous() or (axes.stacked and axes.swapped):
        return None
    (h, w), rows, columns = sides, shape[0], math.prod(shape[1:])
    if axes.swapped:
        return None if len(shape) > 2 else UnitGrid(w, h, columns // w, rows // h, turned=True)
    matrices = target.shape[0] if axes.stacked else 1
    return UnitGrid(h, w, matrices * rows // h, columns // w, turned=False)


def matrix_of(grid: UnitGrid, x: Tensor) -> Tensor:
    """A tensor that lies as a target does, as a matrix."""
    return x.detach().view(grid.down * grid.rows, grid.across * grid.columns)


def cut_into_strips(grids: Sequence[UnitGrid], thetas: Sequence[Tensor]) -> list[Strip]:
    """All targets in strips, which share their room."""
    longest = max(CHUNK, *(grid.across * grid.columns for grid in grids))
    rooms = [torch.empty(longest, dtype=thetas[0].dtype) for _ in range(4)]
    found = []
    for i, (grid, theta) in enumerate(zip(grids, thetas, strict=True)):
        h, wide, matrix = grid.rows, grid.across * grid.columns, matrix_of(grid, theta)
        fits = max(1, CHUNK // max(1, wide))
        step, border = (fits // h * h, grid.down * h) if h <= fits else (fits, h)
        start = 0
        while start < grid.down * h:
            # Strips that are less than a unit high end where it does.
            stop = min(start + step, grid.down * h if h <= fits else (start // border + 1) * border)
            units = slice(start // h, -(-stop // h))
            shape = (units.stop - units.start, (stop - start) // (units.stop - units.start), wide)
            size, narrow = math.prod(shape), (shape[0], 1, wide)
            room = tuple(r[:size].view(shape) for r in rooms[:2])
            across = tuple(r[: math.prod(narrow)].view(narrow) for r in rooms[2:])
            rows = slice(start, stop)
            found.append(Strip(i, rows, units, matrix[rows].view(shape), room, across))
            start = stop
    return found


def add_up(strip: Strip, grid: UnitGrid, x: Tensor, into: Tensor) -> None:
    """The sums of a strip's numbers over each unit, on top of those of its other strips; `into` is the grid's matrix."""
    down, high, _ = x.shape
    lines = x.sum(1) if high > 1 else x
    if grid.columns > 1:
        lines = sums(lines.view(-1, grid.columns))
    into[strip.units].add_(lines.view(down, grid.across))


def spread(strip: Strip, grid: UnitGrid, numbers: Tensor, out: Tensor) -> Tensor:
    """One number per unit, of the grid's matrix, at each column of a strip; it broadcasts to the strip's shape."""
    some = numbers[strip.units]
    if grid.across == 1:
        return some.to(out.dtype).view(-1, 1, 1)
    out.view(len(some), grid.across, grid.columns).copy_(some[..., None])
    return out
