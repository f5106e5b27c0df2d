"""The linear layer on single weights for two to 64 tokens, for CUDA devices from sm_90 on (few_gather.cu).

16 rows make a *group*. A *step* of it holds two weights of every row, a *chunk* eight steps; in step i the weight of lane
2r + s (weight s of row r) has an input whose last three bits are (2r + s) xor i, so that what is stored is the bits above.
Inputs are cut into *windows* of 2048, of which eight bits tell. The `shares` warps of a group take a *run* of its chunks in
a window each. `groups` groups make a *strip*; its rows are in every window ordered by the chunks they need.
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

_ROWS, _STEPS = 16, 8
_LAYOUT = struct.Struct("7Qq4i")
_WINDOW, _MOST_WINDOWS = 2048, 8
MOST_INPUTS = _WINDOW * _MOST_WINDOWS


@dataclass(frozen=True)
class GatherKernel:
    """How single weights are shared out."""

    groups: int  # of a block of threads
    shares: int  # warps of a group
    ahead: int  # chunks that a warp has on their way
    windows: int  # into which the inputs are cut at least

    def __str__(self) -> str:
        return f"gathers, {self.groups} groups, {self.shares} shares, {self.ahead} ahead, {self.windows} windows"


@dataclass(frozen=True)
class PackedGathers:
    """Single weights in steps; those that a row lacks are zero, at input 0 and the like."""

    values: (
        Tensor  # [chunks, 8, 2, 8 steps, 2], weights of row g and of row g + 8; at least one chunk, which may go unused
    )
    places: Tensor  # uint8 [chunks, 16, 2, 8 steps]
    starts: Tensor  # int32 [runs + 1], the first chunk of each run: strip, window, group, share
    spots: Tensor  # uint8 [strips · windows, rows of a strip], the output in its strip that each row is
    shape: tuple[int, int]  # of the dense weight, outputs × inputs


def windows_of(inputs: int, least: int) -> tuple[int, int]:
    """How many windows, and how many inputs each, a multiple of 16."""
    count = max(-(-inputs // _WINDOW), min(least, -(-inputs // 16)))
    size = -(-inputs // (count * 16)) * 16
    return -(-inputs // size), size


def pack_gathers(weight: Tensor, kernel: GatherKernel) -> PackedGathers:
    """Pack a dense matrix [outputs, inputs], of which the entries that are not zero are stored.

    Example:
        >>> packed = pack_gathers(torch.eye(40), GatherKernel(2, 2, 1, 1))
        >>> packed.starts.tolist(), torch.equal(unpack_gathers(packed, 1), torch.eye(40))
        ([0, 0, 1, 1, 2, 2, 3, 3, 3], True)
    """
    weight = weight.detach()
    (outputs, inputs), device, shares = weight.shape, weight.device, kernel.shares
    windows, window = windows_of(inputs, kernel.windows)
    size = kernel.groups * _ROWS
    strips = -(-outputs // size)
    row, column = (weight != 0).nonzero(as_tuple=True)  # NaN counts: it is not zero
    part, place = column // window, column % window
    pool = (row * windows + part) * 8 + place % 8
    counts = torch.bincount(pool, minlength=strips * size * windows * 8)
    need = -(-counts.reshape(strips, size, windows, 8).amax(3) // 2)  # chunks of each row in each window
    spots = need.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(spots).scatter_(1, spots, torch.arange(size, device=device)[:, None].expand_as(spots))
    chunks = need.gather(1, spots).permute(0, 2, 1).reshape(-1, _ROWS).amax(1)  # of each strip, window, group
    firsts = F.pad(chunks.cumsum(0), (1, 0))
    begins = (firsts[:-1, None] + chunks[:, None] * torch.arange(shares, device=device) // shares).flatten()

    order = pool.argsort(stable=True)  # entries of one pool together
    row, part, place, pool = row[order], part[order], place[order], pool[order]
    nth = torch.arange(len(pool), device=device) - (counts.cumsum(0) - counts)[pool]
    mine = rank[row // size, row % size, part]
    line, lane = mine % _ROWS, nth % 2
    chunk = firsts[(row // size * windows + part) * kernel.groups + mine // _ROWS] + nth // 2
    step = (place % 8) ^ ((line * 2 + lane) % 8)
    total = max(1, int(firsts[-1]))
    values = weight.new_zeros(total, 8, 2, _STEPS, 2)
    values[chunk, line % 8, line // 8, step, lane] = weight[row, column[order]]
    places = torch.zeros(total, _ROWS, 2, _STEPS, dtype=torch.uint8, device=device)
    places[chunk, line, lane, step] = (place // 8).to(torch.uint8)
    starts = torch.cat((begins, firsts[-1:]))
    spots = spots.permute(0, 2, 1).reshape(-1, size).contiguous()
    return PackedGathers(values, places, starts.int(), spots.to(torch.uint8), (outputs, inputs))


def unpack_gathers(packed: PackedGathers, windows: int) -> Tensor:
    """The dense matrix that was packed into so many windows at least."""
    (outputs, inputs), counts, device = packed.shape, packed.starts.diff().long(), packed.values.device
    windows, window = windows_of(inputs, windows)
    cells, size = packed.spots.numel() // _ROWS, packed.spots.shape[1]
    cell = torch.repeat_interleave(torch.arange(len(counts), device=device) // (len(counts) // cells), counts)
    used = len(cell)
    strip, part, group = cell // (size // _ROWS * windows), cell // (size // _ROWS) % windows, cell % (size // _ROWS)
    rows = strip[:, None] * size + packed.spots[strip * windows + part].long().gather(
        1, group[:, None] * _ROWS + torch.arange(_ROWS, device=device)
    )
    values = packed.values[:used].permute(0, 2, 1, 4, 3).reshape(used, _ROWS, 2, _STEPS)
    lane = torch.arange(_ROWS * 2, device=device).reshape(_ROWS, 2, 1)
    last = (lane ^ torch.arange(_STEPS, device=device)) % 8
    column = part[:, None, None, None] * window + packed.places[:used].long() * 8 + last
    kept = values != 0
    weight = packed.values.new_zeros(outputs, inputs)
    weight[rows[:, :, None, None].expand_as(column)[kept], column[kept]] = values[kept]
    return weight


@functools.cache
def _function(
    device: int, half: bool, aligned: bool, act: str, inputs: int, tiles: int, kernel: tuple[int, ...]
) -> nvrtc.Function:
    groups, shares, ahead, least = kernel
    windows, window = windows_of(inputs, least)
    macros = nvrtc.macros_of(half, aligned, act) | {"TILES": tiles, "GROUPS": groups, "SHARES": shares, "AHEAD": ahead}
    macros |= {"WINDOW": window, "WINDOWS": windows}
    threads, shared = 32 * groups * shares, tiles * 8 * (groups * _ROWS * shares * 4 + window * 2)
    return nvrtc.Function("few_gather", "gather_linear", _LAYOUT, macros, device, threads, shared, windows)


def _prepare(x: Tensor, aligned: bool, buffers: list[Tensor], sizes: list[int], activation: str) -> Prepared:
    spots = buffers[3]
    outputs, *kernel = sizes
    tokens, inputs = x.shape
    tiles, half = 1 if tokens <= 8 else 2, x.dtype == torch.float16
    function = _function(x.device.index, half, aligned, activation, inputs, tiles, tuple(kernel))
    arguments = (0, *(t.data_ptr() for t in buffers), 0, x.stride(0), tokens, inputs, outputs, 0)
    return function.prepare((spots.shape[0], -(-tokens // (tiles * 8))), arguments, 6)


def run_gathers(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b) with single weights.

    Args:
        x: [..., inputs]; bfloat16 or float16 for the kernel, else the weight is unpacked.
        buffers: values (of x's type), places, starts and spots, as in `PackedGathers`; and the bias, float32.
        sizes: outputs, and the numbers of `GatherKernel`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    if not nvrtc.runs_on(x):
        values, places, starts, spots, bias = buffers
        dense = unpack_gathers(PackedGathers(values, places, starts, spots, (sizes[0], x.shape[-1])), sizes[-1])
        return linear_torch(x, dense, bias, activation)
    return nvrtc.run(_prepare, x, buffers, sizes, activation)


# The same as an operator that `torch.compile` takes as it is.
gather_linear = torch.library.custom_op("spartan::gather_linear", run_gathers, mutates_args=())


@gather_linear.register_fake
def _fake(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], sizes[0])


class GatherLinear(nvrtc.CudaLinear):
    """act(x Wᵀ + b) with single weights, for two to 64 tokens.

    A NaN or an infinity of a token reaches all its outputs of a group of 16 that uses it, not of one row alone.

    Example:
        >>> layer = spartan.prune(torch.nn.Linear(64, 96), 0.9)
        >>> fast = GatherLinear(layer.weight, layer.bias, GatherKernel(4, 4, 1, 1))
        >>> x = torch.randn(3, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    _names = ("values", "places", "starts", "spots", "bias")
    _operator, _run, _prepare = gather_linear, staticmethod(run_gathers), staticmethod(_prepare)

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: GatherKernel, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        packed = pack_gathers(weight, kernel)
        self.values, self.places = nn.Buffer(packed.values), nn.Buffer(packed.places)
        self.starts, self.spots = nn.Buffer(packed.starts), nn.Buffer(packed.spots)
        self.bias, self.kernel, self._sizes = self.bias.float(), str(kernel), [self.outputs, *astuple(kernel)]
        self._settle()

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        packed = PackedGathers(self.values, self.places, self.starts, self.spots, (self.outputs, self.inputs))
        return unpack_gathers(packed, self._sizes[-1])
