"""Rules of operations that move entries, or compute each from those at its own place."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from spartan.shrink.axes import Axis, Joined, Reshaped
from spartan.shrink.constants import Constants
from spartan.shrink.rules.base import Call, Found, Outcome, dims_of, rule, run, shape_of

# Those that torch does not say so of itself.
POINTWISE = {
    "hardswish",
    "hardsigmoid",
    "mish",
    "selu",
    "celu",
    "softplus",
    "log_sigmoid",
    "_to_copy",
    "detach",
    "alias",
}
POINTWISE |= {"clone", "contiguous", "lift_fresh_copy", "type_as", "to", "masked_fill", "threshold", "logit"}
COPIES = {"_to_copy", "detach", "alias", "clone", "contiguous", "lift_fresh_copy", "to"}


def is_pointwise(target: Any) -> bool:
    """Whether an operation computes each entry from those at its own place."""
    return torch.Tag.pointwise in target.tags or target._schema.name.partition("::")[2] in POINTWISE


def pointwise(call: Call) -> Outcome:
    """Each entry from those at its own place."""
    nodes = [node for node in call.node.all_input_nodes if isinstance(node.meta.get("val"), Tensor)]
    if call.op in COPIES and nodes[0] in call.survey.stochastic:
        call.survey.stochastic.add(call.node)
    return call.broadcast([call.found(node)[0] for node in nodes], call.shape), _pointwise_known(call, nodes)


def _pointwise_known(call: Call, nodes: list[Node]) -> Constants | None:
    facts = {node: call.found(node)[1] for node in nodes}
    each = [fact for fact in facts.values() if fact is not None]
    output, ndim = call.node.meta["val"], len(call.shape)
    where = torch.zeros([1] * ndim, dtype=torch.bool, device=output.device)
    value = torch.zeros([1] * ndim, dtype=output.dtype, device=output.device)
    if nodes and len(each) == len(nodes):
        result = run(call, {node: fact.value for node, fact in facts.items() if fact is not None})
        value = _as_ndim(result, ndim)
        where = torch.isfinite(value)
        for fact in each:
            where = where & _as_ndim(fact.where, ndim)
    if call.op == "mul":  # zero times anything
        for fact in each:
            where = where | _as_ndim(fact.where & (fact.value == 0), ndim)
    return Constants.of(where, value)


def _as_ndim(x: Tensor, ndim: int) -> Tensor:
    return x.reshape([1] * (ndim - x.ndim) + list(x.shape))


@rule("view", "_unsafe_view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
def reshape(call: Call) -> Outcome:
    """The same entries in other dimensions."""
    if call["dtype"] is not None:  # the same bytes, as other numbers
        return None
    axes, known = call.found(call.node.all_input_nodes[0])
    before = shape_of(call.node.all_input_nodes[0])
    return call.ties.reshape(axes, call.shape), known.reshape(before, call.shape) if known and 0 not in before else None


def _moved(call: Call, order: list[int]) -> Found:
    axes, known = call.found(call.node.all_input_nodes[0])
    return [axes[i] for i in order], known.permute(order) if known else None


@rule("permute")
def permute(call: Call) -> Outcome:
    """Dimensions in another order."""
    return _moved(call, [d % len(call.shape) for d in call["dims"]])


@rule("transpose", "t", "numpy_T", "mT")
def transpose(call: Call) -> Outcome:
    """Two dimensions change places."""
    order = list(range(len(call.shape)))
    if len(order) > 1:
        one, two = (call["dim0"], call["dim1"]) if call.op == "transpose" else (-2, -1)
        order[one], order[two] = order[two], order[one]
    return _moved(call, order)


@rule("unsqueeze")
def unsqueeze(call: Call) -> Outcome:
    """A dimension of size 1 more."""
    axes, known = call.found(call.node_of("self"))
    dim = call["dim"] % len(call.shape)
    axes = [*axes[:dim], call.new_axis(1), *axes[dim:]]
    return axes, Constants(*(x.unsqueeze(dim) for x in known)) if known else None


@rule("squeeze")
def squeeze(call: Call) -> Outcome:
    """Dimensions of size 1 less."""
    axes, known = call.found(call.node_of("self"))
    dims = dims_of(call["dim"], len(axes)) if axes else []
    gone = [d for d in dims if axes[d].size == 1]
    left = [axis for d, axis in enumerate(axes) if d not in gone]
    return left, Constants(*(x.squeeze(gone) for x in known)) if known else None


@rule("expand", "expand_as")
def expand(call: Call) -> Outcome:
    """Dimensions of size 1 repeated."""
    own, known = call.found(call.node.all_input_nodes[0])
    more = len(call.shape) - len(own)
    axes = [call.new_axis(n) for n in call.shape[:more]]
    axes += [axis if axis.size == n else call.new_axis(n) for axis, n in zip(own, call.shape[more:], strict=True)]
    return axes, Constants(*(_as_ndim(x, len(call.shape)) for x in known)) if known else None


@rule("repeat", "tile")
def repeat(call: Call) -> Outcome:
    """The whole tensor several times."""
    own, known = call.found(call.node_of("self"))
    more = len(call.shape) - len(own)
    axes = [call.new_axis(n) for n in call.shape[:more]]
    for axis, n in zip(own, call.shape[more:], strict=True):
        axes.append(axis if axis.size == n else _repeated(call, axis, n, whole=True))
    if known is not None:
        known = Constants(*(_as_ndim(x, len(call.shape)) for x in known))
        known = known.uniform([d for d, axis in enumerate(axes) if d < more or axis is not own[d - more]])
    return axes, known


def _repeated(call: Call, axis: Axis, size: int, whole: bool) -> Axis:
    """An axis several times: one behind the other if `whole`, else each index by itself."""
    if axis.size == 1:
        return call.new_axis(size)
    times, found = call.new_axis(size // axis.size), call.ties.axis(size)
    call.ties.rules.append(Reshaped([times, axis] if whole else [axis, times], [found]))
    return found


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Outcome:
    """Each index of a dimension several times."""
    if not isinstance(call["repeats"], int) or call["dim"] is None:
        return None
    axes, known = call.found(call.node_of("self"))
    dim = call["dim"] % len(axes)
    if known is not None:
        n = call["repeats"]
        known = Constants(*(x if x.shape[dim] == 1 else x.repeat_interleave(n, dim) for x in known))
    return [*axes[:dim], _repeated(call, axes[dim], call.shape[dim], whole=False), *axes[dim + 1 :]], known


@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
def like(call: Call) -> Outcome:
    """A new tensor of the same shape."""
    axes, value = call.axes("self"), call.node.meta["val"]
    if call.op not in ("zeros_like", "ones_like"):
        return axes, None
    fill = torch.zeros if call.op == "zeros_like" else torch.ones
    return axes, Constants.all_of(fill([1] * value.ndim, dtype=value.dtype, device=value.device))


@rule(
    "zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "scalar_tensor", "new_zeros",
    "new_ones", "new_full", "new_empty",
)  # fmt: skip
def made(call: Call) -> Outcome:
    """A new tensor, whose sizes the code says."""
    reason = call.ties.reasons.number(f"{call.place} says how many there are")
    return [call.ties.axis(n, reason) for n in call.shape], None


@rule("select")
def select(call: Call) -> Outcome:
    """One index of a dimension, which has to stay at its place."""
    axes, known = call.found(call.node_of("self"))
    dim = call["dim"] % len(axes)
    call.pin([axes[dim]], f"{call.place} counts on how many there are")
    if known is not None:
        known = Constants(*(x.select(dim, 0 if x.shape[dim] == 1 else call["index"]) for x in known))
    return [*axes[:dim], *axes[dim + 1 :]], known


@rule("unbind")
def unbind(call: Call) -> Outcome:
    """Every index of a dimension by itself."""
    axes, known = call.found(call.node_of("self"))
    dim = (call["dim"] or 0) % len(axes)
    call.pin([axes[dim]], f"{call.place} counts on how many there are")
    left = [*axes[:dim], *axes[dim + 1 :]]
    size = axes[dim].size
    each = (
        [Constants(*x) for x in zip(*(k.unbind(dim) for k in known.spread(dim, size)), strict=True)] if known else None
    )
    return [(left, each[i] if each else None) for i in range(size)]


@rule("slice", "narrow")
def slice_(call: Call) -> Outcome:
    """Some indices of a dimension, which has to stay as it is."""
    axes, known = call.found(call.node_of("self"))
    if call.shape == tuple(axis.size for axis in axes):
        return axes, known
    dim = (call["dim"] or 0) % len(axes)
    call.pin([axes[dim]], f"{call.place} counts on how many there are")
    # Where it ends may depend on what the model is given.
    left = [call.new_axis(call.shape[d]) if d == dim else axis for d, axis in enumerate(axes)]
    return left, known.uniform([dim]) if known else None


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def split(call: Call) -> Outcome:
    """A dimension in parts, one behind the other."""
    axes, known = call.found(call.node_of("self"))
    dim = (call["dim"] or 0) % len(axes)
    sizes = [x.shape[dim] for x in call.node.meta["val"]]
    parts = [call.ties.axis(n) for n in sizes]
    call.ties.rules.append(Joined(axes[dim], parts))
    facts: list[Constants | None] = [None] * len(sizes)
    if known is not None:
        pieces = zip(*(x.split(sizes, dim) for x in known.spread(dim, axes[dim].size)), strict=True)
        facts = [Constants.of(*piece) for piece in pieces]
    return [([*axes[:dim], part, *axes[dim + 1 :]], fact) for part, fact in zip(parts, facts, strict=True)]


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Outcome:
    """One behind the other; an empty tensor of one dimension, which torch ignores, is no part."""
    nodes = [node for node in call["tensors"] if shape_of(node) != (0,)]
    dim = (call["dim"] or 0) % len(call.shape)
    each = [call.found(node) for node in nodes]
    axes = list(each[0][0])
    for own, _ in each[1:]:
        for d, axis in enumerate(own):
            if d != dim:
                axes[d].join(axis)
    if len(each) == 1:
        return each[0]
    whole = call.ties.axis(call.shape[dim])
    call.ties.rules.append(Joined(whole, [own[dim] for own, _ in each]))
    axes[dim] = whole
    return axes, _cat_known(call, each, dim)


def _cat_known(call: Call, each: list[Found], dim: int) -> Constants | None:
    if not any(known for _, known in each):
        return None
    sizes = [own[dim].size for own, _ in each]
    device, dtype, ndim = call.node.meta["val"].device, call.node.meta["val"].dtype, len(call.shape)
    none = Constants(*(torch.zeros([1] * ndim, dtype=t, device=device) for t in (torch.bool, dtype)))
    full = [(known or none).spread(dim, n) for n, (_, known) in zip(sizes, each, strict=True)]
    sides = []
    for parts in zip(*full, strict=True):
        wide = [max(x.shape[d] for x in parts) for d in range(ndim)]
        sides.append(
            torch.cat([x.expand([x.shape[d] if d == dim else wide[d] for d in range(ndim)]) for x in parts], dim)
        )
    return Constants.of(sides[0], sides[1].to(dtype))


@rule("stack")
def stack(call: Call) -> Outcome:
    """Along a new dimension."""
    dim = (call["dim"] or 0) % len(call.shape)
    each = [call.found(node) for node in call["tensors"]]
    axes = call.broadcast([own for own, _ in each], [n for d, n in enumerate(call.shape) if d != dim])
    apart: list[Found] = []
    for own, known in each:
        wide = [*own[:dim], call.new_axis(1), *own[dim:]]
        apart.append((wide, Constants(*(x.unsqueeze(dim) for x in known)) if known else None))
    return [*axes[:dim], call.new_axis(call.shape[dim]), *axes[dim:]], _cat_known(call, apart, dim)


@rule("index", "index_select")
def index(call: Call) -> Outcome:
    """Entries picked along the first dimensions, or along one, by a tensor of positions."""
    axes, _ = call.found(call.node_of("self"))
    if call.op == "index_select":
        at = [call["dim"] % len(axes)]
    else:
        at = [d for d, node in enumerate(call["indices"]) if node is not None]
    text = f"{call.place} picks from them by position"
    for node in call.node.all_input_nodes[1:]:
        call.pin(call.found(node)[0], text)
    call.pin([axes[d] for d in at], text)
    more = len(call.shape) - (len(axes) - len(at))
    if at != list(range(at[0], at[0] + len(at))):
        call.pin(axes, text)
        return [call.ties.axis(n, call.ties.reasons.number(text)) for n in call.shape], None
    new = [call.new_axis(n) for n in call.shape[at[0] : at[0] + more]]
    return [*axes[: at[0]], *new, *axes[at[0] + len(at) :]], None
