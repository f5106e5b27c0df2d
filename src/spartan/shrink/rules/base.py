"""What a rule is: how an operation's output dimensions come from those of its inputs, and what of it is constant."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from spartan.shrink.axes import NO_CHANNEL, Axis, Ties
from spartan.shrink.constants import Constants

# Of a tensor: its axes, and which of its entries are constants.
Found = tuple[list[Axis], Constants | None]
# A list where an operation gives several tensors; None: the rule does not know this use of it.
Outcome = Found | list[Found] | None


@dataclass
class Survey:
    """What is found out about a graph."""

    ties: Ties = field(default_factory=Ties)
    found: dict[Node, Outcome] = field(default_factory=dict)
    # parameters and buffers by name
    leaves: dict[str, list[Axis]] = field(default_factory=dict)
    # those that can be given other values, because they are used once
    owned: set[Node] = field(default_factory=set)
    # tensors whose last dimension adds up to one everywhere
    stochastic: set[Node] = field(default_factory=set)

    def axes_of(self, node: Node) -> list[Axis]:
        """The axes of what an operation gives, of all tensors if it gives several."""
        found = self.found.get(node)
        each = found if isinstance(found, list) else [found] if found else []
        return [axis for axes, _ in each for axis in axes]


class Call:
    """An operation of the graph with its arguments by name, and what is known about those."""

    def __init__(self, survey: Survey, node: Node, module: str) -> None:
        self.survey, self.ties, self.node, self.module = survey, survey.ties, node, module
        schema = node.target._schema  # type: ignore[union-attr]
        self.op = schema.name.partition("::")[2]
        names = [argument.name for argument in schema.arguments]
        self._values: dict[str, Any] = {a.name: a.default_value for a in schema.arguments}
        self._values |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name)

    def node_of(self, name: str) -> Node:
        """The tensor that an argument is."""
        node = self._values[name]
        assert isinstance(node, Node)
        return node

    def axes(self, name: str) -> list[Axis]:
        """The axes of an argument."""
        return self.found(self.node_of(name))[0]

    def known(self, name: str) -> Constants | None:
        """What is constant of an argument."""
        return self.found(self.node_of(name))[1]

    def found(self, node: Node) -> Found:
        """Axes and constants of a tensor."""
        found = self.survey.found[node]
        assert isinstance(found, tuple)
        return found

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an argument."""
        return shape_of(self.node_of(name))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output, or of the first."""
        value = self.node.meta["val"]
        return tuple(value.shape if isinstance(value, Tensor) else value[0].shape)

    @property
    def place(self) -> str:
        """The operation, and in which module."""
        return f"{self.op} in {self.module}"

    def pin(self, axes: Sequence[Axis], text: str = "") -> None:
        """These stay whole; without a text because they are no dimensions of channels."""
        for axis in axes:
            axis.pin(self.ties.reasons.number(text) if text else NO_CHANNEL)

    def broadcast(self, several: Sequence[Sequence[Axis]], shape: Sequence[int]) -> list[Axis]:
        """The axes of a result of this shape for which tensors with these are broadcast: from the end on, they are one."""
        found: list[Axis | None] = [None] * len(shape)
        for axes in several:
            for i, axis in enumerate(axes, len(shape) - len(axes)):
                if axis.size == shape[i] and axis.size != 1:
                    here = found[i]
                    if here is None:
                        found[i] = axis
                    else:
                        here.join(axis)
        return [axis or self.new_axis(n) for axis, n in zip(found, shape, strict=True)]

    def new_axis(self, size: int) -> Axis:
        """One that stays whole, because it is no dimension of channels."""
        return self.ties.axis(size, NO_CHANNEL)


RuleOfOp = Callable[[Call], Outcome]
RULES: dict[str, RuleOfOp] = {}


def rule(*names: str) -> Callable[[RuleOfOp], RuleOfOp]:
    """Register what these operations do."""

    def register(function: RuleOfOp) -> RuleOfOp:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of a tensor of the graph."""
    return tuple(node.meta["val"].shape)


def dims_of(dims: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Dimensions counted from the front; all of them for None or an empty list."""
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        return list(range(ndim))
    return sorted(d % ndim for d in ([dims] if isinstance(dims, int) else dims))


def unknown(survey: Survey, node: Node, place: str) -> Outcome:
    """An operation without a rule: nothing of what it reads or writes can be cut."""
    reason = survey.ties.reasons.number(f"{place} is no operation that shrink knows")
    for other in node.all_input_nodes:
        for axis in survey.axes_of(other):
            axis.pin(reason)
    value = node.meta.get("val")
    each = value if isinstance(value, list | tuple) else [value]
    several: list[Found] = [([survey.ties.axis(n, reason) for n in getattr(x, "shape", ())], None) for x in each]
    return several[0] if isinstance(value, Tensor) else several


def run(call: Call, values: Mapping[Node, Tensor]) -> Tensor:
    """The operation itself, on other tensors."""
    args, kwargs = torch.fx.node.map_arg((call.node.args, call.node.kwargs), lambda node: values[node])
    return call.node.target(*args, **kwargs)  # type: ignore[operator]
