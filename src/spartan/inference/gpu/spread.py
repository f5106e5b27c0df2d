"""The linear layer on single weights for two to 64 tokens, for CUDA devices from sm_90 on (few_spread.cu).

A *tile* is 16·rows outputs × 64 inputs. Its weights make one *step* or, where it has more than a step holds, several; a step
has `slots` times 32 of them, each with its *place*, 12 bits, in the tile as the tensor cores' lanes hold it. The 32 of a
slot mostly lie in different banks of shared memory.
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

_ACROSS, _LANES, _BITS, _BANKS = 64, 32, 12, 32
_LAYOUT = struct.Struct("7Qq4i")
MOST_SLOTS = 32
# Of a step, in slots: what takes as long whatever its weights, the products before all.
_STEP = 16


@dataclass(frozen=True)
class SpreadKernel:
    """How single weights are shared out."""

    rows: int  # 16-row tiles of a strip, 4 at most
    warps: int  # of a strip; with more than 16 tokens 8 at most
    splits: int  # blocks of threads that share a strip's steps
    ahead: int = 3  # steps that a warp has on their way

    def __str__(self) -> str:
        return f"spread, {16 * self.rows} rows, {self.warps} warps, {self.splits} splits, {self.ahead} ahead"


@dataclass(frozen=True)
class PackedSpread:
    """Single weights in steps; where a step has too few, its first one is there again."""

    values: Tensor  # [steps, slots / 2, 32 lanes, 2], an even number of slots; at least one step, which may go unused
    places: Tensor  # int32 [steps, words, 32 lanes]: 12 bits a slot, those of a lane behind each other
    columns: Tensor  # int32 [steps], in tiles
    starts: Tensor  # int32 [strips · splits + 1], the first step of each share
    slots: int
    shape: tuple[int, int]  # of the dense weight, outputs × inputs


def _place(row: Tensor, column: Tensor, rows: int) -> Tensor:
    """The place in its tile of an output and an input there: product, 16 rows, lane, half of the inputs, of the rows."""
    lane = row % 8 * 4 + column % 32 // 8
    register = row // 8 % 2 + column // 2 % 2 * 2
    product = column // 32 * 2 + column // 4 % 2
    return ((product * rows + row // 16) * 32 + lane) * 8 + register * 2 + column % 2


@functools.cache
def _places(device: torch.device, rows: int) -> Tensor:
    """Row · 64 + column of every place."""
    sides = (torch.arange(16 * rows, device=device), torch.arange(_ACROSS, device=device))
    row, column = torch.meshgrid(*sides, indexing="ij")
    return _place(row, column, rows).flatten().argsort()


def _slots(counts: Tensor) -> int:
    """The number of slots with which tiles of so many weights take the least time, roughly."""
    counts = counts[counts > 0]
    tried = torch.arange(1, MOST_SLOTS + 1, device=counts.device)
    steps = -(-counts[:, None] // (tried * _LANES))
    return int(tried[(steps.sum(0) * (tried + _STEP)).argmin()])


def _words(slots: int) -> int:
    return -(-slots * _BITS // 32)


def pack_spread(weight: Tensor, rows: int, splits: int) -> PackedSpread:
    """Pack a dense matrix [outputs, inputs], of which the entries that are not zero are stored.

    Example:
        >>> packed = pack_spread(torch.eye(100), 4, 2)
        >>> packed.columns.tolist(), packed.starts.tolist(), torch.equal(unpack_spread(packed, 4), torch.eye(100))
        ([0, 1], [0, 0, 1, 1, 2], True)
    """
    weight = weight.detach()
    (outputs, inputs), device = weight.shape, weight.device
    high = 16 * rows
    strips, across = -(-outputs // high), -(-inputs // _ACROSS)
    row, column = (weight != 0).nonzero(as_tuple=True)  # NaN counts: it is not zero
    cell, place = row // high * across + column // _ACROSS, _place(row % high, column % _ACROSS, rows)
    counts = torch.bincount(cell, minlength=strips * across)
    slots = _slots(counts)

    # In a tile first one weight of each bank, then the next of each.
    bank = cell * _BANKS + place // 2 % _BANKS
    order = bank.argsort(stable=True)
    of_bank = torch.bincount(bank, minlength=strips * across * _BANKS)
    nth = torch.arange(len(row), device=device) - (of_bank.cumsum(0) - of_bank)[bank[order]]
    order = order[(cell[order] * high * _ACROSS + nth * _BANKS + bank[order] % _BANKS).argsort()]
    cell, place, values = cell[order], place[order], weight[row, column][order]

    steps = -(-counts // (slots * _LANES))  # of each tile
    nth = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[cell]
    to = (steps.cumsum(0) - steps)[cell] * slots * _LANES + nth
    total = max(1, int(steps.sum()))
    first = to % (slots * _LANES) == 0
    spots = place.new_zeros(total, slots * _LANES)
    held = values.new_zeros(total, slots * _LANES)
    if len(row):
        spots, held = place[first, None].repeat(1, slots * _LANES), values[first, None].repeat(1, slots * _LANES)
    spots.view(-1)[to], held.view(-1)[to] = place, values
    spots = spots.reshape(total, slots, _LANES)
    words = spots.new_zeros(total, _words(slots) + 1, _LANES)
    for i in range(slots):
        word, bit = divmod(i * _BITS, 32)
        shifted = spots[:, i] << bit
        words[:, word] |= shifted & 0xFFFFFFFF
        words[:, word + 1] |= shifted >> 32
    words = words[:, :-1]
    places = torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)

    tile = torch.repeat_interleave(torch.arange(strips * across, device=device), steps)
    columns = tile % across if len(tile) else tile.new_zeros(1)
    of_strip = steps.reshape(strips, across).sum(1)
    firsts = F.pad(of_strip.cumsum(0), (1, 0))
    begins = (firsts[:-1, None] + of_strip[:, None] * torch.arange(splits, device=device) // splits).flatten()
    starts = torch.cat((begins, firsts[-1:]))
    held = F.pad(held, (0, slots % 2 * _LANES)).reshape(total, -1, 2, _LANES).transpose(2, 3).contiguous()
    return PackedSpread(held, places.contiguous(), columns.int(), starts.int(), slots, (outputs, inputs))


def unpack_spread(packed: PackedSpread, rows: int) -> Tensor:
    """The dense matrix that was packed, in strips of so many 16-row tiles."""
    (outputs, inputs), counts, slots = packed.shape, packed.starts.diff().long(), packed.slots
    high, across, used, device = 16 * rows, -(-inputs // _ACROSS), int(packed.starts[-1]), packed.values.device
    strips = -(-outputs // high)
    strip = torch.repeat_interleave(torch.arange(len(counts), device=device) // max(1, len(counts) // strips), counts)
    words = F.pad(packed.places[:used].long() & 0xFFFFFFFF, (0, 0, 0, 1))
    places = []
    for i in range(slots):
        word, bit = divmod(i * _BITS, 32)
        places.append((words[:, word] >> bit | words[:, word + 1] << (32 - bit)) & (1 << _BITS) - 1)
    at = _places(device, rows)[torch.stack(places, 1)] if places else strip
    values = packed.values[:used].transpose(2, 3).flatten(1, 2)[:, :slots]
    row = strip[:, None, None] * high + at // _ACROSS
    column = packed.columns[:used].long()[:, None, None] * _ACROSS + at % _ACROSS
    whole = packed.values.new_zeros(strips * high, across * _ACROSS)
    whole[row, column] = values
    return whole[:outputs, :inputs].contiguous()


@functools.cache
def _function(
    device: int, half: bool, aligned: bool, act: str, tokens: int, slots: int, kernel: tuple[int, ...]
) -> nvrtc.Function:
    """The kernel for a block of threads of so many tokens: 8, 16 or 32."""
    rows, warps, splits, ahead = kernel
    if tokens > 16:
        warps, ahead = min(warps, 8), 2
    macros = nvrtc.macros_of(half, aligned, act) | {"TILES": tokens // 8, "ROWS": rows, "WARPS": warps}
    macros |= {"SPLITS": splits, "SLOTS": slots, "AHEAD": ahead}
    region = max(16 * rows * _ACROSS * 2, tokens * (16 * rows + 4) * 4)
    return nvrtc.Function("few_spread", "spread_linear", _LAYOUT, macros, device, 32 * warps, warps * region, splits)


def _prepare(x: Tensor, aligned: bool, buffers: list[Tensor], sizes: list[int], activation: str) -> Prepared:
    starts, (outputs, slots, *kernel) = buffers[3], sizes
    tokens, inputs = x.shape
    each = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
    half = x.dtype == torch.float16
    function = _function(x.device.index, half, aligned, activation, each, slots, tuple(kernel))
    arguments = (0, *(t.data_ptr() for t in buffers), 0, x.stride(0), tokens, inputs, outputs, 0)
    return function.prepare((starts.shape[0] - 1, -(-tokens // each)), arguments, 6)


def run_spread(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b) with single weights.

    Args:
        x: [..., inputs]; bfloat16 or float16 for the kernel, else the weight is unpacked.
        buffers: values (of x's type), places, columns and starts, as in `PackedSpread`; and the bias, float32.
        sizes: outputs, slots, and the numbers of `SpreadKernel`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    if not nvrtc.runs_on(x):
        values, places, columns, starts, bias = buffers
        packed = PackedSpread(values, places, columns, starts, sizes[1], (sizes[0], x.shape[-1]))
        dense = unpack_spread(packed, sizes[2])
        return linear_torch(x, dense, bias, activation)
    return nvrtc.run(_prepare, x, buffers, sizes, activation)


# The same as an operator that `torch.compile` takes as it is.
spread_linear = torch.library.custom_op("spartan::spread_linear", run_spread, mutates_args=())


@spread_linear.register_fake
def _fake(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], sizes[0])


class SpreadLinear(nvrtc.CudaLinear):
    """act(x Wᵀ + b) with single weights, for two to 64 tokens.

    A NaN or an infinity of a token reaches, of its outputs, the strips that use its tile of inputs.

    Example:
        >>> layer = spartan.prune(torch.nn.Linear(64, 96), 0.9)
        >>> fast = SpreadLinear(layer.weight, layer.bias, SpreadKernel(4, 8, 1))
        >>> x = torch.randn(3, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    _names = ("values", "places", "columns", "starts", "bias")
    _operator, _run, _prepare = spread_linear, staticmethod(run_spread), staticmethod(_prepare)

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: SpreadKernel, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        packed = pack_spread(weight, kernel.rows, kernel.splits)
        self.values, self.places = nn.Buffer(packed.values), nn.Buffer(packed.places)
        self.columns, self.starts = nn.Buffer(packed.columns), nn.Buffer(packed.starts)
        self.bias, self.kernel, self._sizes = (
            self.bias.float(),
            str(kernel),
            [self.outputs, packed.slots, *astuple(kernel)],
        )
        self._settle()

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        shape, slots, rows = (self.outputs, self.inputs), self._sizes[1], self._sizes[2]
        return unpack_spread(PackedSpread(self.values, self.places, self.columns, self.starts, slots, shape), rows)
