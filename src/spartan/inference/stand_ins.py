"""The modules that stand in for torch's in an accelerated model: attention, max pooling, convolutions without overlap."""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from spartan.inference.cpu import ops
from spartan.inference.cpu.library import library
from spartan.inference.gpu.linear import DeviceLinear
from spartan.inference.runtime import DenseConv2d, DenseLinear, SparseLinear, refuse_gradients


class Attention(nn.Module):
    """Multi-head attention for inference, with the arguments and results of `nn.MultiheadAttention`.

    Its projections are layers of their own, so that these may be sparse. That of queries, keys and values is one layer
    (`in_proj`); where the three inputs differ it is called by parts. Nested tensors are refused.

    Example:
        >>> plain = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
        >>> x = torch.randn(2, 7, 32)
        >>> with torch.no_grad():
        ...     same = torch.allclose(Attention(plain)(x, x, x)[0], plain(x, x, x)[0], atol=1e-6)
        >>> same
        True
    """

    in_proj: DenseLinear | SparseLinear | DeviceLinear
    out_proj: DenseLinear | SparseLinear | DeviceLinear
    # Read by nn.TransformerEncoderLayer, which then leaves its own fused path.
    in_proj_bias = None
    _qkv_same_embed_dim = True

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        if reason := self.why_not(attention):
            raise ValueError(f"nn.MultiheadAttention with {reason} cannot be converted; leave it as it is")
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.batch_first = attention.batch_first
        self.in_proj = DenseLinear(attention.in_proj_weight, attention.in_proj_bias)
        self.out_proj = DenseLinear(attention.out_proj.weight, attention.out_proj.bias)
        self.eval()

    @staticmethod
    def why_not(attention: nn.MultiheadAttention) -> str:
        """Why this cannot stand in for the module; empty where it can."""
        if not attention._qkv_same_embed_dim:
            return "queries, keys and values of different sizes"
        kinds = attention.bias_k is not None or attention.bias_v is not None or attention.add_zero_attn
        return "add_bias_kv or add_zero_attn" if kinds else ""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The attended values, and the attention weights where asked for; `is_causal` is a hint about `attn_mask`."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "nested tensors are not supported by an accelerated attention; pad them, or use kernels='dense'"
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        same = query is key and key is value
        inputs = [query] if same else [query, key, value]
        if not batched:
            inputs = [t[None] for t in inputs]
        elif not self.batch_first:
            inputs = [t.transpose(0, 1) for t in inputs]
        e, heads = self.embed_dim, self.num_heads
        if same:
            projected = self.in_proj(inputs[0]).chunk(3, -1)
        else:
            projected = tuple(self.in_proj.part(t, i * e, (i + 1) * e) for i, t in enumerate(inputs))
        q, k, v = (t.unflatten(-1, (heads, e // heads)).transpose(1, 2) for t in projected)
        mask = self._mask(attn_mask, key_padding_mask, q)
        weights = None
        if mask is None and not need_weights and ops.attends(q, k, v):
            attended = ops.attend(q, k, v)
        elif need_weights:
            scores = q @ k.transpose(-2, -1) * (e // heads) ** -0.5
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            attended = (weights @ v).transpose(1, 2).flatten(2)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        out = self.out_proj(attended)
        if not batched:
            return out[0], weights
        return out if self.batch_first else out.transpose(0, 1), weights

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as one to add to the scores [images, heads, queries, keys]; True stands for −∞."""
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        if padding is not None:
            padding = torch.atleast_2d(padding)[:, None, None, :]
        masks = [_additive(mask, like) for mask in (attn_mask, padding) if mask is not None]
        return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    return mask.to(like.dtype)


class MaxPool(nn.Module):
    """`nn.MaxPool2d` by the maximum of a window's rows, then of their columns: exact, NaN included.

    torch's own was a quarter of an accelerated ResNet-50's time on one CPU core. Where the compiled kernels are not there,
    the rows and columns are shifted ones.

    Example:
        >>> plain = torch.nn.MaxPool2d(3, 2, 1)
        >>> x = torch.randn(2, 4, 9, 12)
        >>> bool(torch.equal(MaxPool(plain)(x), plain(x)))
        True
    """

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = _pair(pool.kernel_size), _pair(pool.stride), _pair(pool.padding)

    @staticmethod
    def suits(pool: nn.Module) -> TypeGuard[nn.MaxPool2d]:
        """Whether this can stand in: values only, no dilation, sizes rounded down, every window with a pixel in it."""
        if type(pool) is not nn.MaxPool2d or pool._forward_hooks or pool._forward_pre_hooks:
            return False
        inside = all(2 * p <= k for p, k in zip(_pair(pool.padding), _pair(pool.kernel_size), strict=True))
        return inside and not pool.return_indices and not pool.ceil_mode and _pair(pool.dilation) == (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The largest of every window of x [..., height, width]."""
        refuse_gradients(x)
        for dim in (-2, -1):
            n, k, p = x.shape[dim], self.kernel[dim], self.padding[dim]
            if n + 2 * p < k:
                raise ValueError(f"max pooling: dimension {dim} of {tuple(x.shape)} is smaller than the window of {k}")
        plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype in ops.DTYPES
        if library() is None or not plain or self.kernel[1] > ops.MOST_POOLED:
            return self._shifted(x)
        images = x if x.dim() == 4 else x[None]
        y = ops.max_pool(images.contiguous(), self.kernel, self.stride, self.padding)
        return y if x.dim() == 4 else y[0]

    def _shifted(self, x: Tensor) -> Tensor:
        for dim in (-2, -1):
            n, k, s, p = x.shape[dim], self.kernel[dim], self.stride[dim], self.padding[dim]
            size = (n + 2 * p - k) // s + 1
            shape = list(x.shape)
            shape[dim] = size
            out = x.new_full(shape, -torch.inf)
            for i in range(k):  # output j sees input j·s + i − p, where there is one
                low = max(0, -((i - p) // s))
                high = min(size, (n - 1 - i + p) // s + 1)
                if high > low:
                    seen = x.narrow(dim, low * s + i - p, (high - low - 1) * s + 1)
                    seen = seen[..., ::s, :] if dim == -2 else seen[..., ::s]
                    part = out.narrow(dim, low, high - low)
                    torch.maximum(part, seen, out=part)
            x = out
        return x

    def extra_repr(self) -> str:
        """The window."""
        return f"kernel={self.kernel}, stride={self.stride}, padding={self.padding}"


class PatchConv(nn.Module):
    """A convolution whose windows do not overlap, as a product with a row for each window.

    Its output is that of `linear` on patches [images, windows, channels · height · width]. The first layer of a vision
    transformer is one. As a convolution of three channels it is a poor fit for tensor cores: on an H200, in bfloat16,
    it takes a tenth of the whole dense ViT-B/16 (0.58 ms for 64 images); as a product of patches 0.06 ms.

    Example:
        >>> from spartan.inference.fuse import plain_conv
        >>> conv = torch.nn.Conv2d(3, 8, 4, stride=4)
        >>> x = torch.randn(2, 3, 17, 16)
        >>> same = PatchConv(DenseConv2d(conv.weight, conv.bias, plain_conv(conv)))
        >>> bool(torch.allclose(same(x), conv(x), atol=1e-6))
        True
    """

    linear: DenseLinear | DeviceLinear

    def __init__(self, conv: DenseConv2d) -> None:
        super().__init__()
        self.window = conv.conv.kernel
        self.linear = DenseLinear(conv.weight.flatten(1), conv.bias)
        self.eval()

    @staticmethod
    def suits(conv: DenseConv2d) -> bool:
        """Whether this can stand in: the stride is the window, and there is nothing else to do."""
        c = conv.conv
        plain = c.groups == 1 and c.padding == (0, 0) and c.dilation == (1, 1) and conv.activation == "none"
        return plain and c.stride == c.kernel != (1, 1)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output for x [images, channels, height, width] or [channels, height, width]."""
        h, w = self.window
        *images, channels, height, width = x.shape
        down, across = height // h, width // w  # what is left at the edges is not seen, as in the convolution
        x = x[..., : down * h, : across * w].reshape(-1, channels, down, h, across, w)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(len(x), down * across, channels * h * w)
        y = self.linear(x).transpose(1, 2)
        y = y.reshape(*images, y.shape[1], down, across)
        return y if residual is None else y + residual
