"""Traces a model with torch.export: one graph of operations on tensors, with every parameter as an input."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from spartan.wording import first_line

PREFIX = "model"


@dataclass(frozen=True)
class Traced:
    """What a model computes: the operations that lead to its outputs, in order, and what they begin with."""

    nodes: list[Node]
    leaves: dict[Node, str]  # parameters and buffers, by their name in the model
    outputs: list[Node]


class _Tensors(nn.Module):
    """A model that gives its tensors as a list."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(PREFIX, model)

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """The model's outputs."""
        return list(tensors_of(self.get_submodule(PREFIX)(*args, **kwargs)))


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors of what a model returns: in tuples, lists, dicts and data classes. A cache of keys and values is none."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_of(value)
    elif is_dataclass(output):
        for each in fields(output):
            yield from tensors_of(getattr(output, each.name))


@torch.no_grad()
def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The graph of a model for inputs of these shapes; ValueError where torch cannot give one."""
    fused = torch.backends.mha.get_fastpath_enabled()
    # One operation for a whole layer would hide what is in it.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(_Tensors(model), args, kwargs, strict=False)
            # Without operations that write into their inputs.
            exported = exported.run_decompositions({})
    except Exception as error:  # torch's tracer raises anything, and so does the model's code under it
        raise ValueError(
            f"torch.export cannot trace {type(model).__name__}: {first_line(error)}; shrink needs the model's graph: no "
            "branches that depend on the values of tensors"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    results = [node for node in output.args[0] if isinstance(node, Node)]
    user = [node for node in results if node.name in set(exported.graph_signature.user_outputs)]
    written = set(exported.graph_signature.buffers_to_mutate.values())
    names = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target not in written:
            names[spec.arg.name] = str(spec.target).removeprefix(f"{PREFIX}.")
    needed = _ancestors(user)
    for node in needed:
        if any(not isinstance(n, int) for n in getattr(node.meta.get("val"), "shape", ())):
            raise ValueError(
                f"the shapes that {type(model).__name__} computes with depend on the values of tensors ({node.target}); "
                "shrink needs fixed ones"
            )
    nodes = [node for node in exported.graph.nodes if node in needed]
    for node in nodes:  # what leads nowhere is no use of its inputs
        node.users = {other: None for other in node.users if other in needed or other is output}
    return Traced(nodes, {n: names[n.name] for n in nodes if n.op == "placeholder" and n.name in names}, user)


def _ancestors(nodes: list[Node]) -> set[Node]:
    found, waiting = set[Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def module_of(node: Node) -> str:
    """The name of the module whose code runs an operation; empty for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix(PREFIX).removeprefix(".")
