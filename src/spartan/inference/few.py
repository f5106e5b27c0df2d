"""The layers that serve one token or a few: a CPU kernel of their own, and a choice of kernels by the number of tokens."""

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spartan.inference.cpu import ops
from spartan.inference.cpu.library import library
from spartan.inference.cpu.walk import MOST_TOKENS, WalkMatrix, pack_walk, unpack_walk, walk
from spartan.inference.runtime import InferenceLayer, PackedLayer, outside_graphs


class WalkLinear(PackedLayer):
    """act(x Wᵀ + b) with single weights, for one token or a few, where the time is that of reading the weights.

    `values` follow the model's type, float32 or bfloat16; what they are is in `cpu/walk.py`.
    """

    kernel = "walk 16"
    most_tokens = MOST_TOKENS

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        super().__init__(activation)
        packed = pack_walk(weight)
        self.starts, self.rows = nn.Buffer(packed.starts), nn.Buffer(packed.rows)
        self.windows, self.places = nn.Buffer(packed.windows), nn.Buffer(packed.places)
        self.values = nn.Buffer(packed.values)
        self.outputs, self.inputs = packed.outputs, packed.inputs
        given = torch.zeros(self.outputs) if bias is None else bias.detach().float().cpu()
        self.bias = nn.Buffer(F.pad(given, (0, packed.rows.numel() - self.outputs))[packed.rows.long()])

    def packed(self) -> WalkMatrix:
        """The weight as the kernel reads it."""
        return WalkMatrix(self.starts, self.rows, self.windows, self.places, self.values, self.outputs, self.inputs)

    @property
    def weight(self) -> Tensor:
        """The dense weight, for code that asks a layer for it; made on every access."""
        return unpack_walk(self.packed())

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs], float32 or bfloat16."""
        x = self._checked_input(x, self.inputs, -1)
        if library() is None:  # made where there was one
            bias = torch.zeros_like(self.bias).index_copy_(0, self.rows.long(), self.bias)
            return ops.linear_torch(x, self.weight, bias, self.activation)
        return walk(x, self.packed(), self.bias, self.activation)

    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        """Outputs `first` to `last`, of all that are computed."""
        return self(x)[..., first:last]


class ByTokens(InferenceLayer):
    """One layer on several kernels: each call takes the one that was measured to be best for about as many tokens.

    Args:
        layers: the layer on each kernel, with the number of tokens it was measured at, in rising order. A kernel is used
            up to the geometric mean of its number and the next, unless it is made for fewer tokens (`most_tokens`).

    Example:
        >>> from spartan.inference.runtime import DenseLinear, SparseLinear
        >>> layer = spartan.prune(torch.nn.Linear(64, 32), 0.9)
        >>> few = SparseLinear(layer.weight, layer.bias, ("rows", 8, 1))
        >>> both = ByTokens([(1, few), (256, DenseLinear(layer.weight, layer.bias))])
        >>> both.kernel
        'rows 8×1 up to 16 tokens, dense'
        >>> x = torch.randn(17, 64)
        >>> bool(torch.allclose(both(x[:3]), both(x)[:3], atol=1e-5))
        True
    """

    def __init__(self, layers: Sequence[tuple[int, InferenceLayer]]) -> None:
        super().__init__(layers[0][1].activation)
        self.layers = nn.ModuleList(layer for _, layer in layers)
        pairs = itertools.pairwise(layers)
        middles = [(math.isqrt(low * high), layer) for (low, layer), (high, _) in pairs]
        self.limits = [min(middle, getattr(layer, "most_tokens", middle)) for middle, layer in middles]
        names = [layer.kernel for _, layer in layers]
        parts = [f"{name} up to {limit} tokens" for name, limit in zip(names, self.limits, strict=False)]
        self.kernel = ", ".join([*parts, names[-1]])
        self.why = "; ".join(layer.why for _, layer in layers)

    def layer_for(self, x: Tensor) -> InferenceLayer:
        """The layer that takes an input of this shape."""
        tokens = math.prod(x.shape[:-1])
        for layer, limit in zip(self.layers, self.limits, strict=False):
            if tokens <= limit:
                return layer  # type: ignore[return-value]
        return self.layers[-1]  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:
        """The dense weight, for code that asks a layer for it."""
        return self.layers[-1].weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs]."""
        out: Tensor = self.layer_for(x)(x)
        return out

    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        """Outputs `first` to `last` alone."""
        out: Tensor = self.layer_for(x).part(x, first, last)  # type: ignore[operator]
        return out
