"""Blocks of a weight seen as a matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spartan.problem.patterns.base import Pattern
from spartan.scalars import takes_numbers


@takes_numbers
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

    name = "block"
    spelling = "[h, w]"

    def __post_init__(self) -> None:
        for name, side in (("h", self.h), ("w", self.w)):
            if isinstance(side, bool) or not isinstance(side, int) or (side < 1 and side != -1):
                raise ValueError(f"Block: {name}={side!r}; a positive int, or -1 for the whole side, is needed")

    @classmethod
    def read(cls, value: object) -> Pattern | None:
        """A pair of numbers in a recipe."""
        pair = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(side, int) for side in value)
        return cls(*value) if pair else None  # type: ignore[misc]

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """h × w, or what they stand for."""
        return (shape[0] if self.h == -1 else self.h), (math.prod(shape[1:]) if self.w == -1 else self.w)

    def _grid(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Blocks down, rows a block, blocks across, columns a block."""
        rows, columns, (h, w) = shape[0], math.prod(shape[1:]), self.sides(shape)
        if rows % h or columns % w:
            raise ValueError(f"{self!r} does not divide {rows}×{columns} (shape {tuple(shape)})")
        return rows // h, h, columns // w, w

    def unit_size(self, shape: Sequence[int]) -> int:
        """Entries per block."""
        _, h, _, w = self._grid(shape)
        return h * w

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over each block."""
        return x.reshape(self._grid(x.shape)).sum((1, 3)).reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each block's entry at all its places."""
        down, h, across, w = self._grid(shape)
        return units.reshape(down, 1, across, 1).expand(down, h, across, w).reshape(tuple(shape))
