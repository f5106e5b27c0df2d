"""Count the FLOPs of a model, dense and sparse, and the multiply-accumulates behind each parameter.

The convention is that of ptflops' PyTorch backend, which the paper used: a multiply-accumulate is two FLOPs, and so is
each bias added and each element that an activation, norm, pooling or softmax handles (four in an affine batch, group or
instance norm); `torch.add` and `torch.mul` count, the operators `+` and `*` do not. ptflops 0.7.5 differs in that

- it counts activations and poolings that are modules twice, since it also counts the function underneath, and likewise
  the products of attention that returns its weights. So it has 8.265 GFLOPs for ResNet-50 and 35.212 for ViT-B/16. With
  each call counted once, as here (and there by `count_functional: False`), that is 8.244, the paper's 8.24, and 35.198.
  The paper's 35.19 matches the latter without the LayerNorms (35.190), which ptflops counts only since 2023;
- it takes each projection of an attention layer to be square and biased, whatever `kdim`, `vdim` and `bias` say;
- it sees neither `@` nor, outside timm's attention, `scaled_dot_product_attention`;
- it adds the few elementwise operations of recurrent cells, which are left out here.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spartan.problem.targets import name_cleaner, unwrap
from spartan.wording import aligned

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs per example of one module, or of one function called outside leaf modules."""

    name: str
    kind: str
    dense: int
    sparse: int


@dataclass(frozen=True)
class FlopCount:
    """FLOPs per example, layer by layer in the order of the first call. `print` shows a table."""

    layers: tuple[LayerFlops, ...]

    @property
    def dense(self) -> int:
        """FLOPs of the model with all its weights."""
        return sum(layer.dense for layer in self.layers)

    @property
    def sparse(self) -> int:
        """FLOPs of the model when zero weights cost nothing."""
        return sum(layer.sparse for layer in self.layers)

    @property
    def ratio(self) -> float:
        """The sparse count as a fraction of the dense one."""
        return self.sparse / self.dense if self.dense else 1.0

    def __str__(self) -> str:
        lines = [*self.layers, LayerFlops("total", "", self.dense, self.sparse)]
        cells = [(line.name or "(model)", line.kind, f"{line.dense:,}", f"{line.sparse:,}") for line in lines]
        return "\n".join(aligned([("layer", "kind", "dense FLOPs", "sparse FLOPs"), *cells], left=2))


def flops(model: nn.Module, example_inputs: Inputs) -> FlopCount:
    """Count the FLOPs per example of `model`, dense and with the zeros its weights hold now.

    A zero saves its multiply-adds in linear, convolution, recurrent and attention weights; biases, norms, activations
    and attention products are dense.

    Args:
        model: runs once, in eval mode and without gradients; it and the random state are left as they were. On the meta
            device, where weights have no values, the sparse count is the dense one.
        example_inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments. The first
            dimension of the first tensor is the batch.
    """
    model = unwrap(model)
    counter, batch = _count(model, dict(model.named_parameters()), example_inputs)
    layers = (LayerFlops(*row, *(round(2 * macs / batch) for macs in both)) for row, both in counter.rows.items())
    return FlopCount(tuple(layers))


def macs_per_parameter(model: nn.Module, params: Mapping[str, Tensor], example_inputs: Inputs) -> dict[str, float]:
    """Count the multiply-accumulates per example in which each entry of a parameter takes part.

    That is the number of positions it serves: output pixels for a convolution, input pixels for a transposed one,
    tokens for a linear layer; summed over all uses, averaged over the entries where they differ, 0 if there are none.
    `params` are parameters of `model` by name; the other arguments are those of `flops`.
    """
    counter, batch = _count(unwrap(model), params, example_inputs)
    return {name: counter.macs[counter.owner(param)] / param.numel() / batch for name, param in params.items()}


class _Work(NamedTuple):
    """Multiply-accumulates of a call. A single factor is the weight; of two, the one that is a parameter, if any.

    The rules below take a call's output, then the call's own arguments.
    """

    macs: int
    factors: tuple[Tensor, ...] = ()


def _per_output(out: Tensor, *_: Any, **__: Any) -> list[_Work]:
    return [_Work(out.numel())]


def _per_input(_out: Any, input: Tensor, *_: Any, **__: Any) -> list[_Work]:
    return [_Work(input.numel())]


def _affine_norm(out: Tensor, *_: Any, weight: Tensor | None = None, **__: Any) -> list[_Work]:
    return [_Work(out.numel() * (1 if weight is None else 2))]  # torch.nn.functional passes the weight on by keyword


def _weighted(weight: Tensor, positions: int) -> _Work:
    return _Work(weight.numel() * positions, (weight,))


def _layer(
    side: int, dim: int, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any
) -> list[_Work]:
    # A weight serves as many positions as its output (side 0) or input (side 1) has entries for each of its channels.
    positions = (out, input)[side].numel() // weight.shape[dim]
    return [_weighted(weight, positions), _Work(0 if bias is None else out.numel())]


def _matmul(out: Tensor, *args: Tensor, **kwargs: Tensor) -> list[_Work]:
    left, right, *_ = (*args, *kwargs.values())  # matmul, mm and mv call the second one by different names
    return [_Work(out.numel() * left.shape[-1], (left, right))]


def _addmm(out: Tensor, _: Any, mat1: Tensor, mat2: Tensor, *, beta: float = 1, **__: Any) -> list[_Work]:
    return [*_matmul(out, mat1, mat2), _Work(out.numel() if beta else 0)]


def _attention(queries: int, outputs: int, rows: int, keys: int) -> _Work:
    # The queries' scaling, their products with the keys, the softmax, its products with the values.
    return _Work(queries + queries * keys + rows * keys + outputs * keys)


def _scaled_dot_product(out: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> list[_Work]:
    return [_attention(query.numel(), out.numel(), query.numel() // query.shape[-1], key.shape[-2])]


def _multi_head_attention(
    _: Any, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *args: Any, **kwargs: Any
) -> list[_Work]:
    in_weight, in_bias, bias_k, _bias_v, add_zero, _dropout, out_weight, out_bias = args[:8]
    tokens = [x.numel() // x.shape[-1] for x in (query, key, value)]
    weights = [kwargs[f"{x}_proj_weight"] for x in "qkv"] if in_weight is None else in_weight.chunk(3)
    biases = (0 if in_bias is None else sum(tokens)) + (0 if out_bias is None else tokens[0])
    keys = key.shape[0] + (bias_k is not None) + add_zero
    return [
        *map(_weighted, weights, tokens),
        _attention(tokens[0] * width, tokens[0] * width, tokens[0] * heads, keys),
        _weighted(out_weight, tokens[0]),
        _Work(biases * width),
    ]


def _recurrent(_: Any, input: Tensor, *args: Any) -> list[_Work]:
    steps = input.numel() // input.shape[-1]
    params = [x for x in tree_leaves(args) if isinstance(x, nn.Parameter)]
    return [_weighted(x, steps) if x.dim() == 2 else _Work(x.numel() * steps) for x in params]


_RULES: dict[str, Callable[..., list[_Work]]] = {
    name: rule
    for names, rule in (
        ("relu relu_ relu6 hardtanh prelu elu leaky_relu gelu silu softmax", _per_output),
        ("layer_norm rms_norm interpolate add mul", _per_output),
        ("batch_norm instance_norm group_norm", _affine_norm),
        ("avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", _per_input),
        ("max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", _per_input),
        ("linear", partial(_layer, 1, -1)),
        ("conv1d conv2d conv3d", partial(_layer, 0, 0)),
        ("conv_transpose1d conv_transpose2d conv_transpose3d", partial(_layer, 1, 0)),
        ("matmul mm bmm mv", _matmul),
        ("grouped_mm _grouped_mm grouped_mm_fallback", _matmul),  # experts: each row meets the matrix of one of them
        ("addmm baddbmm", _addmm),
        ("scaled_dot_product_attention", _scaled_dot_product),
        ("multi_head_attention_forward", _multi_head_attention),
        ("rnn_tanh rnn_relu gru lstm rnn_tanh_cell rnn_relu_cell gru_cell lstm_cell", _recurrent),
    )
    for name in names.split()
}


class _Counter(TorchFunctionMode):
    """Counts every outermost torch call, under the module it ran in: what such a call calls in turn is not seen."""

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.rows: dict[tuple[str, str], tuple[int, int]] = {}
        self.macs: dict[str, int] = defaultdict(int)
        self._running = [("", model)]
        self._spans: dict[int, dict[range, str]] = defaultdict(dict)
        for name, param in params.items():
            self._own(name, param)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        op = getattr(func, "__name__", "").removesuffix("_with_indices")
        if op in _RULES and func not in (Tensor.add, Tensor.mul):  # which `+` and `*` call
            self._record(op, _RULES[op](out, *args, **kwargs))
        return out

    def enter(self, name: str, module: nn.Module, _: Any) -> None:
        self._running.append((name, module))
        # Sharded weights are whole only while their module runs, in a storage of their own.
        for attribute, param in module.named_parameters(recurse=False):
            self._own(f"{name}.{attribute}".lstrip("."), param)

    def leave(self, *_: Any) -> None:
        self._running.pop()

    def owner(self, tensor: Tensor) -> str:
        """Name the parameter that `tensor` is, or is a view of; an empty string if there is none."""
        storage, offset = _place(tensor)
        return next((name for span, name in self._spans.get(storage, {}).items() if offset in span), "")

    def _own(self, name: str, param: Tensor) -> None:
        # Spans, because parameters may share a storage, as those of a recurrent layer do on a GPU.
        storage, start = _place(param)
        self._spans[storage].setdefault(range(start, start + param.numel()), name)

    def _record(self, op: str, works: list[_Work]) -> None:
        name, module = self._running[-1]
        is_leaf = next(module.children(), None) is None or isinstance(module, nn.MultiheadAttention)
        row = (name, type(module).__name__ if is_leaf else op)
        for macs, factors in works:
            weight = next(filter(self.owner, factors), factors[0] if len(factors) == 1 else None)
            kept = macs
            if weight is not None:
                self.macs[self.owner(weight)] += macs
                kept = macs if weight.is_meta else macs * int(weight.count_nonzero()) // weight.numel()
            dense, sparse = self.rows.get(row, (0, 0))
            self.rows[row] = (dense + macs, sparse + kept)


def _place(tensor: Tensor) -> tuple[int, int]:
    try:
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have no storage
        return id(tensor), 0


def _count(model: nn.Module, params: Mapping[str, Tensor], example_inputs: Inputs) -> tuple[_Counter, int]:
    """Run the model once; return what was counted and the batch size."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = dict(example_inputs) if isinstance(example_inputs, Mapping) else example_inputs
    inputs = tree_map_only(Tensor, lambda x: x.to(device, copy=True), inputs)
    batch = next((x.shape[0] for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()), 0)
    if not batch:
        raise ValueError(f"example_inputs must hold a tensor whose first dimension is the batch, got {inputs!r:.99}")
    kwargs = inputs if isinstance(inputs, dict) else {}
    args = () if kwargs else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    # A forward that writes to its buffers writes to these.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    counter = _Counter(model, params)
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    # In eval mode, unfused, and so that the counter knows which module runs; then everything is put back.
    with ExitStack() as undo, eager, torch.random.fork_rng({p.device for p in model.parameters() if p.is_cuda}):
        undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        clean = name_cleaner(model)
        for path, module in model.named_modules():
            name = clean(path)
            undo.callback(setattr, module, "training", module.training)
            module.training = False  # not by eval(), which models override
            undo.callback(module.register_forward_pre_hook(partial(counter.enter, name)).remove)
            undo.callback(module.register_forward_hook(counter.leave, always_call=True).remove)
        with torch.no_grad(), counter:
            torch.func.functional_call(model, buffers, args, kwargs)
    return counter, batch
