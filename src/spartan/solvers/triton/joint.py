"""Clips gradients to a joint norm by kernels: one replay for all of them, where torch takes some thirty calls."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from spartan.solvers.triton.moves import read, write
from spartan.solvers.triton.replay import Replay
from spartan.solvers.triton.state import row_of
from spartan.solvers.triton.tables import Addresses, Pieces, sent

OWN = tl.constexpr(1)  # what a piece is of: what the method holds …
PROBED = tl.constexpr(2)  # … or a gradient that tells by how much somebody has scaled all of them
ROWS, BLOCK, WARPS = 512, 2048, 8


@triton.jit
def squares(addresses, table, found, BLOCK: tl.constexpr):
    """The sum of squares of a piece; in float64, which no gradient leaves."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    address = tl.load(addresses + which)
    total = tl.zeros((BLOCK,), tl.float64)
    if address != 0:
        for i in range(0, length, BLOCK):
            x = read(address, start, i, length, tl.float32, BLOCK).to(tl.float64)
            total += x * x
    tl.store(found + piece, tl.sum(total))


@triton.jit
def norm(found, count, out, ROWS: tl.constexpr):
    """The norm of all pieces."""
    total = tl.zeros((ROWS,), tl.float64)
    for i in range(0, count, ROWS):
        row = i + tl.arange(0, ROWS)
        total += tl.load(found + row, mask=row < count, other=0.0)
    tl.store(out, tl.sqrt(tl.sum(total)))


@triton.jit
def factors_of(found, kinds, count, before, factors, most, ROWS: tl.constexpr):
    """What gradients are multiplied by, and what the method holds, which nobody else has scaled since `before`."""
    grads = tl.zeros((ROWS,), tl.float64)
    own = tl.zeros((ROWS,), tl.float64)
    probed = tl.zeros((ROWS,), tl.float64)
    for i in range(0, count, ROWS):
        row = i + tl.arange(0, ROWS)
        x = tl.load(found + row, mask=row < count, other=0.0)
        kind = tl.load(kinds + row, mask=row < count, other=0)
        grads += tl.where((kind & OWN) == 0, x, 0.0)
        own += tl.where((kind & OWN) != 0, x, 0.0)
        probed += tl.where((kind & PROBED) != 0, x, 0.0)
    infinite = float("inf")
    earlier = tl.load(before)
    ratio = tl.sqrt(tl.sum(probed)) / tl.where(earlier > 0.0, earlier, 1.0)
    changed = tl.where((earlier > 0.0) & (ratio > 0.0) & (ratio < infinite), ratio, 1.0)
    joint = tl.sqrt(tl.sum(grads) + changed * changed * tl.sum(own))
    # 1 where the norm is no number: to say which gradient is none is somebody else's task.
    factor = tl.where(joint < infinite, tl.minimum(most / (joint + 1e-6), 1.0), 1.0)
    tl.store(factors, factor)
    tl.store(factors + 1, factor * changed)


@triton.jit
def scale(addresses, table, kinds, factors, BLOCK: tl.constexpr):
    """Multiply a piece by its factor."""
    piece = tl.program_id(0)
    factor = tl.load(factors + (tl.load(kinds + piece) & OWN)).to(tl.float32)
    which, start, length, _ = row_of(table, piece)
    address = tl.load(addresses + which)
    if (address != 0) & (factor != 1.0):
        for i in range(0, length, BLOCK):
            write(
                address,
                start,
                i,
                length,
                read(address, start, i, length, tl.float32, BLOCK) * factor,
                tl.float32,
                BLOCK,
            )


class Listed:
    """Float32 tensors of fixed sizes, perhaps elsewhere every time, and the sums of squares of their pieces."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        one = [1.0] * len(sizes)
        self.pieces, self._addresses = Pieces(sizes, one, one, device), Addresses(device)
        self.found = torch.zeros(self.pieces.count, dtype=torch.float64, device=device)
        self.replay = Replay(device)

    def at(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The table of where they lie; nothing may be noted that still reads the last one."""
        return self._addresses.of(tensors)

    def launch_squares(self, where: Tensor) -> None:
        """Launch what sums squares."""
        squares[(self.pieces.count,)](where, self.pieces.table, self.found, BLOCK=BLOCK, num_warps=WARPS)


class ScaleProbe(Listed):
    """The norm of a few gradients, looked at after every backward."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__(sizes, device)
        self.norm = torch.zeros((), dtype=torch.float64, device=device)  # 0 where nobody has looked

    def look(self, grads: Sequence[Tensor | None]) -> None:
        """Take their norm."""
        where = self.at(grads)

        def launch() -> None:
            self.launch_squares(where)
            norm[(1,)](self.found, self.pieces.count, self.norm, ROWS=ROWS, num_warps=4)

        self.replay("look", launch)


class KernelClip(Listed):
    """Scales gradients, and what a method holds, so that their joint norm is at most a given one.

    Args:
        sizes: entries of every gradient, and then of what the method holds.
        own: how many the latter are.
        probed: which gradients the probe looks at.
        probe: what it has seen after the last backward.
        most: what the norm may be.
    """

    def __init__(self, sizes: Sequence[int], own: int, probed: Sequence[int], probe: ScaleProbe, most: float) -> None:
        super().__init__(sizes, probe.norm.device)
        self.sizes, self._before, self._most = tuple(sizes), probe.norm, most
        kinds = [OWN.value * (i >= len(sizes) - own) + PROBED.value * (i in probed) for i in self.pieces.tensors]
        self._kinds = sent(kinds, torch.int32, self.found.device)
        self._factors = torch.ones(2, dtype=torch.float64, device=self.found.device)

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Scale them, in place; None is a gradient that is not there."""
        where, count = self.at(tensors), self.pieces.count
        tables: Any = self.found, self._kinds, count, self._before, self._factors, self._most

        def launch() -> None:
            self.launch_squares(where)
            factors_of[(1,)](*tables, ROWS=ROWS, num_warps=4)
            scale[(count,)](where, self.pieces.table, self._kinds, self._factors, BLOCK=BLOCK, num_warps=WARPS)

        self.replay("clip", launch)
        increment_version([x for x in tensors if x is not None])  # behind torch's back
