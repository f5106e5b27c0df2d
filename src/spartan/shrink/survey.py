"""Goes through a graph, and finds out which dimensions are tied together, what is constant, and who reads what."""

import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from spartan.shrink.axes import NO_CHANNEL
from spartan.shrink.constants import Constants
from spartan.shrink.parts import Parts
from spartan.shrink.rules import mixing, products, structure
from spartan.shrink.rules.base import RULES, Call, Outcome, Survey, unknown
from spartan.shrink.trace import Traced, module_of

# Files of rules; to import them puts these into the table.
WITH_RULES = (mixing, products, structure)


@torch.no_grad()
def survey(traced: Traced, parts: Parts) -> Survey:
    """Go through the graph of a model with these tensors."""
    result = Survey()
    reasons = result.ties.reasons
    given, returned = map(reasons.number, ("they are an input of the model", "they are an output of the model"))
    uses = Counter[int]()
    for node, name in traced.leaves.items():
        uses[id(parts.tensors[name])] += len(node.users)
    with torch.device("cpu"):  # whatever the default is
        for node in traced.nodes:
            if node in traced.leaves:
                name = traced.leaves[node]
                if name in parts.may_shrink and uses[id(parts.tensors[name])] == 1:
                    result.owned.add(node)
                result.found[node] = _leaf(name, parts, result)
            elif node.op == "placeholder":
                value = node.meta.get("val")
                sizes = value.shape if isinstance(value, Tensor) else ()
                result.found[node] = [result.ties.axis(n, given) for n in sizes], None
            elif node.target is operator.getitem:
                source, index = node.args
                several = result.found.get(source)  # type: ignore[arg-type]
                result.found[node] = several[index] if isinstance(several, list) else None  # type: ignore[index]
            else:
                result.found[node] = _apply(node, result)
    for node in traced.outputs:
        for axis in result.axes_of(node):
            axis.pin(returned)
    return result


def _leaf(name: str, parts: Parts, result: Survey) -> Outcome:
    """A parameter or buffer; one that is tied to another has the same axes."""
    tensor, ties = parts.tensors[name], result.ties
    tied = [other for other in result.leaves if parts.tensors[other] is tensor]
    axes = result.leaves[tied[0]] if tied else [ties.axis(n, NO_CHANNEL if n == 1 else 0) for n in tensor.shape]
    if name not in parts.may_shrink:
        for axis in axes:
            axis.pin(ties.reasons.number(f"{name} is not among the floating-point tensors of the model's state"))
    result.leaves[name] = axes
    return axes, Constants.all_of(tensor.detach())


def _apply(node: Node, result: Survey) -> Outcome:
    target: Any = node.target
    place, value = module_of(node) or "the model", node.meta.get("val")
    if not hasattr(target, "_schema"):  # an operation that runs a graph of its own
        return unknown(result, node, f"{target} in {place}")
    if not isinstance(value, Tensor | list | tuple):
        return None
    call = Call(result, node, place)
    how = RULES.get(call.op)
    if how is None and isinstance(value, Tensor) and structure.is_pointwise(target):
        how = structure.pointwise
    outcome = how(call) if how is not None else None
    return unknown(result, node, call.place) if outcome is None else outcome
