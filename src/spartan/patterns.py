"""Patterns: the unit that lives or dies together.

A pattern turns a weight into a flat vector of units (`reduce` sums over each unit) and back (`expand`). Units stand in
row-major order of the weight, whatever its memory format; with `NM`, whose groups are consecutive units, input channels
come last. (Where several weights are handled as one, see `Group.fused`, single weights stand in the order of memory;
only ties can tell.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


class Pattern(ABC):
    """How a weight divides into units."""

    # What applies when the user does not say; None is the method's own.
    budget: ClassVar[str | None] = None

    def check(self, shape: Sequence[int], owner: nn.Module) -> None:
        """ValueError with the reason where a weight of this shape, of this layer, cannot take the pattern."""
        self.unit_size(shape)

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

    def __post_init__(self) -> None:
        if self.side not in ("out", "in"):
            raise ValueError(f'Channel: side={self.side!r} is unknown; "out" and "in" are accepted')

    def __repr__(self) -> str:
        return "Channel()" if self.side == "out" else f"Channel({self.side!r})"

    def check(self, shape: Sequence[int], owner: nn.Module) -> None:
        """A weight's axes must be outputs × inputs."""
        _check_axes(self, shape, owner)
        if self.side == "in" and isinstance(owner, _ConvNd) and owner.groups > 1:
            raise ValueError(f"{self!r} has no meaning for {owner.groups} groups of inputs (shape {tuple(shape)})")

    def unit_size(self, shape: Sequence[int]) -> int:
        """Entries per channel."""
        return math.prod(shape) // shape[0 if self.side == "out" else 1]

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over each channel."""
        return x.sum([i for i in range(x.ndim) if i != (0 if self.side == "out" else 1)])

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each channel's entry at all its places."""
        axes = [1] * len(shape)
        axes[0 if self.side == "out" else 1] = -1
        return units.reshape(axes).expand(tuple(shape)).contiguous()


@dataclass(frozen=True)
class NM(Pattern):
    """n of every m consecutive weights along the inputs are kept; `NM(2, 4)` is what sparse tensor cores run.

    Every weight is a unit, and every group of m has its own budget, so that the sparsity is 1 − n/m in each layer and no
    other. A convolution's groups run along its input channels, at one kernel position (out × kh·kw × in, the order of
    channels_last, as in SR-STE and NVIDIA's ASP); a Linear's along its inputs, as `to_sparse_semi_structured` asks.

    While the density falls over a warm-up, n does in steps: ⌈m · density⌉ of every m are kept.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> s = spartan.Sparsifier(model, sparsity=0.5, total_steps=10, pattern=NM(2, 4), warmup=0)
        >>> (model.weight.view(-1, 4) != 0).sum(1)
        tensor([2, 2, 2, 2])
    """

    n: int
    m: int

    budget = "global"  # any would do: no two groups of m compete

    def __repr__(self) -> str:
        return f"NM({self.n}, {self.m})"

    def __post_init__(self) -> None:
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (self.n, self.m))
        if not whole or not 0 < self.n < self.m:
            raise ValueError(
                f"NM: n={self.n!r}, m={self.m!r}; whole numbers with 0 < n < m are needed, such as NM(2, 4)"
            )

    @property
    def sparsity(self) -> float:
        """1 − n/m: the only one that the pattern can have."""
        return 1.0 - self.n / self.m

    def n_at(self, density: float) -> int:
        """How many of each group are kept at a density: ⌈m · density⌉, never fewer than n."""
        return min(self.m, max(self.n, math.ceil(self.m * density - 1e-9)))

    def check(self, shape: Sequence[int], owner: nn.Module) -> None:
        """A weight's axes must be outputs × inputs, and m must divide the inputs."""
        _check_axes(self, shape, owner)
        self.unit_size(shape)

    def unit_size(self, shape: Sequence[int]) -> int:
        """One."""
        if shape[1] % self.m:
            raise ValueError(f"{self!r} does not divide the {shape[1]} inputs (shape {tuple(shape)})")
        return 1

    def reduce(self, x: Tensor) -> Tensor:
        """The entries, inputs last."""
        return x.movedim(1, -1).reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """The entries back in their shape."""
        return units.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def _check_axes(pattern: Pattern, shape: Sequence[int], owner: nn.Module) -> None:
    if isinstance(owner, _ConvTransposeNd):
        raise ValueError(f"{pattern!r} is for weights that stand as outputs × inputs, not for the transposed ones")


def check_pattern(pattern: object) -> Pattern:
    """The pattern, or an error that says what is accepted."""
    if not isinstance(pattern, Pattern):
        raise ValueError(
            f"pattern={pattern!r} is not a pattern; pass Unstructured(), Block(h, w), Channel(), NM(n, m) or Heads(count)"
        )
    return pattern


def magnitude(theta: Tensor) -> Tensor:
    """|θ| in at least float32: solves never run in half precision."""
    return theta.abs() if theta.dtype in (torch.float32, torch.float64) else theta.float().abs()
