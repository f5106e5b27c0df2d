"""Cuts weights of which n of every m are kept into pieces of whole outputs, and reads these as m columns.

A piece is turned into columns by a product with 1, since copying a transposed tensor takes five times as long.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spartan.ops.columns import Room
from spartan.problem.problem import Problem
from spartan.solvers.chunks.pieces import shrunk_mask
from spartan.solvers.forms import Shrunk

LENGTH = 1 << 18  # weights of a piece; columns must be long enough for two threads


class RowPiece(NamedTuple):
    """Whole outputs of one target that fit the cache."""

    i: int  # number of the target
    segment: int
    factor: float  # u = factor · |θ|
    m: int
    outputs: int
    kernel: int  # positions of the kernel
    here: slice  # where it is in the target
    units: slice  # where it is among all units
    rows: slice  # where its rows are among all rows
    theta: Tensor  # as columns
    room: Room

    def columns(self, x: Tensor) -> Tensor:
        """A view of a target that lies flat, here, as m columns."""
        x = x[self.here]
        return x.view(-1, self.m).t() if self.kernel == 1 else x.view(-1, self.m, self.kernel).transpose(0, 1)

    def of_units(self, x: Tensor) -> Tensor:
        """A view of a vector of all units, here, in the order of memory: outputs × inputs × kernel, or flat."""
        x = x[self.units]
        return x if self.kernel == 1 else x.view(self.outputs, self.kernel, -1).transpose(1, 2)

    def shaped(self, x: Tensor) -> Tensor:
        """A view of a target that lies flat, here, shaped as its units are."""
        x = x[self.here]
        return x if self.kernel == 1 else x.view(self.outputs, -1, self.kernel)

    def read(self, x: Tensor, block: int) -> Tensor:
        """Columns into this block of the room."""
        found = self.room.blocks[block]
        torch.mul(x, 1.0, out=found.view(x.shape))
        return found

    def write(self, x: Tensor, out: Tensor) -> None:
        """The columns x into a view of columns."""
        torch.mul(x.view(out.shape), 1.0, out=out)

    def magnitude(self, theta: Tensor, block: int) -> Tensor:
        """u, from θ in the room, into this block."""
        u = torch.abs(theta, out=self.room.blocks[block])
        return u if self.factor == 1.0 else u.mul_(self.factor)


def cut_up(problem: Problem, thetas: Sequence[Tensor]) -> list[RowPiece]:
    """All targets in pieces; those of one length share their room."""
    m, rooms, found = problem.pattern.rows or 1, dict[int, Room](), []
    for i, (view, target) in enumerate(zip(thetas, problem.targets, strict=True)):
        theta, first = target.flatten(view), problem.slices[i].start
        outputs, each = view.shape[0], view[0].numel()
        some = max(1, LENGTH // each)
        for start in range(0, outputs, some):
            count = min(some, outputs - start)
            here = slice(start * each, (start + count) * each)
            units = slice(first + here.start, first + here.stop)
            rows = slice(units.start // m, units.stop // m)
            size = count * each // m
            if size not in rooms:
                rooms[size] = Room(m, size, theta.dtype)
            kernel = view[0, 0].numel()
            facts = i, problem.segment_of[i], problem.factors[i], m, count, kernel, here, units, rows
            piece = RowPiece(*facts, theta, rooms[size])
            found.append(piece._replace(theta=piece.columns(theta)))
    return found


def shrink(piece: RowPiece, u: Tensor, tau: Tensor, kept: Tensor, by: Shrunk) -> Tensor:
    """(1 − (τ/u)ᵖ)^(1/p) where kept, in block 3; takes block 1, where u is."""
    sums = None
    if by.row_scale:
        # u is a multiple of |θ| that is the same for all of an output.
        whole, left = (
            x.view(piece.m, piece.outputs, -1).sum((0, 2)).div_(piece.factor)
            for x in (u, torch.mul(u, kept, out=piece.room.blocks[3]))
        )
        count = u.numel() // piece.outputs
        sums = 1.01 / ((left / count + 1e-6) / (whole / count + 1e-6) + 0.01)
    u.clamp_(min=torch.finfo(u.dtype).tiny)  # of a weight that is 0 the mask does not matter, but is to be a number
    mask = shrunk_mask(u, tau, by.p, piece.room.blocks[3], u)
    if sums is not None:
        mask.view(piece.m, piece.outputs, -1).mul_(sums[None, :, None])
    return mask
