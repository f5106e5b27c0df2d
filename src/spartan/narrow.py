"""Makes modules fit narrower tensors: the sizes that they keep beside them, and attention with fewer heads.

A narrowed model is described by the shapes of its tensors and by sizes that these do not tell: numbers of heads and of
groups, by module and attribute. Only attributes that are known to be such sizes are ever set, and only to less.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

Shapes = Mapping[str, tuple[int, ...]]
Sizes = Mapping[str, Mapping[str, int]]  # by module and attribute

# How modules of torch, timm, transformers and others call the number of heads, and the width of all heads together.
HEADS = {"num_heads", "n_heads", "n_head", "heads", "nheads", "num_attention_heads", "num_query_heads"}
HEADS |= {"num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"}
WIDTHS = {"attn_dim", "all_head_size", "split_size", "inner_dim", "attention_dim", "qkv_dim", "kv_dim"}
# An attribute of models that were made narrower: only these are saved as a part of what they are named after.
_MARK = "_spartan_narrowed"
_TOLD_BY_TENSORS = {"num_channels", "num_features"}  # where there are any
ATTRIBUTES = HEADS | WIDTHS | _TOLD_BY_TENSORS | {"groups", "num_groups"}


class NarrowAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with fewer heads than its width has room for, which torch's own cannot be.

    Parameters, arguments and results are those of `nn.MultiheadAttention`; `in_proj_weight` has fewer rows and
    `out_proj.weight` fewer columns. Weights that it returns averaged are averages over the heads that are left.
    """

    @staticmethod
    def why_not(module: nn.MultiheadAttention, inner: int) -> str | None:
        """Why an attention layer cannot have so many channels inside; None if it can."""
        if module.bias_k is not None or module.add_zero_attn:
            return "nn.MultiheadAttention with add_bias_kv or add_zero_attn cannot have fewer heads"
        if inner % module.head_dim:
            return f"nn.MultiheadAttention cannot have {inner} channels in heads of {module.head_dim}"
        return None

    @classmethod
    def take_over(cls, module: nn.MultiheadAttention) -> None:
        """Make an attention layer whose tensors have become narrower one of these, in place."""
        inner = module.out_proj.weight.shape[1]
        if why := cls.why_not(module, inner):
            raise ValueError(why)
        module.num_heads = inner // module.head_dim
        module._qkv_same_embed_dim = False  # torch's fused layers ask for this and count on the full width
        module.__class__ = cls

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As `nn.MultiheadAttention`; the causal mask that `is_causal` hints at has to be given, as there."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint: attn_mask has to be given too")
        batched = query.dim() == 3
        inputs = [x if batched else x.unsqueeze(0) for x in (query, key, value)]
        if batched and not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        mask = self._mask(key_padding_mask, attn_mask, q)
        dropout = self.dropout if self.training else 0.0
        seen = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            seen = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = seen @ v
            seen = seen.mean(1) if average_attn_weights else seen
            seen = seen if batched else seen.squeeze(0)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), seen
        return out if self.batch_first else out.transpose(0, 1), seen

    def _mask(self, padding: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as one to add to the scores, [B or 1, H or 1, queries or 1, keys]."""
        found = None
        if mask is not None:
            own = mask if mask.dim() == 2 else mask.unflatten(0, (-1, self.num_heads))
            found = _additive(own if own.dim() == 4 else own[None, None], q)
        if padding is not None:
            padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
            keys = _additive(padding[:, None, None], q)
            found = keys if found is None else found + keys
        return found


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def is_narrowed(model: nn.Module) -> bool:
    """Whether a model was made narrower, so that it has not the sizes that its class gives it."""
    return bool(getattr(model, _MARK, False))


@torch.no_grad()
def narrow(model: nn.Module, shapes: Shapes, sizes: Sizes) -> None:
    """Give a model's tensors other shapes, in place, with no values; `why_not_narrower` has nothing against these."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.shape != shapes[name]:
            tensor.grad, tensor.data = None, tensor.new_empty(shapes[name])
    fit_sizes(model, sizes)


def fit_sizes(model: nn.Module, sizes: Sizes) -> None:
    """Set what modules say about their sizes to what their tensors have, and for the rest to `sizes`."""
    for path, module in model.named_modules():
        for attribute, size in sizes.get(path, {}).items():
            setattr(module, attribute, size)
        _fit(module)
    setattr(model, _MARK, True)


def _fit(module: nn.Module) -> None:
    weight = module._parameters.get("weight")
    if type(module) is nn.MultiheadAttention:
        if module.out_proj.weight.shape[1] != module.embed_dim:
            NarrowAttention.take_over(module)
    elif isinstance(module, _NormBase):
        statistics = weight if weight is not None else module._buffers.get("running_mean")
        if statistics is not None:
            module.num_features = len(statistics)
    elif weight is None:
        return
    elif isinstance(module, _ConvNd):
        outputs, inputs = weight.shape[:2] if not module.transposed else weight.shape[1::-1]
        sides = (outputs, inputs * module.groups) if not module.transposed else (outputs * module.groups, inputs)
        module.out_channels, module.in_channels = sides
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = len(weight)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(weight)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.num_embeddings, module.embedding_dim = weight.shape
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and weight.ndim == 2:  # transformers'
        module.nx, module.nf = weight.shape  # type: ignore[assignment]


def sizes_beside(model: nn.Module, whole: nn.Module) -> dict[str, dict[str, int]]:
    """The sizes of a narrowed model that its tensors do not tell: those that differ from the whole model's."""
    others = dict(whole.named_modules())
    found: dict[str, dict[str, int]] = {}
    for path, module in model.named_modules():
        mine, theirs = vars(module), vars(others.get(path, module))
        bare = not any(x is not None for x in (*module._parameters.values(), *module._buffers.values()))
        for name in sorted(ATTRIBUTES if bare else ATTRIBUTES - _TOLD_BY_TENSORS):
            if type(mine.get(name)) is int and type(theirs.get(name)) is int and mine[name] != theirs[name]:
                found.setdefault(path, {})[name] = mine[name]
    return found


def why_not_narrower(model: nn.Module, shapes: Shapes, sizes: Any) -> str | None:
    """Why tensors of these shapes and these sizes do not make a model narrower; None if they do."""
    state = model.state_dict()
    if state.keys() != shapes.keys():
        return "has other tensors"
    for name, tensor in state.items():
        shape = shapes[name]
        if len(shape) != tensor.ndim or not all(
            min(old, 1) <= n <= old for n, old in zip(shape, tensor.shape, strict=True)
        ):
            return f"has {name} of shape {tuple(tensor.shape)}, of which {tuple(shape)} is no part"
    modules = dict(model.named_modules())
    for path, module in modules.items():
        inner = shapes.get(f"{path}.out_proj.weight".lstrip("."), (0, 0))[1]
        narrower = type(module) is nn.MultiheadAttention and inner != module.embed_dim
        if narrower and (why := NarrowAttention.why_not(module, inner)):
            return f"has {path}: {why}"
    if not isinstance(sizes, Mapping):
        return "is said to have sizes that are none"
    for path, own in sizes.items():
        if path not in modules or not isinstance(own, Mapping):
            return f"has no module {ascii(path)[:80]} to have other sizes"
        for name, size in own.items():
            before = vars(modules[path]).get(name)
            if name not in ATTRIBUTES or type(before) is not int:
                return f"has no size {ascii(name)[:40]} in {path}"
            if type(size) is not int or not 1 <= size <= before:
                return f"has {name} {before} in {path}, of which {ascii(size)[:40]} is no part"
    return None
