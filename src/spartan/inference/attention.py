"""Computes `nn.MultiheadAttention` with its projections as layers of their own, so that these may be sparse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spartan.inference.runtime import DenseLinear, DeviceLinear, SparseLinear


def convertible(attention: nn.MultiheadAttention) -> str:
    """Why `Attention` cannot stand in for the module; empty where it can."""
    if not attention._qkv_same_embed_dim:
        return "queries, keys and values of different sizes"
    if attention.bias_k is not None or attention.bias_v is not None or attention.add_zero_attn:
        return "add_bias_kv or add_zero_attn"
    return ""


class Attention(nn.Module):
    """Multi-head attention for inference, with the arguments and results of `nn.MultiheadAttention`.

    The projection of queries, keys and values is one layer (`in_proj`); where the three inputs differ it is called by parts.
    Nested tensors are refused.

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
        reason = convertible(attention)
        if reason:
            raise ValueError(f"nn.MultiheadAttention with {reason} cannot be converted; leave it as it is")
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.batch_first = attention.batch_first
        self.in_proj = DenseLinear(attention.in_proj_weight, attention.in_proj_bias)
        self.out_proj = DenseLinear(attention.out_proj.weight, attention.out_proj.bias)
        self.eval()

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
        if need_weights:
            scores = q @ k.transpose(-2, -1) * (e // heads) ** -0.5
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            return out[0], weights
        return out if self.batch_first else out.transpose(0, 1), weights

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as one to add to the scores [images, heads, queries, keys]; True stands for −∞."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, like)
            if mask.dim() == 3:
                mask = mask.unflatten(0, (-1, self.num_heads))
        if padding is not None:
            padding = _additive(padding if padding.dim() == 2 else padding[None], like)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        return mask


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    return mask.to(like.dtype)
