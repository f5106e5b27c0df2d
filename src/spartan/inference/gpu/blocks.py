"""The linear layer on blocks of 16×16 and larger, for CUDA devices from sm_90 on and any number of tokens.

The kept 16×16 blocks of a *strip* of 16·rows outputs are its *steps*, each stored as the tensor cores' lanes hold it. With
up to 64 tokens (few_blocks.cu) the time is that of reading them. With more (resident.cu) the tokens are held in shared
memory and the steps read again for every few dozen of these.
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
from spartan.inference.gpu.few import MOST_TOKENS

_LAYOUT = struct.Struct("6Qq4i")
_SUMS = 48  # KB of shared memory that a block's warps may add up in
# Of 16×16 numbers, output and input of the eight that lane 4g + t holds.
_GROUP, _FOURTH = torch.arange(32) // 4, torch.arange(32) % 4
_LANE_ROWS = torch.stack([_GROUP // 2 * 4 + _GROUP % 2 + 2 * (i // 4) for i in range(8)], 1)
_LANE_COLUMNS = torch.stack([2 * _FOURTH + i % 2 + 8 * (i // 2 % 2) for i in range(8)], 1)


@dataclass(frozen=True)
class BlockKernel:
    """How blocks are shared out."""

    rows: int  # 16-row tiles of a strip
    warps: int  # of a strip, with few tokens
    unroll: int  # steps that a warp has on their way, with few tokens
    tokens: int = 0  # that are held in shared memory, where there are many; 0 if the layer is for few
    many_warps: int = 8  # that share them
    ahead: int = 4  # steps that each of these has on their way

    def __str__(self) -> str:
        many = f", {self.tokens} tokens held, {self.many_warps} warps, {self.ahead} ahead" if self.tokens else ""
        return f"blocks 16×16, {16 * self.rows} rows, {self.warps} warps, {self.unroll} steps{many}"


@dataclass(frozen=True)
class PackedBlocks:
    """Kept blocks in steps."""

    weight: Tensor  # [steps, rows, 32 lanes, 8]; at least one step, which may go unused
    columns: Tensor  # int32 [steps], in blocks
    starts: Tensor  # int32 [strips + 1], the first step of each strip
    shape: tuple[int, int]  # of the dense weight, outputs × inputs


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
        strip = column = torch.zeros(1, dtype=torch.int64, device=weight.device)
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


def held_bytes(inputs: int, tokens: int) -> int:
    """Shared memory that so many tokens take."""
    return tokens * (-(-inputs // 16) * 16 + 8) * 2


@functools.cache
def _few(
    device: int, half: bool, aligned: bool, act: str, tokens: int, rows: int, warps: int, unroll: int
) -> tuple[nvrtc.Function, int]:
    """The kernel for at most so many tokens, and how many a block takes."""
    tiles = -(-tokens // 16)
    while tiles * rows * warps > _SUMS:
        tiles = -(-tiles // 2)
    macros = nvrtc.macros_of(half, aligned, act) | {"TILES": tiles, "ROWS": rows, "WARPS": warps}
    macros |= {"UNROLL": max(1, unroll // tiles), "EIGHT": int(tokens <= 8)}
    return nvrtc.Function("few_blocks", "block_linear", _LAYOUT, macros, device, 32 * warps), 16 * tiles


@functools.cache
def _many(
    device: int, half: bool, aligned: bool, act: str, inputs: int, rows: int, tokens: int, warps: int, ahead: int
) -> nvrtc.Function:
    macros = nvrtc.macros_of(half, aligned, act) | {"INPUTS": -(-inputs // 16) * 16, "ROWS": rows, "WARPS": warps}
    macros |= {"TOKENS": tokens, "AHEAD": ahead}
    shared = held_bytes(inputs, tokens)
    return nvrtc.Function("resident", "resident_linear", _LAYOUT, macros, device, 32 * warps, shared)


def _prepare(x: Tensor, aligned: bool, buffers: list[Tensor], sizes: list[int], activation: str) -> Prepared:
    strips, device, half = buffers[2].shape[0] - 1, x.device.index, x.dtype == torch.float16
    outputs, rows, warps, unroll, held, many_warps, ahead = sizes
    tokens, inputs = x.shape
    arguments = (0, *(t.data_ptr() for t in buffers), 0, x.stride(0), tokens, inputs, outputs, strips)
    if tokens <= MOST_TOKENS or not held:
        most = 8 if tokens <= 8 else 16 if tokens <= 16 else 32 if tokens <= 32 else 64
        function, each = _few(device, half, aligned, activation, most, rows, warps, unroll)
        return function.prepare((strips, -(-tokens // each)), arguments, 5)
    function = _many(device, half, aligned, activation, inputs, rows, held, many_warps, ahead)
    return function.prepare((-(-tokens // held), 1), arguments, 5)


def run_blocks(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b) with blocks.

    Args:
        x: [..., inputs]; bfloat16 or float16 for the kernels, else the weight is unpacked.
        buffers: weight (of x's type), columns and starts, as in `PackedBlocks`; and the bias, float32, one an output.
        sizes: outputs, and the numbers of `BlockKernel`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    if not nvrtc.runs_on(x):
        weight, columns, starts, bias = buffers
        dense = unpack_blocks(PackedBlocks(weight, columns, starts, (sizes[0], x.shape[-1])))
        return linear_torch(x, dense, bias, activation)
    return nvrtc.run(_prepare, x, buffers, sizes, activation)


# The same as an operator that `torch.compile` takes as it is.
block_linear = torch.library.custom_op("spartan::block_linear", run_blocks, mutates_args=())


@block_linear.register_fake
def _fake(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], sizes[0])


class BlockLinear(nvrtc.CudaLinear):
    """act(x Wᵀ + b) with blocks of 16×16 and larger.

    Example:
        >>> layer = spartan.prune(torch.nn.Linear(64, 96), 0.5, pattern=spartan.Block(16, 16))
        >>> fast = BlockLinear(layer.weight, layer.bias, BlockKernel(1, 4, 8))
        >>> x = torch.randn(3, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    _names = ("values", "columns", "starts", "bias")
    _operator, _run, _prepare = block_linear, staticmethod(run_blocks), staticmethod(_prepare)

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: BlockKernel, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        packed = pack_blocks(weight, kernel.rows)
        self.values, self.columns, self.starts = map(nn.Buffer, (packed.weight, packed.columns, packed.starts))
        self.bias, self.kernel, self._sizes = self.bias.float(), str(kernel), [self.outputs, *astuple(kernel)]
        if kernel.tokens:
            self.most_tokens = 1 << 62
        self._settle()

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        return unpack_blocks(PackedBlocks(self.values, self.columns, self.starts, (self.outputs, self.inputs)))
