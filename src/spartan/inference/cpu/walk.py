"""Packs single weights for the CPU kernel of one token or a few ("walk"), and multiplies by them.

16 rows go through their columns side by side. A *slot* holds the next weight of each and, in a byte, where its input
lies in a window of 128 inputs that begins at a multiple of 16. A row that has no weight left in the window has a 0
there: so rows with about as many weights go together, 128 neighbours at a time. At 90% scattered zeros a slot is filled
to nine tenths, and a weight takes 5.8 bytes in float32 and 3.5 in bfloat16, all read in one direction.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spartan.inference.cpu.memory import empty
from spartan.inference.cpu.ops import call_kernel, compiled

ROWS, WINDOW, STRIDE, SPAN = 16, 128, 16, 128  # the first three are walk.h's
MOST_TOKENS = 16  # more are for kernels that read a weight once for many tokens
MOST_INPUTS = STRIDE << 16  # windows are numbered in 16 bits


@dataclass
class WalkMatrix:
    """A matrix of `outputs` × `inputs` in slots."""

    starts: Tensor  # int32, groups + 1: the first slot of each group of 16 rows
    rows: Tensor  # int32 [groups · 16], the output that each row is; `outputs` and more where there is none
    windows: Tensor  # uint16 [slots], where each slot's window begins, in sixteens
    places: Tensor  # uint8 [slots, 16], the input within the window; from 128 on: none
    values: Tensor  # float32 or bfloat16 [slots, 16]
    outputs: int
    inputs: int


def pack_walk(weight: Tensor) -> WalkMatrix:
    """The matrix in slots, by the compiled library; a bfloat16 one keeps its type."""
    weight = weight.detach().cpu()
    if weight.shape[1] > MOST_INPUTS:
        raise ValueError(
            f"a weight of {weight.shape[1]} inputs; this kernel takes up to {MOST_INPUTS}: use another one"
        )
    kept = weight != 0  # NaN counts: it is not zero
    values = (weight if weight.dtype == torch.bfloat16 else weight.float())[kept]
    columns, counts = kept.nonzero()[:, 1].int(), kept.sum(1)
    outputs, groups = len(weight), -(-len(weight) // ROWS)
    order = (torch.arange(outputs) // SPAN * (weight.shape[1] + 1) + counts).argsort(stable=True)
    ends = counts.cumsum(0)
    begin, end = (F.pad(bound[order], (0, groups * ROWS - outputs)) for bound in (ends - counts, ends))

    def slots(*filled: Tensor) -> int:
        given = [tensor.data_ptr() for tensor in (begin, end, columns)]
        into = [tensor.data_ptr() for tensor in filled] or [0] * 4
        return int(compiled().spartan_walk_slots(*given, groups, *into))

    count = slots()
    starts, windows = torch.empty(groups + 1, dtype=torch.int32), torch.empty(count, dtype=torch.uint16)
    places, sources = (torch.empty(count, ROWS, dtype=kind) for kind in (torch.uint8, torch.int64))
    slots(starts, windows, places, sources)
    rows = torch.cat((order, torch.arange(outputs, groups * ROWS))).int()
    values = F.pad(values, (0, 1))[sources]  # a source of −1 is that 0
    return WalkMatrix(starts, rows, windows, places, values, outputs, weight.shape[1])


def unpack_walk(packed: WalkMatrix) -> Tensor:
    """The dense matrix, of the values' type."""
    group = torch.repeat_interleave(torch.arange(packed.starts.numel() - 1), packed.starts.diff().long())
    rows = packed.rows.reshape(-1, ROWS).long()[group]
    columns = packed.windows.long()[:, None] * STRIDE + packed.places.long()
    kept = packed.values != 0
    weight = packed.values.new_zeros(packed.outputs, packed.inputs)
    weight[rows[kept], columns[kept]] = packed.values[kept]
    return weight


def walk(x: Tensor, packed: WalkMatrix, bias: Tensor, activation: str) -> Tensor:
    """act(x Wᵀ + b) for x [..., inputs], float32 or bfloat16, contiguous; the bias is float32, in the order of `rows`."""
    y = empty(x, (*x.shape[:-1], packed.outputs))
    others = (y, bias, packed.starts, packed.rows, packed.windows, packed.places, packed.values)
    half = packed.values.dtype == torch.bfloat16
    sizes = [x.numel() // packed.inputs, packed.inputs, packed.outputs, half]
    call_kernel("spartan_walk", x, others, sizes, activation)
    return y
