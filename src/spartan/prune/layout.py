"""Reads a weight as a matrix, a row for each output and a column for each input, and says what may be kept of it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from spartan.ops.parts import Limit
from spartan.problem.problem import Problem
from spartan.problem.targets import Target


@dataclass(eq=False)
class Layout:
    """A target as a matrix of rows × columns, in groups of rows that read inputs of their own.

    A plain weight is one group. A grouped convolution has its groups, experts have one for each, and the packed weight of
    `nn.MultiheadAttention` three: queries, keys and values may come from different tensors.
    """

    problem: Problem
    number: int

    @property
    def target(self) -> Target:
        """The weight."""
        return self.problem.targets[self.number]

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of one matrix, outputs × inputs (× kernel)."""
        return self.target.axes.shape(self.target.shape)

    @cached_property
    def groups(self) -> int:
        """How many groups of rows there are."""
        owner, axes = self.target.owner, self.target.axes
        if axes.stacked:
            return self.target.shape[0]
        if isinstance(owner, _ConvNd):
            return owner.groups
        packed = isinstance(owner, nn.MultiheadAttention) and self.target.attribute == "in_proj_weight"
        return 3 if packed else 1

    @property
    def columns(self) -> int:
        """Inputs of a row."""
        return self.target.numel // self.rows

    @property
    def rows(self) -> int:
        """Outputs, of all matrices."""
        return self.one[0] * (self.target.shape[0] if self.target.axes.stacked else 1)

    @property
    def dtype(self) -> torch.dtype:
        """What it is computed in: never half precision."""
        return torch.float64 if self.target.dtype == torch.float64 else torch.float32

    @property
    def transposed_convolution(self) -> bool:
        """Whether the weight stands as inputs × outputs × kernel."""
        return isinstance(self.target.owner, _ConvTransposeNd)

    @property
    def sides(self) -> tuple[int, int] | None:
        """Rows and columns of a unit; None where units are no such tiles."""
        return (1, 1) if self.problem.pattern.rows else self.problem.pattern.sides(self.one)

    @property
    def kept(self) -> int:
        """How many units the budget of the layer keeps."""
        problem, i = self.problem, self.number
        segment = problem.segments[problem.segment_of[i]]
        return Limit.of(segment.budget(problem.pattern, 1.0), [problem.unit_costs[i]]).units()

    @property
    def of_every_m(self) -> tuple[int, int] | None:
        """n and m, where every m consecutive columns keep n."""
        m = self.problem.pattern.rows
        return None if m is None else (self.kept * m // self.problem.all_units[self.number], m)

    @cached_property
    def order(self) -> Tensor | None:
        """The columns in the order in which every m of them have a budget; None where that is their own."""
        if self.problem.pattern.rows is None or len(self.one) == 2:
            return None
        numbers = torch.arange(self.columns, dtype=torch.float64).reshape(1, *self.one[1:])
        return self.problem.pattern.reduce(numbers).long()

    def read(self) -> Tensor:
        """The matrix, rows × columns: a copy."""
        found = self.target.axes.rows(self.target.local).to(
            self.dtype, copy=True, memory_format=torch.contiguous_format
        )
        return found if self.order is None else found[:, self.order.to(found.device)]

    def write(self, matrix: Tensor) -> None:
        """The matrix into the weight."""
        weight = self.target.axes.turned(self.target.local)
        weight.copy_(self.in_its_shape(matrix))

    def in_its_shape(self, matrix: Tensor) -> Tensor:
        """A matrix of rows × columns in the shape that patterns know: (experts ×) outputs × inputs (× kernel)."""
        if self.order is not None:
            matrix = torch.empty_like(matrix).index_copy_(1, self.order.to(matrix.device), matrix)
        return matrix.reshape(self.target.axes.turned(self.target.local).shape)

    def in_order(self, per_column: Tensor) -> Tensor:
        """Numbers per column (the last dimension), in the order of the matrix."""
        return per_column if self.order is None else per_column[..., self.order.to(per_column.device)]
