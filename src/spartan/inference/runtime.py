"""The layers of an accelerated model, for inference: each adds bias, activation and (convolutions) a residual in one call.

`DenseLinear` and `DenseConv2d` run torch's dense products; `SparseLinear` and `SparseConv2d` run the CPU kernels on a
packed weight; `few.py` has the layers for few tokens, `spartan.inference.gpu` those for CUDA devices. They hold buffers,
not parameters, and refuse to train or to be differentiated through.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from spartan.inference.cpu import ops
from spartan.inference.cpu.library import library
from spartan.inference.cpu.ops import ACTIVATIONS, DTYPES, Conv, PackedMatrix, pack, unpack

F = TypeVar("F", bound=Callable[..., Any])
# How a weight is packed: ("rows", h, g) and ("lanes", h, 1) are the kernels of kernels.cpp, ("walk", 16, 1) that of walk.h.
Kernel = tuple[str, int, int]


# torch.compile leaves the kernels' calls as they are and compiles around them.
outside_graphs: Callable[[F], F] = torch.compiler.disable(recursive=True)


def refuse_gradients(x: Tensor) -> None:
    """Raise RuntimeError for an input whose gradient somebody wants."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "an accelerated model has no gradients: run it under torch.no_grad() or torch.inference_mode(), "
            "or use the model it was made from"
        )


class InferenceLayer(nn.Module):
    """A layer that only infers; `kernel` names what runs and `why` says how that was chosen."""

    kernel: str = "dense"
    why: str = ""

    def __init__(self, activation: str) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}; one of {', '.join(ACTIVATIONS)} is needed")
        self.activation = activation
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Only `eval()`: the weight is packed for inference."""
        if mode:
            raise RuntimeError(
                "an accelerated model cannot be trained: train the model it was made from, and accelerate that again"
            )
        return super().train(False)

    def _checked_input(self, x: Tensor, size: int, dim: int) -> Tensor:
        """The input, contiguous, or an error that says what is wrong with it."""
        refuse_gradients(x)
        if x.shape[dim] != size:
            raise ValueError(f"{type(self).__name__}: input of shape {tuple(x.shape)}; dimension {dim} must be {size}")
        return x

    def extra_repr(self) -> str:
        """Kernel and activation."""
        return f"kernel={self.kernel}, activation={self.activation}"


class DenseLayer(InferenceLayer):
    """A weight and a bias for torch's own products, where no sparse kernel wins; a bias of zeros would take its time."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        super().__init__(activation)
        self.weight = nn.Buffer(weight.detach().clone())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @property
    def zeros(self) -> float:
        """The share of zeros in the weight."""
        return float((self.weight == 0).float().mean())


class DenseLinear(DenseLayer):
    """act(x Wᵀ + b) by torch."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs]."""
        return self.part(x, 0, len(self.weight))

    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        """Outputs `first` to `last` alone."""
        x = self._checked_input(x, self.weight.shape[1], -1)
        bias = None if self.bias is None else self.bias[first:last]
        return ops.linear_torch(x, self.weight[first:last], bias, self.activation)


class DenseConv2d(DenseLayer):
    """act(conv(x) + b + residual) by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, conv: Conv, activation: str = "none") -> None:
        super().__init__(weight, bias, activation)
        self.conv = conv

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output for x [images, channels, height, width]."""
        x = self._checked_input(x, self.conv.channels, -3)
        return ops.conv_torch(x, self.conv, self.weight, self.bias, self.activation, residual)


class PackedLayer(InferenceLayer):
    """A weight packed for the CPU's kernels: `values` in the type that they read, `bias` in float32."""

    values: Tensor
    bias: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # model.bfloat16() rounds the weights as it would a dense model's; the kernels still read what they can.
        super()._apply(fn, recurse)
        self.bias = self.bias.float()
        if self.values.dtype != torch.bfloat16 or not self.reads_bfloat16():
            self.values = self.values.float()
        return self

    def reads_bfloat16(self) -> bool:
        """Whether the kernel takes the weight in bfloat16."""
        return True

    def _checked_input(self, x: Tensor, size: int, dim: int) -> Tensor:
        x = super()._checked_input(x, size, dim)
        if x.device.type != "cpu" or self.values.device.type != "cpu":
            raise RuntimeError(f"{type(self).__name__} runs on the CPU; the input is on {x.device}")
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{type(self).__name__} takes float32 and bfloat16, not {x.dtype}; load with kernels='dense'"
            )
        return x.contiguous()


class SparseLayer(PackedLayer):
    """A weight in groups of rows and runs of columns: as in `PackedMatrix`."""

    starts: Tensor
    runs: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: Kernel, activation: str = "none") -> None:
        super().__init__(activation)
        self.kind, h, g = kernel
        half = weight.dtype == torch.bfloat16 and self.reads_bfloat16()
        packed, self._shape = pack(weight.reshape(len(weight), -1), h, g, half), weight.shape
        padded = torch.zeros((packed.starts.numel() - 1) * h)
        if bias is not None:
            padded[: packed.outputs] = bias.detach().float()
        buffers = {"starts": packed.starts, "runs": packed.runs, "values": packed.values, "bias": padded}
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.outputs, self.inputs, self.kernel = packed.outputs, packed.inputs, name_of(kernel)
        self._dense: Tensor | None = None
        self._places: Any = None  # where the kernel finds its inputs, from the first call on

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._dense = self._places = None
        return self

    def reads_bfloat16(self) -> bool:
        """Whether the kernel takes the weight in bfloat16."""
        return self.kind == "rows"

    def packed(self) -> PackedMatrix:
        """The weight as the kernels read it."""
        return PackedMatrix(self.starts, self.runs, self.values, self.outputs, self.inputs)

    @property
    def weight(self) -> Tensor:
        """The dense weight, for code that asks a layer for it: made anew, unless without kernels every call needs it."""
        weight = unpack(self.packed()).reshape(self._shape) if self._dense is None else self._dense
        self._dense = weight if library() is None else None
        return weight


class SparseLinear(SparseLayer):
    """act(x Wᵀ + b) with a packed weight.

    Example:
        >>> layer = torch.nn.Linear(64, 32)
        >>> _ = spartan.prune(layer, 0.9)
        >>> fast = SparseLinear(layer.weight, layer.bias, ("lanes", 1, 1))
        >>> x = torch.randn(5, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs], float32 or bfloat16."""
        return self.part(x, 0, self.outputs)

    @outside_graphs
    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        """Outputs `first` to `last` alone; both must be multiples of the kernel's rows a group, or the end."""
        x = self._checked_input(x, self.inputs, -1)
        packed, bias = self.packed(), self.bias
        if library() is None:
            return ops.linear_torch(x, self.weight[first:last], bias[first:last], self.activation)
        if (first, last) != (0, self.outputs):
            h = packed.h
            starts = packed.starts[first // h : -(-last // h) + 1]
            packed, bias = PackedMatrix(starts, packed.runs, packed.values, last - first, packed.inputs), bias[first:]
        if self._places is None:
            self._places = ops.linear_places(self.kind, packed)
        return ops.linear(self.kind, x, packed, self._places, bias, self.activation)


class SparseConv2d(SparseLayer):
    """act(conv(x) + b + residual) with a packed weight, the kernel flattened to out × in·kh·kw."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, conv: Conv, kernel: Kernel, activation: str = "none"
    ) -> None:
        if kernel[0] != "lanes" or (conv.groups > 1 and (len(weight) // conv.groups) % kernel[1]):
            raise ValueError(
                f"kernel={kernel!r}: a convolution takes ('lanes', h, 1), h dividing the outputs of a group"
            )
        super().__init__(weight, bias, kernel, activation)
        self.conv = conv

    @outside_graphs
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output for x [images, channels, height, width] or one image without the first dimension."""
        x = self._checked_input(x, self.conv.channels, -3)
        if x.dim() == 3:
            return self(x[None], None if residual is None else residual[None])[0]
        if library() is None:
            return ops.conv_torch(x, self.conv, self.weight, self.bias, self.activation, residual)
        key = (x.shape[2], x.shape[3], x.dtype)
        known = self._places  # read once: another thread may put its own here
        if known is None or known[0] != key:
            known = self._places = key, ops.lay_out_conv(self.conv, self.packed(), *key)
        layout = known[1]
        if residual is not None:
            residual = residual.to(x.dtype).expand(x.shape[0], self.outputs, *layout.out_size).contiguous()
        return ops.conv2d(x, self.packed(), layout, self.bias, self.activation, residual)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call a model with, from example inputs: a tensor, a sequence of arguments, or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, list | tuple) else ((inputs,), {})


def name_of(kernel: Kernel) -> str:
    """A kernel in words.

    Example:
        >>> name_of(("rows", 16, 8)), name_of(("lanes", 1, 1))
        ('rows 16×8', 'lanes 1')
    """
    kind, h, g = kernel
    return f"{kind} {h}×{g}" if kind == "rows" else f"{kind} {h}"
