"""Single weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spartan.problem.patterns.base import Pattern


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Every weight by itself.

    Example:
        >>> Unstructured().unit_size((8, 4))
        1
    """

    name = "unstructured"
    spelling = "unstructured"
    single = True

    def unit_size(self, shape: Sequence[int]) -> int:
        """One."""
        return 1

    def reduce(self, x: Tensor) -> Tensor:
        """The entries themselves."""
        return x.reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """The entries back in their shape."""
        return units.reshape(tuple(shape))

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """One by one."""
        return 1, 1
