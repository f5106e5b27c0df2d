"""The linear layers for one to 64 tokens on CUDA devices: single weights, and blocks of 16×16 and larger.

Both read of the weight only what is kept, share the inputs among programs as well as the outputs, and are launched as
torch operators, for `torch.compile` and CUDA graphs. More tokens are correct, and slower than by the kernels for many.

Single weights: rows are ordered by their number of weights and taken `lanes` at a time; a *slot* holds the next weight
of each, and its input's number in 16 bits. Blocks are stored as `tiles.py` says, one group of outputs to a chunk.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spartan.inference.cpu.ops import linear_torch
from spartan.inference.gpu import linear
from spartan.inference.gpu.linear import DeviceLinear
from spartan.inference.gpu.tiles import Tiles, Tiling, pack, unpack

MOST_TOKENS = 64
_FINISH = 256  # outputs of a program that adds up shares


@dataclass(frozen=True)
class ScatterKernel:
    """How single weights are packed and multiplied."""

    lanes: int  # rows of a group
    slots: int  # weights of each row that a program takes at a time
    splits: int  # programs that share a group's weights
    warps: int

    def __str__(self) -> str:
        return f"scatter {self.lanes} rows, {self.slots} slots, {self.splits} splits, {self.warps} warps"


@dataclass(frozen=True)
class SplitTileKernel:
    """A tiling, and how a group's tiles are shared out."""

    tiling: Tiling
    splits: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"split tiles {self.tiling}, {self.splits} splits, {self.warps} warps, {self.stages} stages"


@dataclass(frozen=True)
class Scattered:
    """Single weights in slots."""

    values: Tensor  # [slots, lanes]
    columns: Tensor  # uint16, or int32 where there are more inputs; [slots, lanes]
    rows: Tensor  # int32 [groups · lanes], the output that each row is; `outputs` and more where there is none
    starts: Tensor  # int32 [groups + 1], the first slot of each group
    shape: tuple[int, int]


def pack_scattered(weight: Tensor, lanes: int) -> Scattered:
    """Pack a dense matrix [outputs, inputs], of which the entries that are not zero are stored.

    Example:
        >>> packed = pack_scattered(torch.eye(5), 2)
        >>> packed.starts.tolist(), tuple(packed.values.shape), torch.equal(unpack_scattered(packed), torch.eye(5))
        ([0, 1, 2, 3], (3, 2), True)
    """
    weight = weight.detach()
    (outputs, inputs), device = weight.shape, weight.device
    kept = weight != 0  # NaN counts: it is not zero
    counts = kept.sum(1)
    order = counts.argsort(descending=True, stable=True)
    groups = -(-outputs // lanes)
    sizes = F.pad(counts[order], (0, groups * lanes - outputs)).reshape(groups, lanes)
    starts = F.pad(sizes.amax(1).cumsum(0), (1, 0))
    place = torch.empty_like(order)
    place[order] = torch.arange(outputs, device=device)
    row, column = kept.nonzero(as_tuple=True)
    rank = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]
    at = (starts[place[row] // lanes] + rank) * lanes + place[row] % lanes
    total = max(1, int(starts[-1]))  # one that goes unused, rather than none
    values = weight.new_zeros(total * lanes)
    values[at] = weight[row, column]
    columns = torch.zeros(total * lanes, dtype=torch.int32, device=device)
    columns[at] = column.int()
    rows = torch.cat((order, torch.arange(outputs, groups * lanes, device=device)))
    narrow = columns.to(torch.uint16) if inputs <= 1 << 16 else columns
    slots = (total, lanes)
    return Scattered(values.reshape(slots), narrow.reshape(slots), rows.int(), starts.int(), (outputs, inputs))


def unpack_scattered(packed: Scattered) -> Tensor:
    """The dense matrix that was packed."""
    counts, lanes = packed.starts.diff().long(), packed.values.shape[1]
    group = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    values = packed.values[: len(group)]
    rows = packed.rows.reshape(-1, lanes).long()[group]
    kept = values != 0
    weight = values.new_zeros(packed.shape)
    weight[rows[kept], packed.columns[: len(group)].long()[kept]] = values[kept]
    return weight


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from spartan.inference.gpu import few_kernels
    except ImportError:  # no Triton here
        return None
    return few_kernels


def _outputs(x: Tensor, outputs: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens as rows, where the outputs go, and where the programs write: there, or into sums of their own."""
    rows = x.reshape(-1, x.shape[-1])
    y = x.new_empty(*x.shape[:-1], outputs)
    return rows, y, y if splits == 1 else x.new_empty(splits, len(rows), outputs, dtype=torch.float32)


def _finish(module: ModuleType, into: Tensor, bias: Tensor, y: Tensor, splits: int, activation: str) -> Tensor:
    outputs = y.shape[-1]
    if splits > 1:
        grid = (-(-outputs // _FINISH), into.shape[1])
        module.finish_kernel[grid](into, bias, y, into.shape[1], outputs, splits, activation, _FINISH, num_warps=4)
    return y


def run_scatter(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b) with single weights.

    Args:
        x: [..., inputs]; float32, bfloat16 or float16.
        buffers: values (of x's type), columns, rows and starts, as in `Scattered`; and the bias, float32, one an output.
        sizes: outputs, and lanes, slots, splits and warps of `ScatterKernel`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    values, columns, order, starts, bias = buffers
    outputs, lanes, slots, splits, warps = sizes
    module = _kernels()
    if module is None or not linear.available(x.device):
        dense = unpack_scattered(Scattered(values, columns, order, starts, (outputs, x.shape[-1])))
        return linear_torch(x, dense, bias, activation)
    rows, y, into = _outputs(x, outputs, splits)
    tokens = len(rows)
    if tokens == 0 or outputs == 0:
        return y
    tile = min(16, 1 << (tokens - 1).bit_length())
    # Of several tokens, one input's numbers must lie together: each weight reads them all.
    turned = rows if tokens == 1 else rows.t().contiguous()
    strides = (rows.stride(0), rows.stride(1)) if tokens == 1 else (1, tokens)
    grid = (starts.numel() - 1, splits, -(-tokens // tile))
    slots = max(1, slots // tile)
    with linear.on(x.device.index if x.is_cuda else -1):
        module.scatter_kernel[grid](
            *(turned, values, columns, order, starts, bias, into, tokens, outputs, *strides),
            *(tile, lanes, slots, splits, activation),
            num_warps=warps,
        )
        return _finish(module, into, bias, y, splits, activation)


def run_split_tiles(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b) with tiles.

    Args:
        x: [..., inputs]; float32, bfloat16 or float16.
        buffers: weight (of x's type), ins, last, outs and starts, as in `Tiles`; and the bias, float32, one an output.
        sizes: outputs, empties, the four numbers of `Tiling`; and splits, warps and stages of `SplitTileKernel`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    weight, ins, last, outs, starts, bias = buffers
    outputs, empties, tile_n, tile_k, p, q, splits, warps, stages = sizes
    inputs, module = x.shape[-1], _kernels()
    if module is None or not linear.available(x.device):
        dense = unpack(Tiles(weight, ins, last, outs, starts, empties, Tiling(*sizes[2:6]), (outputs, inputs)))
        return linear_torch(x, dense, bias, activation)
    rows, y, into = _outputs(x, outputs, splits)
    tokens = len(rows)
    if tokens == 0 or outputs == 0:
        return y
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    tile = min(64, max(16, 1 << (tokens - 1).bit_length()))  # the tensor cores take 16 at least
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    with linear.on(x.device.index if x.is_cuda else -1):
        module.split_tile_kernel[(outs.shape[0], splits, -(-tokens // tile))](
            *(rows, weight, bias, ins, outs, starts, into, tokens, inputs, outputs, rows.stride(0)),
            *(outs.shape[0] - empties, tile, tile_n, tile_k, p, q, splits, activation),
            *("tf32x3" if exact else "tf32", linear.interpreted()),
            num_warps=warps,
            num_stages=stages,
        )
        return _finish(module, into, bias, y, splits, activation)


# The same as operators that `torch.compile` takes as they are.
scatter_linear = torch.library.custom_op("spartan::scatter_linear", run_scatter, mutates_args=())
split_tile_linear = torch.library.custom_op("spartan::split_tile_linear", run_split_tiles, mutates_args=())


@scatter_linear.register_fake
@split_tile_linear.register_fake
def _fake(x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], sizes[0])


class FewTokensLinear(DeviceLinear):
    """What the two layers share: `values` follow the model's type, the bias stays float32."""

    most_tokens = MOST_TOKENS
    values: Tensor
    _sizes: list[int]
    _operator: Any
    _run: Callable[..., Tensor]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.bias = self.bias.float()
        return self

    def _call(self, x: Tensor) -> Tensor:
        # Outside a graph the dispatcher would only add to the time of the launch.
        call = self._operator if torch.compiler.is_compiling() else type(self)._run
        out: Tensor = call(x, self._operands(x.dtype), self._sizes, self.activation)
        return out


class ScatterLinear(FewTokensLinear):
    """act(x Wᵀ + b) with single weights.

    Example:
        >>> layer = spartan.prune(torch.nn.Linear(64, 96), 0.9)
        >>> fast = ScatterLinear(layer.weight, layer.bias, ScatterKernel(16, 16, 2, 4))
        >>> x = torch.randn(3, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    _names = ("values", "columns", "rows", "starts", "bias")
    _operator, _run = scatter_linear, staticmethod(run_scatter)

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: ScatterKernel, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        packed = pack_scattered(weight, kernel.lanes)
        self.values, self.columns = nn.Buffer(packed.values), nn.Buffer(packed.columns)
        self.rows, self.starts = nn.Buffer(packed.rows), nn.Buffer(packed.starts)
        self.bias, self.kernel = self.bias.float(), str(kernel)
        self._sizes = [self.outputs, kernel.lanes, kernel.slots, kernel.splits, kernel.warps]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        return unpack_scattered(
            Scattered(self.values, self.columns, self.rows, self.starts, (self.outputs, self.inputs))
        )


class SplitTileLinear(FewTokensLinear):
    """act(x Wᵀ + b) with a weight in tiles, one to a group of outputs and a share of its inputs.

    Example:
        >>> layer = spartan.prune(torch.nn.Linear(64, 96), 0.5, pattern=spartan.Block(16, 16))
        >>> fast = SplitTileLinear(layer.weight, layer.bias, SplitTileKernel(Tiling(16, 64, 16, 16), 2, 4, 2))
        >>> x = torch.randn(3, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    _names = ("values", "ins", "last", "outs", "starts", "bias")
    _operator, _run = split_tile_linear, staticmethod(run_split_tiles)

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: SplitTileKernel, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        packed, tiling = pack(weight, kernel.tiling, span=1), kernel.tiling
        self.values, self.ins, self.last = nn.Buffer(packed.weight), nn.Buffer(packed.ins), nn.Buffer(packed.last)
        self.outs, self.starts = nn.Buffer(packed.outs), nn.Buffer(packed.starts)
        self.bias, self.kernel, self.tiling, self.empties = self.bias.float(), str(kernel), tiling, packed.empties
        shape = [tiling.outputs, tiling.inputs, tiling.p, tiling.q]
        self._sizes = [self.outputs, self.empties, *shape, kernel.splits, kernel.warps, kernel.stages]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        buffers = (self.values, self.ins, self.last, self.outs, self.starts)
        return unpack(Tiles(*buffers, self.empties, self.tiling, (self.outputs, self.inputs)))
