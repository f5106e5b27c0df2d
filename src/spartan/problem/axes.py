"""How the axes of a weight read: which are outputs and which inputs, and whether it is several matrices in one tensor.

Patterns know weights of outputs × inputs (× kernel). What stands otherwise is turned for them, and turned back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.problem.patterns.base import Pattern


@dataclass(frozen=True)
class Axes:
    """Outputs × inputs (× kernel), as in a Linear or a convolution, unless it says otherwise.

    Args:
        swapped: inputs × outputs, as in transformers' Conv1D.
        stacked: the first axis counts matrices, one for each expert; the other two are theirs.
        known: whether somebody has said which of a matrix's axes are the inputs.

    Example:
        >>> Axes(swapped=True).shape((64, 192)), Axes(stacked=True).shape((8, 64, 32))
        ((192, 64), (64, 32))
    """

    swapped: bool = False
    stacked: bool = False
    known: bool = True

    @property
    def plain(self) -> bool:
        """Whether patterns can take the weight as it is."""
        return not (self.swapped or self.stacked)

    @property
    def inputs(self) -> int:
        """Which axis of the weight is the inputs'."""
        return int(self.stacked) + int(not self.swapped)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one matrix, outputs first, of a weight of this shape."""
        one = tuple(shape[1:] if self.stacked else shape)
        return (one[1], one[0], *one[2:]) if self.swapped else one

    def turned(self, x: Tensor) -> Tensor:
        """The weight with outputs before inputs, or what was turned so turned back: a view."""
        return x.transpose(-2, -1) if self.swapped else x

    def matrix(self, x: Tensor) -> Tensor | None:
        """A view with the matrices one above the other, outputs × inputs (× kernel); None where memory has no such view."""
        if not self.stacked:
            return self.turned(x)
        return None if self.swapped or not x.is_contiguous() else x.flatten(0, 1)

    def rows(self, x: Tensor) -> Tensor:
        """What makes each output as a row, matrix after matrix."""
        return self.turned(x).flatten(0, 1) if self.stacked else self.turned(x).flatten(1)

    def at_rows(self, numbers: Tensor, x: Tensor) -> Tensor:
        """One number for each of these rows at all of its places, in the shape of the weight x."""
        turned = self.turned(x)
        outputs = turned.shape[: 1 + self.stacked]
        return self.turned(numbers.view(*outputs, *[1] * (x.ndim - len(outputs))).expand_as(turned))

    def reduce(self, pattern: Pattern, x: Tensor) -> Tensor:
        """The sum over each unit, matrix after matrix."""
        if self.plain or pattern.single:
            return pattern.reduce(x)
        turned = self.turned(x)
        return torch.vmap(pattern.reduce)(turned).reshape(-1) if self.stacked else pattern.reduce(turned)

    def expand(self, pattern: Pattern, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each unit's entry at all its places, in the shape of the weight."""
        if self.plain or pattern.single:
            return pattern.expand(units, shape)
        one = self.shape(shape)
        if not self.stacked:
            return self.turned(pattern.expand(units, one).expand(one))
        each = units.reshape(shape[0], math.prod(one) // pattern.unit_size(one))
        return self.turned(torch.vmap(lambda x: pattern.expand(x, one).expand(one))(each))


PLAIN = Axes()
