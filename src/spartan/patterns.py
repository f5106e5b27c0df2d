"""Patterns: the unit that lives or dies together.

A pattern turns a weight into a flat vector of units (`reduce` sums over each unit) and back (`expand`). Units stand in
row-major order of the weight, whatever its memory format. (Where several weights are handled as one, see `Group.fused`,
single weights stand in the order of memory; only ties can tell.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Pattern(ABC):
    """How a weight divides into units."""

    @abstractmethod
    def unit_size(self, shape: Sequence[int]) -> int:
        """Entries per unit of a weight of this shape; ValueError with the reason where it does not divide."""

    @abstractmethod
    def reduce(self, x: Tensor) -> Tensor:
        """Sum over each unit: a flat tensor, one entry per unit."""

    @abstractmethod
    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each unit's entry at every place of the unit: a tensor of `shape`, or one that broadcasts to it."""


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Every weight by itself.

    Example:
        >>> Unstructured().unit_size((8, 4))
        1
    """

    def unit_size(self, shape: Sequence[int]) -> int:
        """One."""
        return 1

    def reduce(self, x: Tensor) -> Tensor:
        """The entries themselves."""
        return x.reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """The entries back in their shape."""
        return units.reshape(tuple(shape))


@dataclass(frozen=True)
class Block(Pattern):
    """Blocks of h × w entries of the weight seen as a matrix; −1 takes the whole of a side.

    A convolution's kernel is flattened to out × in·kh·kw; in general the first dimension gives the rows.
    `Block(1, -1)` is whole rows, `Block(-1, 1)` whole columns.

    Example:
        >>> Block(16, 16).unit_size((64, 3, 4, 4))
        256
    """

    h: int
    w: int

    def __post_init__(self) -> None:
        for name, side in (("h", self.h), ("w", self.w)):
            if not isinstance(side, int) or (side < 1 and side != -1):
                raise ValueError(f"Block: {name}={side!r}; a positive int, or -1 for the whole side, is needed")

    def _sides(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Blocks down, rows a block, blocks across, columns a block."""
        rows, columns = shape[0], 1
        for n in shape[1:]:
            columns *= n
        h, w = (rows if self.h == -1 else self.h), (columns if self.w == -1 else self.w)
        if rows % h or columns % w:
            raise ValueError(f"{self!r} does not divide {rows}×{columns} (shape {tuple(shape)})")
        return rows // h, h, columns // w, w

    def unit_size(self, shape: Sequence[int]) -> int:
        """Entries per block."""
        _, h, _, w = self._sides(shape)
        return h * w

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over each block."""
        return x.reshape(self._sides(x.shape)).sum((1, 3)).reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each block's entry at all its places."""
        down, h, across, w = self._sides(shape)
        return units.reshape(down, 1, across, 1).expand(down, h, across, w).reshape(tuple(shape))


def check_pattern(pattern: object) -> Pattern:
    """The pattern, or an error that says what is accepted."""
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern={pattern!r} is not a pattern; pass Unstructured() or Block(h, w)")
    return pattern


def magnitude(theta: Tensor) -> Tensor:
    """|θ| in at least float32: solves never run in half precision."""
    return theta.abs() if theta.dtype in (torch.float32, torch.float64) else theta.float().abs()
