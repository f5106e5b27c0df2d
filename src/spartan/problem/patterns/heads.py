"""Attention heads as units."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.problem.patterns.base import Pattern
from spartan.scalars import takes_numbers


@takes_numbers
@dataclass(frozen=True)
class Heads(Pattern):
    """Whole attention heads: the query, key and value rows of one head live or die together.

    For weights that hold all three projections one above the other, 3·H·d rows: `in_proj_weight` of
    `nn.MultiheadAttention` and `qkv.weight` of timm's ViTs. Leave the other weights out, as in
    `include="*.qkv.weight"`, or `exclude` them.

    With A = softmax(q kᵀ/√d), a head gives Wo·A·(x Wvᵀ + bv). Once its rows are zero A is uniform and Wo·bv is left of
    it: the same for every token and input, a constant that the output projection's bias can take over. So the head is
    gone exactly, with its 3·d rows, its part of the bias and its d columns of Wo, though only the rows are counted.

    Args:
        count: H, heads per layer.

    Example:
        >>> Heads(3).unit_size((3 * 192, 192))
        36864
    """

    count: int

    name = "heads"
    spelling = "heads:H"
    tells_inputs_from_outputs = True
    judged_by_loss = True

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"Heads: count={self.count!r}; the number of heads per layer, an int ≥ 1, is needed")

    def _parts(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Query, key and value; heads; rows of a head in each; columns."""
        if len(shape) != 2 or shape[0] % (3 * self.count):
            raise ValueError(f"{self!r} needs a matrix of 3·{self.count}·d rows, not the shape {tuple(shape)}")
        return 3, self.count, shape[0] // (3 * self.count), shape[1]

    def unit_size(self, shape: Sequence[int]) -> int:
        """Entries of a head."""
        three, _, rows, columns = self._parts(shape)
        return three * rows * columns

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over each head."""
        return x.reshape(self._parts(x.shape)).sum((0, 2, 3))

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each head's entry at all its places."""
        return units.reshape(1, -1, 1, 1).expand(self._parts(shape)).reshape(tuple(shape))

    def growing(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """The rows of the value projection: with zero values a head gives nothing, and its rows still get a gradient.

        If queries and keys were zero too, as in SViTE's code, the gradient of each would be zero because of the other.
        """
        return (torch.arange(shape[0], device=device) >= shape[0] // 3 * 2)[:, None]
