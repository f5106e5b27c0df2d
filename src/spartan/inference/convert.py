"""Turns a sparse model into one that runs fast: puts layers on sparse kernels where they win on this machine."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spartan.inference.cpu.choice import LARGE, choose, sparse_layer
from spartan.inference.cpu.library import library
from spartan.inference.cpu.ops import DTYPES as _CPU_DTYPES
from spartan.inference.few import ByTokens
from spartan.inference.fuse import fuse, is_conv1d, plain_conv, plain_conv1d, plain_linear, replace_module
from spartan.inference.gpu import choice as gpu
from spartan.inference.gpu.linear import DTYPES as _GPU_DTYPES
from spartan.inference.runtime import DenseConv2d, DenseLinear, InferenceLayer, arguments_of
from spartan.inference.stand_ins import Attention, MaxPool, PatchConv

M = TypeVar("M", bound=nn.Module)
# Shape and type of what a layer is given.
Seen = tuple[tuple[int, ...], torch.dtype]
KERNELS = ("auto", "dense", "sparse")
_LAUNCHES = "called as it is, the dense model is launched sooner; for a CUDA graph use kernels='sparse'"
# Shapes to measure at where no example inputs say which: a few hundred tokens (on a GPU, some thousands), an image of
# middle size; fewer and smaller where inputs and outputs would have more entries than these. A layer of millions of
# outputs, which a file of a few KB can name, would take gigabytes.
_TOKENS, _GPU_TOKENS, _SIDE = 256, 8192, 28
_ENTRIES, _GPU_ENTRIES = 1 << 23, 1 << 28


@dataclass(frozen=True)
class Explanation:
    """What runs one layer, and why."""

    layer: str
    kernel: str
    why: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.kernel} ({self.why})"


def accelerate(
    model: M,
    kernels: str = "auto",
    device: torch.device | str | None = None,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    tokens: Sequence[int] | None = None,
) -> M:
    """A copy of the model, for inference, whose linear layers, convolutions and attention run sparse kernels where they win.

    Batch norms, activations and residual sums become part of the layer before them where the model's graph allows. Each
    layer's candidates are timed once and the answer kept on disk; `explain` tells what was chosen. The copy computes
    the same function up to rounding, has no gradients and cannot be trained. The model given is left as it is.

    Args:
        model: with zeros in its weights; float32 or bfloat16, on a GPU also float16.
        kernels: "auto" takes what is fastest on this machine, "sparse" a sparse kernel wherever there is a zero and a
            kernel, "dense" leaves every layer as it is.
        device: where the copy shall run; by default where the model is. There are sparse kernels for the CPU and, of
            linear layers and attention, for CUDA devices.
        example_inputs: one call's inputs (a tensor, a tuple of arguments, or a dict of keyword arguments). Layers are
            timed at the shapes seen in it, and the copy is checked against the model on it. Without them layers are
            timed at 256 tokens (on a GPU 8192) or images of 28×28.
        tokens: numbers of tokens at which linear layers are timed besides. A layer whose fastest kernels differ keeps
            them all, and takes at each call the one for about as many tokens. By default 1 for a model with a method
            `generate`, which reads a prompt at once and then token by token; none for others.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> fast = accelerate(spartan.prune(model, 0.95), kernels="sparse")
        >>> x = torch.randn(8, 64)
        >>> bool(torch.allclose(fast(x), model(x), atol=1e-4))
        True
        >>> [line.layer for line in explain(fast)]
        ['0', '2']
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r}; one of {', '.join(map(repr, KERNELS))} is needed")
    if tokens is None:
        tokens = (1,) if callable(getattr(model, "generate", None)) else ()
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in tokens):
        raise ValueError(f"tokens={tokens!r}; whole numbers of at least 1 are needed")
    fast = copy.deepcopy(model).eval().requires_grad_(False)
    if device is not None:
        fast = fast.to(device)
    on = {p.device.type for p in fast.parameters()} or {"cpu"}
    if kernels == "dense" or on not in ({"cpu"}, {"cuda"}):
        if kernels == "sparse":
            raise ValueError(
                "kernels='sparse': there are sparse kernels for the CPU and for CUDA devices; "
                f"the model is on {', '.join(sorted(on))}"
            )
        return fast
    holder = nn.ModuleDict({"model": fast})  # so that a model which is one layer has a parent, too
    before = None if example_inputs is None else _call(fast, example_inputs)
    fuse(fast)
    given = _make_replaceable(holder, kernels)
    shapes = {} if example_inputs is None else _shapes(holder, example_inputs)
    for name, layer in list(holder.named_modules()):
        if isinstance(layer, DenseLinear | DenseConv2d):
            _choose_kernel(holder, name, layer, shapes.get(id(layer)), kernels, tokens)
    _restore_unused(holder, given, shapes)
    fast = holder["model"]  # type: ignore[assignment]
    if before is not None:
        _compare(before, _call(fast, example_inputs))
    # A layer that has a kernel for other numbers of tokens than the example's cannot be judged by it.
    several = any(isinstance(module, ByTokens) for module in fast.modules())
    if kernels == "auto" and on == {"cuda"} and before is not None and _is_sparse(fast) and not several:
        plain = copy.deepcopy(model).eval().requires_grad_(False).to(next(fast.buffers()).device)
        if not gpu.is_faster(lambda: _call(fast, example_inputs), lambda: _call(plain, example_inputs)):
            for layer in plain.modules():
                layer.chosen = _LAUNCHES  # type: ignore[assignment]
            return plain
    return fast


def explain(model: nn.Module) -> list[Explanation]:
    """What runs each layer of an accelerated model, and why; weights full of zeros that no kernel knows are named, too.

    Example:
        >>> layer = spartan.prune(torch.nn.Linear(64, 64), 0.9)
        >>> str(explain(accelerate(layer, kernels="dense"))[0])
        'the model: dense (as it was given)'
    """
    found = []
    inner = {id(part) for layer in model.modules() if isinstance(layer, ByTokens) for part in layer.layers}
    for name, layer in model.named_modules():
        if id(layer) in inner:
            continue
        if isinstance(layer, InferenceLayer):
            found.append(Explanation(name or "the model", layer.kernel, layer.why))
        elif isinstance(layer, nn.Linear | nn.Conv2d | nn.MultiheadAttention) or is_conv1d(layer):
            refused = Attention.why_not(layer) if isinstance(layer, nn.MultiheadAttention) else ""
            why = getattr(layer, "chosen", "") or refused or "as it was given"
            found.append(Explanation(name or "the model", "dense", why))
        elif (zeros := _zeros_of(layer)) >= 0.3:
            why = f"{zeros:.1%} zeros: there is no kernel for {type(layer).__name__}"
            found.append(Explanation(name or "the model", "dense", why))
    return found


def _zeros_of(layer: nn.Module) -> float:
    """The share of zeros in a module's own weights."""
    weights = [p for p in layer._parameters.values() if p is not None and p.ndim > 1 and p.numel()]
    zeros = sum(int((w == 0).sum()) for w in weights)
    return zeros / sum(w.numel() for w in weights) if weights else 0.0


def _make_replaceable(holder: nn.ModuleDict, kernels: str) -> dict[str, Any]:
    """Every layer with zeros as a `DenseLinear` or `DenseConv2d`, which a sparse one may then replace.

    On a CPU large linear layers without zeros as well: for whole weights, too, there is a kernel.

    Returns what `_restore_unused` needs: the attention and convolutions that were there, and the fused paths that were
    switched off.
    """
    given: dict[str, Any] = {}
    gpu_model = any(map(_on_gpu, holder.state_dict().values()))
    for name, module in list(holder.named_modules()):
        layer: nn.Module | None = None
        dense = module if isinstance(module, DenseConv2d) else None
        if isinstance(module, nn.Conv2d) and (conv := plain_conv(module)):
            dense = DenseConv2d(module.weight, module.bias, conv)
        if isinstance(module, nn.TransformerEncoderLayer):
            given[name] = module.activation_relu_or_gelu
            module.activation_relu_or_gelu = 0  # its fused path reads weights that are no longer there
        elif type(module) is nn.MultiheadAttention:
            if not Attention.why_not(module) and _worth_a_kernel(module.in_proj_weight):
                given[name], layer = module, Attention(module)
        elif plain_linear(module) and (_worth_a_kernel(module.weight) or (kernels == "auto" and _large(module.weight))):
            # Attention that stays as it is reads its output projection's weight itself.
            if not isinstance(holder.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
                layer = DenseLinear(module.weight, module.bias)
        elif plain_conv1d(module) and _worth_a_kernel(module.weight):
            layer = DenseLinear(module.weight.t().contiguous(), module.bias)
        elif dense is not None and gpu_model and PatchConv.suits(dense) and _has_kernel(dense.weight):
            given[name], layer = module, PatchConv(dense)
        elif dense is not None and _worth_a_kernel(dense.weight):
            layer = dense
        elif MaxPool.suits(module) and not gpu_model:
            layer = MaxPool(module)
        if layer is not None:
            replace_module(holder, name, layer)
    return given


def _is_sparse(model: nn.Module) -> bool:
    return any(isinstance(module, InferenceLayer) and module.kernel != "dense" for module in model.modules())


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _restore_unused(holder: nn.ModuleDict, given: dict[str, Any], shapes: Mapping[int, Seen]) -> None:
    """On a GPU, attention and transformer layers without a sparse kernel as they were: torch's fused paths are faster.

    Convolutions as well, where patches are no gain.
    """
    for name, was in given.items():
        module = holder.get_submodule(name)
        if isinstance(module, PatchConv):
            linear, told = module.linear, _faster_patches(module, was, shapes.get(id(module)))
            linear.why = told if linear.kernel == "dense" else f"{linear.why}; {told}"
            if not told:
                replace_module(holder, name, was)
        elif _is_sparse(module) or not all(map(_on_gpu, module.state_dict().values())):
            continue
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = was
        elif isinstance(module, Attention):
            was.chosen = f"projections: {module.in_proj.why}"
            replace_module(holder, name, was)


@torch.inference_mode()
def _faster_patches(patches: PatchConv, conv: nn.Conv2d | DenseConv2d, seen: Seen | None) -> str:
    """Both times where the device is done sooner with the patches; empty where it is not, or nobody knows the shape."""
    if seen is None:
        return ""
    x = torch.randn(seen[0], device=conv.weight.device).to(seen[1])
    ours, theirs = gpu.timed({"patches": patches, "convolution": conv}, x).values()
    return f"patches {1e3 * ours:.3f} ms, convolution {1e3 * theirs:.3f} ms" if ours < theirs else ""


def _has_kernel(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    return (dtype or weight.dtype) in (_GPU_DTYPES if _on_gpu(weight) else _CPU_DTYPES)


def _worth_a_kernel(weight: Tensor) -> bool:
    # Fewer than this cannot pay.
    return _has_kernel(weight) and float((weight == 0).float().mean()) >= 0.3


def _large(weight: Tensor) -> bool:
    # A weight of a linear layer for which the CPU's kernel for whole ones is worth timing.
    return not _on_gpu(weight) and _has_kernel(weight) and weight.numel() >= LARGE and library() is not None


def _usual_shape(layer: DenseLinear | DenseConv2d) -> tuple[int, ...]:
    """What a layer is measured at where nobody says."""
    weight = layer.weight
    tokens, most = (_GPU_TOKENS, _GPU_ENTRIES) if _on_gpu(weight) else (_TOKENS, _ENTRIES)
    if isinstance(layer, DenseLinear):
        return max(1, min(tokens, most // sum(weight.shape))), weight.shape[1]
    conv = layer.conv
    side = min(_SIDE, math.isqrt(most // (conv.channels + len(weight))))
    each = zip(conv.kernel, conv.padding, conv.dilation, strict=True)
    return 1, conv.channels, *(max(side, d * (k - 1) + 1 - 2 * p, 1) for k, p, d in each)


def _choose_kernel(
    holder: nn.ModuleDict,
    name: str,
    layer: DenseLinear | DenseConv2d,
    seen: Seen | None,
    kernels: str,
    tokens: Sequence[int],
) -> None:
    """Put the layer on the kernel that suits it, or leave it as it is, and note why."""
    weight = layer.weight
    shape, dtype = seen or (_usual_shape(layer), weight.dtype)
    whole = kernels == "auto" and isinstance(layer, DenseLinear) and _large(weight)
    if not _worth_a_kernel(weight) and not whole:
        layer.why = f"{layer.zeros:.1%} zeros: too few"
    elif not _has_kernel(weight, dtype):
        layer.why = f"no kernel for {dtype}"
    elif _on_gpu(weight) and isinstance(layer, DenseConv2d):
        layer.why = "no sparse convolution for CUDA devices"
    elif isinstance(layer, DenseConv2d):
        kernel, why = choose(layer, (1, *shape) if len(shape) == 3 else shape, dtype, kernels)
        conv = layer if kernel is None else sparse_layer(layer, kernel)
        conv.why = why if seen else f"{why}; without example inputs"
        replace_module(holder, name, conv)
    else:
        parent, _, last = name.rpartition(".")
        parts = 3 if isinstance(holder.get_submodule(parent), Attention) and last == "in_proj" else 1
        seen_tokens = math.prod(shape[:-1])
        shapes = {n: (n, weight.shape[1]) for n in tokens} | {seen_tokens: shape}
        found: list[tuple[int, Any, InferenceLayer]] = []
        for count in sorted(shapes):
            kernel, chosen = _linear_on_kernel(layer, shapes[count], dtype, kernels, parts, dict(f[1:] for f in found))
            if not seen and count == seen_tokens:
                chosen.why += "; without example inputs"
            if not found or found[-1][1] != kernel:
                found.append((count, kernel, chosen))
        only = found[0][2]
        replace_module(holder, name, only if len(found) == 1 else ByTokens([(n, part) for n, _, part in found]))


def _linear_on_kernel(
    layer: DenseLinear,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kernels: str,
    parts: int,
    made: Mapping[Any, InferenceLayer],
) -> tuple[Any, InferenceLayer]:
    """The kernel for a linear layer at inputs of this shape, and the layer on it: of those that are made, if it is there."""
    kernel: Any
    if _on_gpu(layer.weight):
        kernel, why = gpu.choose(layer, shape, dtype, kernels)
    else:
        kernel, why = choose(layer, shape, dtype, kernels, parts)
    chosen: InferenceLayer
    if kernel in made:
        chosen = made[kernel]
        chosen.why += f"; {why}"
    elif kernel is None:
        chosen, layer.why = layer, why
    else:
        chosen = gpu.build(layer, kernel) if _on_gpu(layer.weight) else sparse_layer(layer, kernel)
        chosen.why = why
    return kernel, chosen


@torch.inference_mode()
def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments_of(inputs)
    return model(*args, **kwargs)


def _shapes(holder: nn.ModuleDict, inputs: Any) -> dict[int, Seen]:
    """Shape and type of what each layer is given when the model is called; the first call counts."""
    seen: dict[int, Seen] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            seen.setdefault(id(module), (tuple(args[0].shape), args[0].dtype))

    layers = [m for m in holder.modules() if isinstance(m, DenseLinear | DenseConv2d | PatchConv)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        _call(holder["model"], inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _compare(before: Any, after: Any) -> None:
    """The copy must do what the model does: guards against models that use their layers in ways not foreseen here."""
    for a, b in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if not isinstance(a, Tensor) or not a.is_floating_point() or a.numel() == 0:
            continue
        # TF32, where the model was run in it, has 11 bits.
        exact = a.dtype == torch.float32 and (not a.is_cuda or torch.get_float32_matmul_precision() == "highest")
        bound = 1e-3 if exact else 5e-2
        scale = a.float().abs().nan_to_num(0, 0, 0).max()
        gap = (a.float() - b.float()).abs().nan_to_num(0, 0, 0).max()
        if a.shape != b.shape or gap > bound * scale:
            raise RuntimeError(
                f"the accelerated model's output differs from the model's by {float(gap):.3g} "
                f"(largest value {float(scale):.3g}) on example_inputs; use kernels='dense', and please report the model"
            )
