"""The linear layers that run on CUDA devices: one multiplies by tiles, one by torch's semi-structured (2:4) tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from spartan.inference.cpu.ops import ACTIVATIONS, linear_torch
from spartan.inference.gpu import ops
from spartan.inference.gpu.ops import DTYPES, LOADS, Launch
from spartan.inference.gpu.tiles import Tiles, Tiling, pack, unpack
from spartan.inference.runtime import InferenceLayer, outside_graphs


class DeviceLinear(InferenceLayer):
    """A sparse linear layer on a CUDA device, which a subclass gives its weight and its kernel."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        super().__init__(activation)
        self.outputs, self.inputs = weight.shape
        self.register_buffer("bias", weight.new_zeros(self.outputs) if bias is None else bias.detach().clone())

    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        """Outputs `first` to `last`, of all that are computed."""
        return self(x)[..., first:last]

    def _checked_input(self, x: Tensor, size: int, dim: int) -> Tensor:
        """The input in the type to compute in: autocast's, as for torch's linear, else its own."""
        x, kind = super()._checked_input(x, size, dim), x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{type(self).__name__} takes float32, bfloat16 and float16, not {x.dtype}; use kernels='dense'"
            )
        return x


class TileLinear(DeviceLinear):
    """act(x Wᵀ + b) with a weight in tiles.

    The tiles follow the model's type; the bias stays float32.

    Example:
        >>> layer = torch.nn.Linear(64, 96)
        >>> _ = spartan.prune(layer, 0.5, pattern=spartan.Block(16, 16))
        >>> fast = TileLinear(layer.weight, layer.bias, Tiling(16, 64, 16, 16), Launch(64, 4, 2, 64, "async"))
        >>> x = torch.randn(5, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    tiles: Tensor
    ins: Tensor
    last: Tensor
    outs: Tensor
    starts: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor | None, tiling: Tiling, launch: Launch, activation: str = "none"
    ) -> None:
        super().__init__(weight, bias, activation)
        packed = pack(weight, tiling, launch.groups(tiling))
        for name in ("ins", "last", "outs", "starts"):
            self.register_buffer(name, getattr(packed, name))
        self.register_buffer("tiles", packed.weight)
        self.bias = self.bias.float()
        self.tiling, self.empties = tiling, packed.empties
        self.kernel = f"tiles {tiling}, {launch}"
        self._tiling = [tiling.outputs, tiling.inputs, tiling.p, tiling.q]
        self._launch = [launch.tokens, launch.warps, launch.stages, LOADS.index(launch.loads)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # model.bfloat16() rounds the bias as it would a dense model's; the kernel still reads float32.
        super()._apply(fn, recurse)
        self.bias = self.bias.float()
        return self

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        buffers = (self.tiles, self.ins, self.last, self.outs, self.starts)
        return unpack(Tiles(*buffers, self.empties, self.tiling, (self.outputs, self.inputs)))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs], float32, bfloat16 or float16."""
        x = self._checked_input(x, self.inputs, -1)
        # Outside a graph the dispatcher would only add to the time of the launch.
        call: Callable[..., Tensor] = ops.tile_linear if torch.compiler.is_compiling() else ops.run
        tiles = self.tiles if self.tiles.dtype == x.dtype else self.tiles.to(x.dtype)
        buffers = (self.ins, self.last, self.outs, self.starts, self.bias)
        return call(x, tiles, *buffers, self.outputs, self.empties, self._tiling, self._launch, self.activation)


def two_of_four(weight: Tensor) -> bool:
    """Whether of every four weights along the input at most two are not zero.

    Example:
        >>> two_of_four(torch.tensor([[1.0, 0, 2, 0]])), two_of_four(torch.tensor([[1.0, 1, 1, 0]]))
        (True, False)
    """
    return weight.shape[1] % 4 == 0 and bool(((weight != 0).reshape(-1, 4).sum(1) <= 2).all())


class SemiStructuredLinear(DeviceLinear):
    """act(x Wᵀ + b) with a 2:4 weight, by torch's own kernels; the dense weight is kept beside it."""

    kernel = "2:4"

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        if not two_of_four(weight):
            raise ValueError("weight: of every four along the input at most two may differ from zero")
        super().__init__(weight, bias, activation)
        self.register_buffer("weight", weight.detach().clone())
        self._packed: Tensor | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._packed = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_packed": None}  # made again from the dense weight

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs]."""
        x = self._checked_input(x, self.inputs, -1)
        if not x.is_cuda or x.dtype != self.weight.dtype:
            return linear_torch(x, self.weight, self.bias, self.activation)
        if self._packed is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls these tensors a prototype
                self._packed = torch.sparse.to_sparse_semi_structured(self.weight)
        y = torch.nn.functional.linear(x, self._packed, self.bias)
        return ACTIVATIONS[self.activation][1](y)
