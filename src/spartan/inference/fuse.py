"""Puts batch norms, activations and residual sums into the layer before them.

Every module that calls layers is looked at by itself, with the modules it calls as black boxes (a trace by torch.fx).
What feeds only the next step is merged: convolution → batch norm → (+ residual) → activation, linear → activation.
Where the step that becomes part of a layer is a module of its own it is replaced by `nn.Identity`; where it is a
function, a sum or a module called several times, the calling module is replaced by its rewritten graph. The model
itself keeps its class. A module whose forward cannot be traced, or takes optional arguments, or carries hooks is left
alone.
"""

import copy
import inspect
import operator
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from spartan.inference.cpu.ops import Conv
from spartan.inference.runtime import DenseConv2d, DenseLinear

_SUMS: tuple[Callable, ...] = (operator.add, operator.iadd, torch.add)
# Functions, methods by their names, and modules by their types.
_ACTIVATIONS: dict[Any, str] = {F.relu: "relu", torch.relu: "relu", F.silu: "silu", F.gelu: "gelu"}
_ACTIVATIONS |= {"relu": "relu", "relu_": "relu", nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu"}


class _Shallow(fx.Tracer):
    """Traces one module's own forward."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is `nn.Linear` in all but name."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and not _has_hooks(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' `Conv1D`, a linear layer whose weight stands as inputs × outputs."""
    theirs = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return theirs is not None and type(module) is theirs


def plain_conv1d(module: nn.Module) -> bool:
    """Whether it is that and nothing else."""
    return is_conv1d(module) and not _has_hooks(module)


def plain_conv(module: nn.Module) -> Conv | None:
    """The constants of a 2-d convolution that pads with zeros, evenly; None for anything else."""
    if not isinstance(module, nn.Conv2d) or type(module).forward is not nn.Conv2d.forward or _has_hooks(module):
        return None
    padding = module.padding
    if isinstance(padding, str):
        sides = zip(module.kernel_size, module.dilation, strict=True)
        reach = [d * (k - 1) if padding == "same" else 0 for k, d in sides]
        if any(r % 2 for r in reach):
            return None
        padding = (reach[0] // 2, reach[1] // 2)
    if module.padding_mode != "zeros" and any(padding):
        return None
    pairs = [(int(a), int(b)) for a, b in (module.kernel_size, module.stride, padding, module.dilation)]
    return Conv(pairs[0], pairs[1], pairs[2], pairs[3], module.groups, module.in_channels)


def _has_hooks(module: nn.Module) -> bool:
    parametrized = hasattr(module, "parametrizations")
    return parametrized or bool(module._forward_hooks or module._forward_pre_hooks)


def fold_batch_norm(weight: Tensor, bias: Tensor | None, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of one convolution that does conv → norm: w·γ/√(σ² + ε) and (b − mean)·γ/√(σ² + ε) + β.

    Computed in float64, so that the result is rounded once.
    """
    norm = copy.deepcopy(norm).double()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    more = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    folded, shift = fuse_conv_bn_weights(weight.double(), None if bias is None else bias.double(), *more)
    # A pruned weight stays exactly +0, whatever the scale's sign.
    return folded.data.masked_fill(weight == 0, 0.0).to(weight.dtype), shift.data.to(weight.dtype)


def _trace(module: nn.Module) -> fx.Graph | None:
    if _has_hooks(module) or isinstance(module, fx.GraphModule) or not any(True for _ in module.children()):
        return None
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential):
        return None
    try:
        parameters = inspect.signature(type(module).forward).parameters.values()
        if any(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
            return None
        # A trace follows one side of "if … is None", whatever is given later.
        if any(word in str(p.annotation) for p in parameters for word in ("None", "Optional")):
            return None
        return _Shallow().trace(module)
    except Exception:  # a forward may fail in any way on a proxy; the module then stays as it is
        return None


class _Rewrite:
    """The merges of one module's graph."""

    def __init__(self, owner: nn.Module, graph: fx.Graph, shared: Counter[int], rewritable: bool) -> None:
        self.owner, self.graph, self.shared, self.rewritable = owner, graph, shared, rewritable
        self.calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self.rewritten = False

    def unshared(self, node: fx.Node) -> nn.Module | None:
        """The module the node calls, where nothing else calls it."""
        if node.op != "call_module" or self.calls[node.target] != 1 or node.kwargs or len(node.args) != 1:
            return None
        module = self.owner.get_submodule(str(node.target))
        return module if self.shared[id(module)] == 1 else None

    def next(self, node: fx.Node) -> fx.Node | None:
        """The one step that uses the node's result."""
        return next(iter(node.users)) if len(node.users) == 1 else None

    def run(self) -> None:
        for node in list(self.graph.nodes):
            module = self.unshared(node)
            if isinstance(module, nn.Conv2d) and (conv := plain_conv(module)):
                self.merge_conv(node, module, conv)
            elif module is not None and plain_linear(module) and (kind := self.take_activation(node)):
                replace_module(self.owner, str(node.target), DenseLinear(module.weight, module.bias, kind))

    def merge_conv(self, node: fx.Node, module: nn.Conv2d, conv: Conv) -> None:
        weight: Tensor = module.weight
        bias: Tensor | None = module.bias
        after = self.next(node)
        norm = self.unshared(after) if after is not None else None
        if after and type(norm) is nn.BatchNorm2d and norm.running_mean is not None and not _has_hooks(norm):
            weight, bias = fold_batch_norm(weight, bias, norm)
            self.drop(after, node)
            after = self.next(node)
        layer = DenseConv2d(weight, bias, conv)
        replace_module(self.owner, str(node.target), layer)
        source = node.args[0]
        if self.rewritable and after is not None and self.is_sum(after) and isinstance(source, fx.Node):
            other, order = next(a for a in after.args if a is not node), list(self.graph.nodes)
            # The call moves down to the sum: its input must not be touched in between.
            if len(source.users) == 1 or order.index(other) < order.index(node):
                with self.graph.inserting_before(after):
                    fused = self.graph.call_module(str(node.target), (source,), {"residual": other})
                after.replace_all_uses_with(fused)
                self.graph.erase_node(after)
                self.graph.erase_node(node)
                self.rewritten = True
                node = fused
        layer.activation = self.take_activation(node) or "none"

    def is_sum(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target not in _SUMS or len(node.args) != 2 or node.kwargs:
            return False
        return all(isinstance(a, fx.Node) for a in node.args) and node.args[0] is not node.args[1]

    def take_activation(self, node: fx.Node) -> str | None:
        """The activation that is the node's next step, which is dropped; None where there is none that may be merged."""
        after = self.next(node)
        kind = None
        if after is None or len(after.args) != 1:
            return None
        if after.op == "call_module" and (self.rewritable or self.unshared(after) is not None):
            module = self.owner.get_submodule(str(after.target))
            kind = None if _has_hooks(module) else _ACTIVATIONS.get(type(module))
            kind = "gelu_tanh" if kind == "gelu" and module.approximate == "tanh" else kind
        elif self.rewritable and after.op in ("call_function", "call_method") and not set(after.kwargs) - {"inplace"}:
            kind = _ACTIVATIONS.get(after.target)
        if kind is not None:
            self.drop(after, node)
        return kind

    def drop(self, node: fx.Node, before: fx.Node) -> None:
        """Remove a step whose work the layer before it now does."""
        if self.unshared(node) is not None:
            replace_module(self.owner, str(node.target), nn.Identity())
        else:
            self.rewritten = True
        node.replace_all_uses_with(before)
        self.graph.erase_node(node)


def fuse(model: nn.Module) -> None:
    """Merge, in place, what can be merged; see the top of the file. The model must be in eval mode."""
    shared = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for name, module in list(model.named_modules()):
        graph = _trace(module)
        if graph is None:
            continue
        rewrite = _Rewrite(module, graph, shared, rewritable=bool(name) and shared[id(module)] == 1)
        rewrite.run()
        if rewrite.rewritten:
            graph.lint()
            replace_module(model, name, fx.GraphModule(module, graph, class_name=type(module).__name__).eval())


def replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of the one that is called `name` below `root`."""
    parent, _, last = name.rpartition(".")
    setattr(root.get_submodule(parent), last, module)
