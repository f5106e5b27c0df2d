"""The linear layer on single weights for one token, for CUDA devices from sm_90 on (few_singles.cu).

A row's weights lie one after the other, each with its *gap*, the number of inputs since the one before, in 8 bits; a longer
gap takes fillers, weights of zero, on its way. Rows are ordered by their number of weights, so that 32 neighbours, a
*group*, have about as many. The `shares` warps of a group take a *run* of its chunks each, a chunk being eight weights of
every row.
"""

import functools
import struct
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spartan.inference.cpu.ops import linear_torch
from spartan.inference.gpu import nvrtc
from spartan.inference.gpu.driver import Prepared

_LANES, _SLOTS, _LONGEST = 32, 8, 255
_LAYOUT = struct.Struct("8Qq4i")
# The token is held in float32, and places are told in 16 bits.
MOST_INPUTS = 1 << 15


@dataclass(frozen=True)
class SingleKernel:
    """How single weights are shared out."""

    groups: int  # of a block of threads
    shares: int  # warps of a group
    ahead: int  # chunks that a warp has on their way

    def __str__(self) -> str:
        return f"single weights, {self.groups} groups, {self.shares} shares, {self.ahead} ahead"


@dataclass(frozen=True)
class PackedSingles:
    """Single weights in chunks."""

    values: Tensor  # [chunks, 32, 8]; at least one chunk, which may go unused
    gaps: Tensor  # uint8 [chunks, 32, 8]
    bases: Tensor  # int16 [runs, 32], the input before a run's first gap
    starts: Tensor  # int32 [runs + 1], the first chunk of each run
    rows: Tensor  # int32 [groups · 32], the output that each row is; `outputs` and more where there is none
    shape: tuple[int, int]  # of the dense weight, outputs × inputs


def _walk(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every entry, fillers as well: its row, value, gap, and the input that it is at."""
    row, column = (weight != 0).nonzero(as_tuple=True)  # NaN counts: it is not zero
    before = F.pad(column[:-1], (1, 0))
    before[F.pad(row[1:] != row[:-1], (1, 0), value=True)] = 0
    gap = column - before
    fillers = ((gap - 1) // _LONGEST).clamp(min=0)
    source = torch.repeat_interleave(torch.arange(len(row), device=weight.device), fillers + 1)
    number = torch.arange(len(source), device=weight.device) - (fillers.cumsum(0) - fillers)[source] - source
    real = number == fillers[source]
    value = torch.where(real, weight[row[source], column[source]], 0)
    gaps = torch.where(real, gap[source] - fillers[source] * _LONGEST, _LONGEST)
    at = torch.where(real, column[source], before[source] + (number + 1) * _LONGEST)
    return row[source], value, gaps, at


def pack_singles(weight: Tensor, kernel: SingleKernel) -> PackedSingles:
    """Pack a dense matrix [outputs, inputs], of which the entries that are not zero are stored.

    Example:
        >>> packed = pack_singles(torch.eye(5), SingleKernel(1, 2, 4))
        >>> packed.gaps[0, :5, 0].tolist(), torch.equal(unpack_singles(packed), torch.eye(5))
        ([0, 1, 2, 3, 4], True)
    """
    weight = weight.detach()
    (outputs, inputs), device, shares = weight.shape, weight.device, kernel.shares
    size = kernel.groups * _LANES
    lines = -(-outputs // size) * size
    row, value, gap, at = _walk(weight)
    counts = torch.bincount(row, minlength=lines)
    order = counts.argsort(descending=True, stable=True)
    chunks = -(-counts[order].reshape(-1, _LANES).amax(1) // _SLOTS)  # of each group
    firsts = F.pad(chunks.cumsum(0), (1, 0))
    begins = (firsts[:-1, None] + chunks[:, None] * torch.arange(shares, device=device) // shares).flatten()

    line = torch.empty_like(order)
    line[order] = torch.arange(lines, device=device)
    heads = counts.cumsum(0) - counts
    slot, mine = torch.arange(len(row), device=device) - heads[row], line[row]
    to = ((firsts[mine // _LANES] + slot // _SLOTS) * _LANES + mine % _LANES) * _SLOTS + slot % _SLOTS
    shape = (max(1, int(firsts[-1])), _LANES, _SLOTS)
    values, gaps = weight.new_zeros(shape), torch.zeros(shape, dtype=torch.uint8, device=device)
    values.view(-1)[to], gaps.view(-1)[to] = value, gap.to(torch.uint8)

    # Where a row is before a run: at the last entry of those before.
    rows = order.reshape(-1, _LANES).repeat_interleave(shares, 0)  # [runs, 32]
    done = ((begins - firsts[:-1].repeat_interleave(shares)) * _SLOTS)[:, None]
    past = torch.minimum(done, counts[rows])
    bases = torch.where(past > 0, F.pad(at, (0, 1))[(heads[rows] + past - 1).clamp(min=0)], 0)
    starts = torch.cat((begins, firsts[-1:]))
    return PackedSingles(values, gaps, bases.to(torch.int16), starts.int(), order.int(), (outputs, inputs))


def unpack_singles(packed: PackedSingles) -> Tensor:
    """The dense matrix that was packed."""
    counts, device = packed.starts.diff().long(), packed.values.device
    shares = len(counts) * _LANES // len(packed.rows)
    run = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    weight, used = packed.values.new_zeros(packed.shape), len(run)
    walked = packed.gaps[:used].long().transpose(1, 2).reshape(-1, _LANES).cumsum(0)
    before = F.pad(walked, (0, 0, 1, 0))[packed.starts.long()[run] * _SLOTS]
    column = walked.reshape(used, _SLOTS, _LANES) + (packed.bases[run].long() - before)[:, None]
    rows = packed.rows.reshape(-1, _LANES).long()[run // shares]
    values = packed.values[:used].transpose(1, 2)
    kept = values != 0
    weight[rows[:, None].expand_as(column)[kept], column[kept]] = values[kept]
    return weight


@functools.cache
def _function(
    device: int, half: bool, aligned: bool, act: str, inputs: int, groups: int, shares: int, ahead: int
) -> nvrtc.Function:
    macros = nvrtc.macros_of(half, aligned, act) | {"GROUPS": groups, "SHARES": shares, "AHEAD": ahead}
    threads = _LANES * groups * shares
    return nvrtc.Function("few_singles", "single_linear", _LAYOUT, macros, device, threads, (inputs + 1 + threads) * 4)


def _prepare(x: Tensor, aligned: bool, buffers: list[Tensor], sizes: list[int], activation: str) -> Prepared:
    rows = buffers[4]
    outputs, groups, shares, ahead = sizes
    tokens, inputs = x.shape
    half = x.dtype == torch.float16
    function = _function(x.device.index, half, aligned, activation, inputs, groups, shares, ahead)
    arguments = (0, *(t.data_ptr() for t in buffers), 0, x.stride(0), tokens, inputs, outputs, 0)
    return function.prepare((rows.shape[0] // (_LANES * groups), tokens), arguments, 7)


def run_singles(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b) with single weights.

    Args:
        x: [..., inputs]; bfloat16 or float16 for the kernel, else the weight is unpacked.
        buffers: values (of x's type), gaps, bases, starts and rows, as in `PackedSingles`; and the bias, float32.
        sizes: outputs, and the numbers of `SingleKernel`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    if not nvrtc.runs_on(x):
        values, gaps, bases, starts, rows, bias = buffers
        dense = unpack_singles(PackedSingles(values, gaps, bases, starts, rows, (sizes[0], x.shape[-1])))
        return linear_torch(x, dense, bias, activation)
    return nvrtc.run(_prepare, x, buffers, sizes, activation)


# The same as an operator that `torch.compile` takes as it is.
single_linear = torch.library.custom_op("spartan::single_linear", run_singles, mutates_args=())


@single_linear.register_fake
def _fake(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], sizes[0])


class SingleLinear(nvrtc.CudaLinear):
    """act(x Wᵀ + b) with single weights, for one token (or a few, one by one).

    Example:
        >>> layer = spartan.prune(torch.nn.Linear(64, 96), 0.9)
        >>> fast = SingleLinear(layer.weight, layer.bias, SingleKernel(1, 8, 4))
        >>> x = torch.randn(1, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    _names = ("values", "gaps", "bases", "starts", "rows", "bias")
    _operator, _run, _prepare = single_linear, staticmethod(run_singles), staticmethod(_prepare)

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: SingleKernel, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        packed = pack_singles(weight, kernel)
        self.values, self.gaps, self.bases = map(nn.Buffer, (packed.values, packed.gaps, packed.bases))
        self.starts, self.rows = nn.Buffer(packed.starts), nn.Buffer(packed.rows)
        self.bias, self.kernel, self._sizes = self.bias.float(), str(kernel), [self.outputs, *astuple(kernel)]
        self._settle()

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        shape = (self.outputs, self.inputs)
        return unpack_singles(PackedSingles(self.values, self.gaps, self.bases, self.starts, self.rows, shape))
