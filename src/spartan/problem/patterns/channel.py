"""Whole channels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from spartan.problem.patterns.base import Pattern, check_axes


@dataclass(frozen=True)
class Channel(Pattern):
    """Whole channels: all weights of one output unit, or of one input unit.

    `Channel()` is the rows of a weight, all that makes one output (as `Block(1, -1)`); `Channel("in")` all that reads
    one input, over every output and kernel position. Units differ in size between layers: each costs the sum over its
    weights.

    Args:
        side: "out" or "in".

    Example:
        >>> Channel().unit_size((64, 3, 4, 4)), Channel("in").unit_size((64, 3, 4, 4))
        (48, 1024)
    """

    side: str = "out"

    name = "channel"
    spelling = "channel, channel:in"
    tells_inputs_from_outputs = True

    def __post_init__(self) -> None:
        if self.side not in ("out", "in"):
            raise ValueError(f'Channel: side={self.side!r} is unknown; "out" and "in" are accepted')

    def __repr__(self) -> str:
        return "Channel()" if self.side == "out" else f"Channel({self.side!r})"

    @property
    def _axis(self) -> int:
        return 0 if self.side == "out" else 1

    def check(self, shape: Sequence[int], owner: nn.Module) -> None:
        """A weight's axes must be outputs × inputs."""
        check_axes(self, owner)
        if self.side == "in" and isinstance(owner, _ConvNd) and owner.groups > 1:
            raise ValueError(f"{self!r} has no meaning for {owner.groups} groups of inputs (shape {tuple(shape)})")

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """A row, or the columns of one input."""
        columns = math.prod(shape[1:])
        return (1, columns) if self.side == "out" else (shape[0], columns // shape[1])

    def unit_size(self, shape: Sequence[int]) -> int:
        """Entries per channel."""
        return math.prod(shape) // shape[self._axis]

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over each channel."""
        return x.sum([i for i in range(x.ndim) if i != self._axis])

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each channel's entry at all its places."""
        axes = [1] * len(shape)
        axes[self._axis] = -1
        return units.reshape(axes).expand(tuple(shape)).contiguous()
