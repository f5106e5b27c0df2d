"""The linear layers for one to 64 tokens on CUDA devices from sm_90 on, by few.cu: single weights, and blocks.

Blocks of 16×16 and larger: the kept 16×16 blocks of ROWS·16 outputs are *steps*, each stored as the tensor cores' lanes
hold it. Single weights: a row's weights lie one after the other, each with its *gap*, the number of inputs since the one
before, in 8 bits; a gap of more takes fillers on its way. Rows are grouped with rows of about as many weights.
"""

import functools
import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spartan.inference.cpu.ops import ACTIVATIONS, linear_torch
from spartan.inference.gpu import nvrtc
from spartan.inference.gpu.few import FewTokensLinear

SLOTS = 8  # weights of a row that a lane loads at a time
_LONGEST = 255  # gap
_SUMS = 96  # of 512 bytes of shared memory, that the warps of a block may take
_BLOCK_LAYOUT, _SINGLE_LAYOUT = struct.Struct("6Qq4i"), struct.Struct("9Qq4i")


@dataclass(frozen=True)
class BlockKernel:
    """How blocks are shared out."""

    rows: int  # 16-row tiles of a strip
    warps: int

    def __str__(self) -> str:
        return f"blocks 16×16, {16 * self.rows} rows, {self.warps} warps"


@dataclass(frozen=True)
class SingleKernel:
    """How single weights are packed: for `tokens` tokens at a time, and `window` inputs of them in shared memory."""

    tokens: int  # 1, 4, 8 or 16
    groups: int  # of rows, in a block of threads
    shares: int  # warps that share a group's weights
    window: int  # inputs, a multiple of 16, or 0 for all; at most eight windows make a layer
    ahead: int = 4  # chunks that a lane has on their way

    @property
    def lanes(self) -> int:
        """Lanes of a row."""
        return 2 if self.tokens == 16 else 1

    @property
    def classes(self) -> int:
        """Walks of a row."""
        return 4 if self.tokens == 16 else 1

    def __str__(self) -> str:
        window = f"{self.window} inputs" if self.window else "all inputs"
        return f"single weights, {self.tokens} tokens, {self.groups} groups, {self.shares} shares, {window}, {self.ahead} ahead"


@dataclass(frozen=True)
class PackedBlocks:
    """Kept blocks in steps."""

    weight: Tensor  # [steps, rows, 32 lanes, 8]
    columns: Tensor  # int32 [steps]
    starts: Tensor  # int32 [strips + 1]
    shape: tuple[int, int]


# Output and input, within 16×16, of the eight numbers that lane 4g + t holds; inputs in the order of few.cu.
_GROUP, _FOURTH = torch.arange(32) // 4, torch.arange(32) % 4
_LANE_ROWS = torch.stack([_GROUP + 8 * (i // 2 % 2) for i in range(8)], 1)
_LANE_COLUMNS = torch.stack([4 * _FOURTH + 2 * (i // 4) + i % 2 for i in range(8)], 1)


def pack_blocks(weight: Tensor, rows: int) -> PackedBlocks:
    """Pack a dense matrix [outputs, inputs]; 16·rows × 16 blocks that are all zero are not stored.

    Example:
        >>> packed = pack_blocks(torch.eye(40), 1)
        >>> packed.columns.tolist(), packed.starts.tolist(), torch.equal(unpack_blocks(packed), torch.eye(40))
        ([0, 1, 2], [0, 1, 2, 3], True)
    """
    weight = weight.detach()
    outputs, inputs = weight.shape
    strips, across = -(-outputs // (16 * rows)), -(-inputs // 16)
    cut = F.pad(weight, (0, across * 16 - inputs, 0, strips * 16 * rows - outputs))
    cut = cut.reshape(strips, rows, 16, across, 16).permute(0, 3, 1, 2, 4)  # [strips, across, rows, 16, 16]
    keep = (cut != 0).flatten(2).any(2)
    strip, column = keep.nonzero(as_tuple=True)
    if not len(strip):
        strip = column = torch.zeros(1, dtype=torch.int64, device=weight.device)  # one that goes unused
    lanes = cut[strip, column][:, :, _LANE_ROWS.to(weight.device), _LANE_COLUMNS.to(weight.device)]
    starts = F.pad(keep.sum(1).cumsum(0), (1, 0))
    return PackedBlocks(lanes.contiguous(), column.int(), starts.int(), (outputs, inputs))


def unpack_blocks(packed: PackedBlocks) -> Tensor:
    """The dense matrix that was packed."""
    (outputs, inputs), rows, counts = packed.shape, packed.weight.shape[1], packed.starts.diff().long()
    strips, across = len(counts), -(-inputs // 16)
    strip = torch.repeat_interleave(torch.arange(strips, device=counts.device), counts)
    used = len(strip)
    tiles = packed.weight.new_zeros(used, rows, 16, 16)
    tiles[:, :, _LANE_ROWS.to(tiles.device), _LANE_COLUMNS.to(tiles.device)] = packed.weight[:used]
    whole = packed.weight.new_zeros(strips, across, rows, 16, 16)
    whole[strip, packed.columns[:used].long()] = tiles
    return whole.permute(0, 2, 3, 1, 4).reshape(strips * rows * 16, across * 16)[:outputs, :inputs].contiguous()


@dataclass(frozen=True)
class PackedSingles:
    """Single weights in chunks of `SLOTS`; G rows to a group, `shares` runs of chunks to each (strip, window, group)."""

    values: Tensor  # [chunks, G, SLOTS]
    gaps: Tensor  # uint8 [chunks, G, SLOTS]
    bases: Tensor  # int16 (its bits unsigned) [runs, G, classes], where each walk is before a run
    starts: Tensor  # int32 [runs + 1], the first chunk of each run
    places: Tensor  # uint8 [strips · windows, groups · G], the place in its strip of each row of a window
    rows: Tensor  # int32 [strips · groups · G], the output at each place; `outputs` and more where there is none
    shape: tuple[int, int]
    kernel: SingleKernel

    @property
    def windows(self) -> int:
        """Into how many windows the inputs are cut."""
        return windows_of(self.shape[1], self.kernel)


def windows_of(inputs: int, kernel: SingleKernel) -> int:
    """Into how many windows so many inputs are cut."""
    return -(-inputs // window_of(inputs, kernel))


def window_of(inputs: int, kernel: SingleKernel) -> int:
    """Inputs of a window."""
    return min(kernel.window or inputs, inputs) + 15 & ~15


def _walks(weight: Tensor, kernel: SingleKernel) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every row's walks, one after the other: list (row, window, class) of each entry, value, gap, and place after it."""
    inputs, classes = weight.shape[1], kernel.classes
    window, windows = window_of(inputs, kernel), windows_of(inputs, kernel)
    row, column = (weight != 0).nonzero(as_tuple=True)
    inside = column % window
    walk, place = (row * windows + column // window) * classes + inside % classes, inside // classes
    order = (walk * window + place).argsort()
    walk, place, value = walk[order], place[order], weight[row[order], column[order]]
    before = F.pad(place[:-1], (1, 0))
    before[F.pad(walk[1:] != walk[:-1], (1, 0), value=True)] = 0
    gap = place - before
    fillers = ((gap - 1) // _LONGEST).clamp(min=0)
    times = fillers + 1
    source = torch.repeat_interleave(torch.arange(len(walk), device=weight.device), times)
    number = torch.arange(len(source), device=weight.device) - (times.cumsum(0) - times)[source]
    real = number == fillers[source]
    gap, place = gap[source], place[source]
    left = (fillers[source] - number) * _LONGEST  # still to go, by fillers
    last = gap - fillers[source] * _LONGEST
    places = torch.where(real, place, place - last - (left - _LONGEST))
    return walk[source], value[source] * real, torch.where(real, last, _LONGEST), places


def pack_singles(weight: Tensor, kernel: SingleKernel) -> PackedSingles:
    """Pack a dense matrix [outputs, inputs], of which the entries that are not zero are stored.

    Example:
        >>> packed = pack_singles(torch.eye(5), SingleKernel(1, 1, 2, 0))
        >>> packed.gaps[0, :5, 0].tolist(), torch.equal(unpack_singles(packed), torch.eye(5))
        ([0, 1, 2, 3, 4], True)
    """
    weight = weight.detach()
    (outputs, inputs), device, classes = weight.shape, weight.device, kernel.classes
    g, windows = 32 // kernel.lanes, windows_of(inputs, kernel)
    size = kernel.groups * g
    strips = -(-outputs // size)
    walk, value, gap, place = _walks(weight, kernel)
    counts = torch.bincount(walk, minlength=strips * size * windows * classes)
    need = counts.reshape(strips * size, windows, classes).amax(2) * classes  # slots of each row in each window
    order = need.sum(1).argsort(descending=True, stable=True) if windows == 1 else torch.arange(strips * size, device=device)
    # Within a strip, rows of each window by what they need: [strips, size, windows], the place of each rank.
    at = need[order].reshape(strips, size, windows).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(at).scatter_(1, at, torch.arange(size, device=device)[None, :, None].expand_as(at))
    row_of = order.reshape(strips, size)[torch.arange(strips, device=device)[:, None, None], at]  # of each rank
    most = need[row_of, torch.arange(windows, device=device)].permute(0, 2, 1).reshape(-1, g).amax(1)
    chunks = -(-most // SLOTS)  # of each (strip, window, group)
    firsts = F.pad(chunks.cumsum(0), (1, 0))
    shares = torch.arange(kernel.shares, device=device)
    begins = (firsts[:-1, None] + chunks[:, None] * shares // kernel.shares).flatten()
    starts = torch.cat((begins, firsts[-1:]))

    # Where each entry goes.
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=device)
    row, win, kind = walk // (windows * classes), walk // classes % windows, walk % classes
    spot = inverse[row]
    ranked = rank[spot // size, spot % size, win]
    cell = (spot // size * windows + win) * kernel.groups + ranked // g
    heads = F.pad(counts.cumsum(0), (1, 0))
    nth = torch.arange(len(walk), device=device) - heads[walk]
    slot = nth * classes + (kind - ranked) % classes
    total = max(1, int(firsts[-1]))
    to = ((firsts[cell] + slot // SLOTS) * g + ranked % g) * SLOTS + slot % SLOTS
    values, gaps = weight.new_zeros(total * g * SLOTS), torch.zeros(total * g * SLOTS, dtype=torch.uint8, device=device)
    values[to], gaps[to] = value, gap.to(torch.uint8)

    # Where walks are before each run: after the last entry of an earlier one.
    done = (begins - firsts[:-1].repeat_interleave(kernel.shares)) * (SLOTS // classes)
    cells = torch.arange(len(chunks), device=device).repeat_interleave(kernel.shares)
    lane = torch.arange(g, device=device)
    rows = row_of.permute(0, 2, 1).reshape(-1, g)[cells]  # [runs, G]
    kinds = (lane[:, None] + torch.arange(classes, device=device)) % classes
    lists = (rows[:, :, None] * windows + (cells // kernel.groups % windows)[:, None, None]) * classes + kinds
    past = torch.minimum(done[:, None, None], counts[lists])
    known = F.pad(place, (0, 1))
    bases = torch.where(past > 0, known[(heads[lists] + past - 1).clamp(min=0)], 0)
    return PackedSingles(
        values.reshape(-1, g, SLOTS), gaps.reshape(-1, g, SLOTS), bases.to(torch.int16), starts.int(),
        at.permute(0, 2, 1).reshape(-1, size).to(torch.uint8), order.int(), (outputs, inputs), kernel,
    )  # fmt: skip


def unpack_singles(packed: PackedSingles) -> Tensor:
    """The dense matrix that was packed."""
    (outputs, inputs), kernel, windows, device = packed.shape, packed.kernel, packed.windows, packed.values.device
    classes, g = kernel.classes, 32 // kernel.lanes
    counts = packed.starts.diff().long()
    run = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    used = len(run)
    weight = packed.values.new_zeros(outputs, inputs)
    if not used:
        return weight
    steps = packed.gaps[:used].long().reshape(used, g, SLOTS // classes, classes).permute(0, 2, 1, 3)
    walked = steps.reshape(-1, g, classes).cumsum(0)
    before = F.pad(walked, (0, 0, 0, 0, 1, 0))[packed.starts.long()[run] * (SLOTS // classes)]
    place = walked.reshape(used, -1, g, classes) - before[:, None] + (packed.bases[run].long() & 0xFFFF)[:, None]
    lane = torch.arange(g, device=device)
    kind = (lane[:, None] + torch.arange(classes, device=device)) % classes
    cell = run // kernel.shares
    strip, window = cell // (kernel.groups * windows), cell // kernel.groups % windows
    column = place * classes + kind + (window * window_of(inputs, kernel))[:, None, None, None]
    ranks = (cell % kernel.groups * g)[:, None] + lane
    spots = packed.places.long()[(strip * windows + window)[:, None], ranks]
    rows = packed.rows.long()[strip[:, None] * kernel.groups * g + spots]  # [chunks, G]
    values = packed.values[:used].reshape(used, g, SLOTS // classes, classes).permute(0, 2, 1, 3)
    kept = values != 0
    weight[rows[:, None, :, None].expand_as(column)[kept], column[kept]] = values[kept]
    return weight


@functools.cache
def _block_function(device: int, half: bool, aligned: bool, act: str, tiles: int, kernel: BlockKernel) -> nvrtc.Function:
    unroll = max(1, {1: 8, 2: 8, 4: 4, 8: 2}[tiles] // kernel.rows)
    macros = {"HALF": int(half), "ACT": list(ACTIVATIONS).index(act), "ALIGNED": int(aligned), "NT": tiles}
    macros |= {"ROWS": kernel.rows, "WARPS": kernel.warps, "UNROLL": unroll}
    return nvrtc.Function("block_linear", device, macros, 32 * kernel.warps, 0, 1)


@functools.cache
def _single_function(
    device: int, half: bool, aligned: bool, act: str, window: int, windows: int, kernel: SingleKernel
) -> nvrtc.Function:
    macros = {"HALF": int(half), "ACT": list(ACTIVATIONS).index(act), "ALIGNED": int(aligned), "TOKENS": kernel.tokens}
    macros |= {"LANES": kernel.lanes, "CLASSES": kernel.classes, "GROUPS": kernel.groups, "SHARES": kernel.shares}
    macros |= {"WINDOW": window, "WINDOWS": windows, "AHEAD": kernel.ahead}
    held = (window + 1) * kernel.tokens * (4 if kernel.tokens == 1 else 2)
    shared = held + kernel.shares * kernel.groups * 32 // kernel.lanes * kernel.tokens * 4
    return nvrtc.Function("single_linear", device, macros, 32 * kernel.groups * kernel.shares, shared, windows)


def _tokens(x: Tensor) -> tuple[Tensor, int, bool]:
    """The tokens as rows, how many, and whether their rows begin at 16 bytes."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.shape[0], rows.stride(0) % 8 == 0 and rows.shape[1] % 16 == 0 and rows.data_ptr() % 16 == 0


def run_blocks(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b) with blocks.

    Args:
        x: [..., inputs]; bfloat16 or float16 for the kernel, else the weight is unpacked.
        buffers: weight (of x's type), columns and starts, as in `PackedBlocks`; and the bias, float32, one an output.
        sizes: outputs, and rows and warps of `BlockKernel`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    weight, columns, starts, bias = buffers
    outputs = sizes[0]
    if x.dtype == torch.float32 or not nvrtc.available(x.device):
        dense = unpack_blocks(PackedBlocks(weight, columns, starts, (outputs, x.shape[-1])))
        return linear_torch(x, dense, bias, activation)
    y = x.new_empty(*x.shape[:-1], outputs)
    rows, tokens, aligned = _tokens(x)
    if tokens == 0 or outputs == 0:
        return y
    kernel = BlockKernel(*sizes[1:])
    tiles = 1 if tokens <= 8 else 2 if tokens <= 16 else 4 if tokens <= 32 else 8
    while tiles * kernel.rows * kernel.warps > _SUMS:
        tiles //= 2
    with torch.cuda.device(x.device):
        launch = _block_function(x.device.index, x.dtype == torch.float16, aligned, activation, tiles, kernel)
        launch(
            (starts.shape[0] - 1, -(-tokens // (8 * tiles))), _BLOCK_LAYOUT,
            rows.data_ptr(), weight.data_ptr(), columns.data_ptr(), starts.data_ptr(), bias.data_ptr(), y.data_ptr(),
            rows.stride(0), tokens, rows.shape[1], outputs, 0,
        )  # fmt: skip
    return y


def run_singles(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b) with single weights.

    Args:
        x: [..., inputs]; bfloat16 or float16 for the kernel, else the weight is unpacked.
        buffers: values (of x's type), gaps, bases, starts, places and rows, as in `PackedSingles`; and the bias.
        sizes: outputs, and the numbers of `SingleKernel`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    values, gaps, bases, starts, places, order, bias = buffers
    outputs, inputs, kernel = sizes[0], x.shape[-1], SingleKernel(*sizes[1:])
    if x.dtype == torch.float32 or not nvrtc.available(x.device):
        dense = unpack_singles(PackedSingles(values, gaps, bases, starts, places, order, (outputs, inputs), kernel))
        return linear_torch(x, dense, bias, activation)
    y = x.new_empty(*x.shape[:-1], outputs)
    rows, tokens, aligned = _tokens(x)
    if tokens == 0 or outputs == 0:
        return y
    window, windows = window_of(inputs, kernel), windows_of(inputs, kernel)
    with torch.cuda.device(x.device):
        half = x.dtype == torch.float16
        launch = _single_function(x.device.index, half, aligned, activation, window, windows, kernel)
        launch(
            (places.shape[0], -(-tokens // kernel.tokens)), _SINGLE_LAYOUT,
            rows.data_ptr(), values.data_ptr(), gaps.data_ptr(), bases.data_ptr(), starts.data_ptr(),
            places.data_ptr(), order.data_ptr(), bias.data_ptr(), y.data_ptr(),
            rows.stride(0), tokens, inputs, outputs, 0,
        )  # fmt: skip
    return y


# The same as operators that `torch.compile` takes as they are.
block_linear = torch.library.custom_op("spartan::block_linear", run_blocks, mutates_args=())
single_linear = torch.library.custom_op("spartan::single_linear", run_singles, mutates_args=())


@block_linear.register_fake
@single_linear.register_fake
def _fake(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], sizes[0])


class BlockLinear(FewTokensLinear):
    """act(x Wᵀ + b) with blocks of 16×16 and larger."""

    _others = ("columns", "starts")
    _operator, _run = block_linear, staticmethod(run_blocks)

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: BlockKernel, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        packed = pack_blocks(weight, kernel.rows)
        self.values, self.columns, self.starts = map(nn.Buffer, (packed.weight, packed.columns, packed.starts))
        self.bias, self.kernel = self.bias.float(), str(kernel)
        self._sizes = [self.outputs, *astuple(kernel)]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        return unpack_blocks(PackedBlocks(self.values, self.columns, self.starts, (self.outputs, self.inputs)))


class SingleLinear(FewTokensLinear):
    """act(x Wᵀ + b) with single weights."""

    _others = ("gaps", "bases", "starts", "places", "rows")
    _operator, _run = single_linear, staticmethod(run_singles)

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: SingleKernel, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        packed = pack_singles(weight, kernel)
        self.values = nn.Buffer(packed.values)
        for name in self._others:
            self.register_buffer(name, getattr(packed, name))
        self.bias, self.kernel = self.bias.float(), str(kernel)
        self._sizes = [self.outputs, *astuple(kernel)]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        buffers: Any = (getattr(self, name) for name in ("values", *self._others))
        return unpack_singles(PackedSingles(*buffers, (self.outputs, self.inputs), SingleKernel(*self._sizes[1:])))
