"""Packs sparse weights as the CPU kernels read them.

Rows are taken h at a time. An *entry* of a group is a run of g columns in which some row of the group is not zero; its
h·g numbers are stored, zeros among them included. So h = g = 1 is CSR, and any pattern of blocks whose height is a multiple
of h is stored without a zero, whatever the blocks' width, when g divides that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PackedMatrix:
    """A matrix of `outputs` × `inputs` in groups of h rows and runs of g columns.

    starts: int32, groups + 1; runs: int32, the number of each entry's run of columns; values: float32 [entries, g, h].
    """

    starts: Tensor
    runs: Tensor
    values: Tensor
    outputs: int
    inputs: int

    @property
    def h(self) -> int:
        """Rows a group."""
        return self.values.shape[2]

    @property
    def g(self) -> int:
        """Columns a run."""
        return self.values.shape[1]


def _tiles(weight: Tensor, h: int, g: int) -> Tensor:
    """[groups, h, runs, g], with zeros where the sides do not divide."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % g, 0, -outputs % h))
    return padded.reshape(padded.shape[0] // h, h, padded.shape[1] // g, g)


def pack(weight: Tensor, h: int, g: int) -> PackedMatrix:
    """The matrix in groups of h rows and runs of g columns.

    Example:
        >>> packed = pack(torch.eye(4), 2, 2)
        >>> packed.starts.tolist(), packed.runs.tolist(), tuple(packed.values.shape)
        ([0, 1, 2], [0, 1], (2, 2, 2))
        >>> bool((unpack(packed) == torch.eye(4)).all())
        True
    """
    tiles = _tiles(weight.detach().float().cpu(), h, g)
    # NaN counts: it is not zero.
    group, run = (tiles != 0).any(3).any(1).nonzero(as_tuple=True)
    counts = torch.bincount(group, minlength=tiles.shape[0])
    starts = torch.zeros(tiles.shape[0] + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    values = tiles[group, :, run, :].transpose(1, 2).contiguous()
    return PackedMatrix(starts, run.int(), values, weight.shape[0], weight.shape[1])


def unpack(packed: PackedMatrix) -> Tensor:
    """The dense matrix, float32."""
    groups, h, g = packed.starts.numel() - 1, packed.h, packed.g
    runs = -(-packed.inputs // g)
    tiles = torch.zeros(groups, h, runs, g)
    group = torch.repeat_interleave(torch.arange(groups), packed.starts.diff().long())
    tiles[group, :, packed.runs.long(), :] = packed.values.transpose(1, 2)
    return tiles.reshape(groups * h, runs * g)[: packed.outputs, : packed.inputs].contiguous()


def stored(weight: Tensor, h: int, g: int) -> int:
    """How many numbers `pack` would store.

    Example:
        >>> stored(torch.eye(4), 1, 1), stored(torch.eye(4), 4, 1)
        (4, 16)
    """
    return int((_tiles(weight, h, g) != 0).any(3).any(1).sum()) * h * g
