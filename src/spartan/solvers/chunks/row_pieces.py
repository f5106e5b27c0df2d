"""Cuts weights of which n of every m are kept into pieces of whole outputs, and reads these as m columns.

Only what is decided goes by columns, as a product with 1: to copy a transposed tensor takes five times as long. What is
done then goes by the order of memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spartan.ops import columns
from spartan.ops.columns import Room
from spartan.problem.problem import Problem
from spartan.solvers.chunks.pieces import shrunk_mask
from spartan.solvers.forms import Shrunk

LENGTH = 1 << 19  # weights of a piece at most
ROWS = 1 << 16  # rows of a piece: enough for an operation on a column to be done by two threads


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
    theta: Tensor  # in the order of memory, as gradients and weights
    room: Room

    def columns(self, x: Tensor) -> Tensor:
        """A view of what lies in the order of memory as m columns."""
        return x.view(-1, self.m).t() if self.kernel == 1 else x.view(-1, self.m, self.kernel).transpose(0, 1)

    def shaped(self, x: Tensor) -> Tensor:
        """A view of it shaped as units are below: outputs × inputs × kernel, or flat."""
        return x if self.kernel == 1 else x.view(self.outputs, -1, self.kernel)

    def of_units(self, x: Tensor) -> Tensor:
        """A view of a vector of all units, here, in the order of memory."""
        x = x[self.units]
        return x if self.kernel == 1 else x.view(self.outputs, self.kernel, -1).transpose(1, 2)

    def stored(self, mask: Tensor, block: int) -> Tensor:
        """A mask of bools as 1 and 0, in the order of memory; to choose by random bools takes twenty times as long."""
        found = self.room.blocks[block].view(-1)
        self.shaped(found).copy_(self.of_units(mask.view(torch.uint8)))
        return found

    def magnitude(self, block: int) -> Tensor:
        """u as columns, in this block of the room."""
        found, theta = self.room.blocks[block], self.columns(self.theta)
        torch.abs(theta, out=found.view(theta.shape))
        return found if self.factor == 1.0 else found.mul_(self.factor)

    def product(self, x: Tensor, block: int) -> Tensor:
        """x · θ as columns."""
        found, one, other = self.room.blocks[block], self.columns(x), self.columns(self.theta)
        torch.mul(one, other, out=found.view(one.shape))
        return found

    def laid(self, x: Tensor, block: int) -> Tensor:
        """Columns in the order of memory."""
        found = self.room.blocks[block].view(-1)
        out = self.columns(found)
        torch.mul(x.view(out.shape), 1.0, out=out)
        return found

    def kept(self, n: int, block: int) -> Tensor:
        """1 at the n largest of each row, else 0, in the order of memory; takes the two blocks after this one too."""
        u = self.magnitude(block + 1)
        return self.laid(columns.keep(u, n, self.room, self.room.blocks[block + 2]), block)


def cut_up(problem: Problem, thetas: Sequence[Tensor]) -> list[RowPiece]:
    """All targets in pieces; those of one length share their room."""
    m, rooms, found = problem.pattern.rows or 1, dict[int, Room](), []
    for i, (view, target) in enumerate(zip(thetas, problem.targets, strict=True)):
        theta, first = target.flatten(view), problem.slices[i].start
        outputs, each = view.shape[0], view[0].numel()
        some = max(1, min(LENGTH, m * ROWS) // each)
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
            found.append(RowPiece(*facts, theta[here], rooms[size]))
    return found


def shrunk(piece: RowPiece, n: int, by: Shrunk) -> Tensor:
    """(1 − (τ/u)ᵖ)^(1/p) at the n largest of each row as columns, in block 2; takes blocks 1 and 3."""
    u, mask, kept, tau = piece.magnitude(1), *piece.room.blocks[2:4], piece.room.lines[7]
    columns.keep(u, n, piece.room, kept, below=tau)
    scale = None
    if by.row_scale:
        # u is a multiple of |θ| that is the same for all of an output.
        left, whole = (
            x.view(piece.m, piece.outputs, -1).sum((0, 2)).div_(piece.factor * (x.numel() // piece.outputs))
            for x in (torch.mul(u, kept, out=mask), u)
        )
        scale = 1.01 / ((left + 1e-6) / (whole + 1e-6) + 0.01)
    u.clamp_(min=torch.finfo(u.dtype).tiny)  # of a weight that is 0 the mask does not matter, but is to be a number
    shrunk_mask(u, tau, by.p, mask, u)
    if scale is not None:
        mask.view(piece.m, piece.outputs, -1).mul_(scale[:, None])
    return columns.only(mask, kept, mask)
