"""Constants in a graph: what entries of its tensors are, whatever the model is given.

Only what holds for inputs of any size counts: along a dimension in which an operation mixes entries (the pixels of a
convolution, the tokens of attention) a constant has to be the same everywhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spartan.shrink.axes import regroup


class Constants(NamedTuple):
    """Where a tensor's entries are constants, and which. A dimension has its size, or 1 where nothing differs along it."""

    where: Tensor
    value: Tensor

    @classmethod
    def all_of(cls, tensor: Tensor) -> "Constants":
        """Every entry is known."""
        return cls(torch.ones([1] * tensor.ndim, dtype=torch.bool, device=tensor.device), tensor)

    @classmethod
    def of(cls, where: Tensor, value: Tensor) -> "Constants | None":
        """What is known; None if that is nothing. Values elsewhere are zero."""
        if not bool(where.any()):
            return None
        return cls(where, value if bool(where.all()) else torch.where(where, value, torch.zeros_like(value)))

    @property
    def complete(self) -> bool:
        """Whether every entry is known."""
        return bool(self.where.all())

    def spread(self, dim: int, size: int) -> "Constants":
        """The same with a dimension in its full size."""
        sizes = [-1] * self.where.ndim
        sizes[dim] = size
        return Constants(*(x.expand(sizes) if x.shape[dim] == 1 else x for x in self))

    def uniform(self, dims: Sequence[int]) -> "Constants | None":
        """What is one and the same constant all along these dimensions, each of which then has size 1."""
        where, value = self
        dims = [d % where.ndim for d in dims]
        wide = [d for d in dims if where.shape[d] != 1 or value.shape[d] != 1]
        if wide:
            first = value
            for dim in wide:
                first = first.narrow(dim, 0, 1)
            where = (where & (value == first)).amin(wide, keepdim=True)
            value = first
        return Constants.of(where, value)

    def permute(self, order: Sequence[int]) -> "Constants":
        """With the dimensions in another order."""
        return Constants(*(x.permute(*order) for x in self))

    def reshape(self, before: Sequence[int], after: Sequence[int]) -> "Constants":
        """Of a tensor of the one shape that gets the other."""
        return Constants(*(_reshape(x, before, after) for x in self))

    def by_index(self, dim: int, size: int) -> tuple[Tensor, Tensor]:
        """By index of a dimension: whether it is no single constant, and the constant where it is."""
        dim %= self.where.ndim
        found = self.spread(dim, size).uniform([d for d in range(self.where.ndim) if d != dim])
        if found is None:
            return torch.ones(size, dtype=torch.bool), torch.zeros(size)
        value = found.value.expand([size if d == dim else 1 for d in range(self.where.ndim)])
        where = found.where.expand_as(value)
        return ~where.reshape(-1).cpu(), value.reshape(-1).cpu().double()


def _reshape(x: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Reshape what has size 1 in some dimensions: runs of these stay so, others are filled where it is needed."""
    sizes = list(x.shape)
    shape: list[int] = []
    for old, new in regroup(before, after):
        if all(x.shape[i] == 1 for i in old):
            shape += [1] * len(new)
        else:
            for i in old:
                sizes[i] = before[i]
            shape += [after[j] for j in new]
    return x.expand(sizes).reshape(shape)
