"""Rules of products: linear layers, convolutions, attention, embeddings, and matrices in general."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from spartan.shrink.axes import Axis, Reshaped, WeightedSum
from spartan.shrink.constants import Constants
from spartan.shrink.rules.base import Call, Outcome, rule


def _multiply(
    call: Call, names: tuple[str, str, str], dim: int, outputs: Axis, turned: Callable[[Tensor], Tensor],
    groups: int = 1, plain: bool = True, mixed: Sequence[int] = (),
) -> Constants | None:  # fmt: skip
    """Add the rule for what a product with a weight reads; what of its output is constant.

    Args:
        call: the product; its weight is the same whatever the model is given.
        names: of the arguments that are input, weight and bias.
        dim: the dimension of the input that it sums over, and of the output that it writes.
        outputs: the axis that it writes.
        turned: gives the weight as outputs × inputs of a group × anything.
        groups: of inputs and outputs.
        plain: whether a constant input gives a constant output, at the borders too.
        mixed: dimensions along which an output is computed from several places.
    """
    axis, known, bias = call.axes(names[0])[dim], call.known(names[0]), call[names[2]]
    weight = call.known(names[1])
    assert weight is not None
    varies, constant = torch.ones(axis.size, dtype=torch.bool), torch.zeros(axis.size, dtype=torch.double)
    if known is not None:
        varies, constant = known.by_index(dim, axis.size)
    single = call[names[1]] in call.survey.owned
    reading = WeightedSum(
        inputs=axis, outputs=outputs, weight=weight.value, turned=turned, groups=groups, varies=varies,
        constant=constant, into_bias=plain and bias in call.survey.owned, into_weight=single and groups == 1,
        weight_node=call[names[1]], bias_node=bias,
        reason=call.ties.reasons.number(f"{call.module} reads what they are part of"),
    )  # fmt: skip
    call.ties.rules.append(reading)
    known = known.uniform(mixed) if known is not None and mixed else known
    return _constant_outputs(call, reading, known, dim, bias, plain)


def _constant_outputs(
    call: Call, reading: WeightedSum, known: Constants | None, dim: int, bias: Node | None, plain: bool
) -> Constants | None:
    """Outputs all of whose inputs with a weight are constants; where borders differ (not `plain`), only zeros count."""
    added = call.found(bias)[1] if bias is not None else None
    if bias is not None and (added is None or not added.complete):
        return None
    weight = reading.turned(reading.weight)
    entries = weight.reshape(*weight.shape[:2], -1)
    nonzero, sums = (x.reshape(reading.groups, -1, x.shape[1]) for x in ((entries != 0).any(2), entries.sum(2)))
    ndim, size = len(call.shape), reading.inputs.size
    if known is None:
        where = torch.zeros([1] * ndim, dtype=torch.bool, device=weight.device)
        known = Constants(where, where.to(weight.dtype))
    sure, value = (x.movedim(dim, -1) for x in known.spread(dim, size))

    def summed(x: Tensor, weights: Tensor) -> Tensor:
        x = x.unflatten(-1, (reading.groups, -1)).to(weights.dtype)
        return torch.einsum("...gi,goi->...go", x, weights).flatten(-2).movedim(-1, dim)

    # An output is known if there is a weight for no input that is not.
    where = summed(~sure, nonzero.float()) == 0
    if not plain:
        inside = where
        where = summed(~sure | (value != 0), nonzero.float()) == 0
        value = torch.zeros_like(value)
        rim = (inside & ~where).movedim(dim, -1).reshape(-1, reading.outputs.size).all(0)
        text = f"they are constant, but not at the borders, because of the padding or the stride of {call.module}"
        call.ties.borders.append((reading.outputs, rim.cpu(), call.ties.reasons.number(text)))
    total = summed(value, sums)
    if added is not None:
        total = total + added.value.reshape([-1] + [1] * (-dim - 1))
    return Constants.of(where, total)


@rule("linear")
def linear(call: Call) -> Outcome:
    """x Wᵀ + b."""
    known, axes = call.known("weight"), call.axes("input")
    if known is None or not known.complete or len(call.shape_of("weight")) != 2:
        return None
    outputs, inputs = call.axes("weight")
    axes[-1].join(inputs)
    if call["bias"] is not None:
        outputs.join(call.axes("bias")[-1])
    return [*axes[:-1], outputs], _multiply(call, ("input", "weight", "bias"), -1, outputs, _as_it_is)


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


@rule("addmm")
def addmm(call: Call) -> Outcome:
    """b + x W."""
    known, (rows, inner) = call.known("mat2"), call.axes("mat1")
    plain = call["beta"] == call["alpha"] == 1 and call.shape_of("self") == call.shape[-1:]
    if known is None or not known.complete or not plain:
        return None
    inputs, outputs = call.axes("mat2")
    inner.join(inputs)
    outputs.join(call.axes("self")[0])
    return [rows, outputs], _multiply(call, ("mat1", "mat2", "self"), -1, outputs, Tensor.t)


@rule("conv1d", "conv2d", "conv3d")
def convolution(call: Call) -> Outcome:
    """A product over channels and neighbouring pixels; padding adds zeros around, whatever a channel's constant is."""
    known, axes = call.known("weight"), call.axes("input")
    if known is None or not known.complete:
        return None
    outputs, inputs, *kernel = call.axes("weight")
    pixels = list(range(-len(kernel), 0))
    call.pin([*kernel, *(axes[d] for d in pixels)])
    if call["bias"] is not None:
        outputs.join(call.axes("bias")[0])
    dim, groups = -len(kernel) - 1, call["groups"]
    _tie_groups(call, axes[dim], inputs, outputs, groups)
    padding = call["padding"]
    plain = padding == "valid" or (not isinstance(padding, str) and not any(padding))
    found = _multiply(call, ("input", "weight", "bias"), dim, outputs, _as_it_is, groups, plain, pixels)
    return [*axes[:dim], outputs, *(call.new_axis(call.shape[d]) for d in pixels)], found


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: Call) -> Outcome:
    """Each pixel spreads over several of the output, of which those at the borders and between have fewer."""
    known, axes = call.known("weight"), call.axes("input")
    if known is None or not known.complete:
        return None
    inputs, outputs, *kernel = call.axes("weight")  # all inputs × the outputs of a group
    pixels, groups = list(range(-len(kernel), 0)), call["groups"]
    call.pin([*kernel, *(axes[d] for d in pixels)])
    dim = -len(kernel) - 1
    whole = outputs
    if groups == 1:
        axes[dim].join(inputs)
    else:
        whole = call.ties.axis(call.shape[dim])
        axes[dim].join(inputs)
        _tie_groups(call, whole, outputs, inputs, groups)
    if call["bias"] is not None:
        whole.join(call.axes("bias")[0])

    def turned(weight: Tensor) -> Tensor:
        if groups == 1:
            return weight.transpose(0, 1)
        return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)

    found = _multiply(call, ("input", "weight", "bias"), dim, whole, turned, groups, False, pixels)
    return [*axes[:dim], whole, *(call.new_axis(call.shape[d]) for d in pixels)], found


def _tie_groups(call: Call, whole: Axis, of_a_group: Axis, other: Axis, groups: int) -> None:
    """Groups go as a whole, from both sides, or the same index goes from every group."""
    if groups == 1:
        whole.join(of_a_group)
        return
    if groups == whole.size == other.size:  # a channel is a group
        whole.join(other)
        call.ties.counts.append((call.node, "groups", whole))
        return
    group = call.ties.axis(groups)
    call.ties.counts.append((call.node, "groups", group))
    call.ties.rules.append(Reshaped([whole], [group, of_a_group]))
    call.ties.rules.append(Reshaped([other], [group, call.ties.axis(other.size // groups)]))


@rule("embedding")
def embedding(call: Call) -> Outcome:
    """Rows of a table; a column is a constant if all its entries are equal."""
    rows, columns = call.axes("weight")
    call.pin([rows], f"{call.place} picks from them by position")
    known = call.known("weight")
    axes = [*call.axes("indices"), columns]
    if known is None or (column := known.uniform([0])) is None:
        return axes, None
    return axes, Constants(*(x.reshape([1] * (len(axes) - 1) + [-1]) for x in column))


@rule("baddbmm")
def baddbmm(call: Call) -> Outcome:
    """Products of matrices, added to another."""
    a, b = call.axes("batch1"), call.axes("batch2")
    a[-1].join(b[-2])
    call.pin([a[-1]], f"{call.place} sums over them")
    product = [*call.broadcast([a[:1], b[:1]], call.shape[:1]), a[1], b[2]]
    return call.broadcast([product, call.axes("self")], call.shape), None


@rule("matmul", "mm", "bmm")
def matmul(call: Call) -> Outcome:
    """Rows times columns; where one side is a weight, that is a linear layer."""
    left, right = "self", "other" if call.op == "matmul" else "mat2"
    a, b = call.axes(left), call.axes(right)
    if len(a) < 2 or len(b) < 2:
        return None
    one, two = call.known(left), call.known(right)
    a[-1].join(b[-2])
    axes = [*call.broadcast([a[:-2], b[:-2]], call.shape[:-2]), a[-2], b[-1]]
    if two is not None and two.complete and len(b) == 2 and not (one and one.complete):
        return axes, _multiply(call, (left, right, ""), -1, b[-1], Tensor.t)
    if one is not None and one.complete and len(a) == 2:
        return axes, _multiply(call, (right, left, ""), -2, a[-2], _as_it_is)
    inner = torch.ones(a[-1].size, dtype=torch.bool)
    for known, dim in ((one, -1), (two, -2)):
        if known is not None:
            varies, constant = known.by_index(dim, inner.numel())
            inner &= varies | (constant != 0)
    a[-1].pin(call.ties.reasons.number(f"{call.place} sums over them"), inner)
    return axes, _product_known(call, one, two, call.node_of(left) in call.survey.stochastic)


def _product_known(call: Call, one: Constants | None, two: Constants | None, weighted_mean: bool) -> Constants | None:
    """Zero rows and zero columns; and columns of one constant, if what is taken of them is a weighted mean."""
    value, ndim = call.node.meta["val"], len(call.shape)

    def aligned(x: Tensor) -> Tensor:
        return x.reshape([1] * (ndim - x.ndim) + list(x.shape))

    columns = two.uniform([-2]) if two is not None else None
    if columns is not None and weighted_mean:
        return Constants(*map(aligned, columns))
    rows = one.uniform([-1]) if one is not None else None
    where = torch.zeros([1] * ndim, dtype=torch.bool, device=value.device)
    for known in (rows, columns):
        if known is not None:
            where = where | aligned(known.where & (known.value == 0))
    return Constants.of(where, torch.zeros([1] * ndim, dtype=value.dtype, device=value.device))


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Outcome:
    """Softmax(q kᵀ · scale + mask) v: a mean of the values, so that values of one constant give that constant."""
    q, k, v = call.axes("query"), call.axes("key"), call.axes("value")
    call.pin([q[-1], k[-1], v[-1]], f"they make up the width of the attention heads in {call.module}")
    q[-1].join(k[-1])
    k[-2].join(v[-2])
    call.pin([k[-2]], f"{call.place} is over all of them")
    heads = -3
    if call["enable_gqa"] and len(q) > 2 and q[heads].size != k[heads].size:
        k[heads].join(v[heads])
        each = call.new_axis(q[heads].size // k[heads].size)
        call.ties.rules.append(Reshaped([q[heads]], [k[heads], each]))
        lead = [*call.broadcast([q[:heads], k[:heads], v[:heads]], call.shape[:heads]), q[heads]]
    else:
        lead = call.broadcast([q[:-2], k[:-2], v[:-2]], call.shape[:-2])
    if call["attn_mask"] is not None:
        call.broadcast([[*lead, q[-2], k[-2]], call.axes("attn_mask")], [*call.shape[:-1], k[-2].size])
    known = call.known("value")
    known = known.uniform([-2]) if known is not None else None
    if known is not None and lead[heads + 2 :] and lead[-1].size != v[heads].size:
        times = lead[-1].size // v[heads].size
        known = Constants(*(x if x.shape[heads] == 1 else x.repeat_interleave(times, heads) for x in known))
    return [*lead, q[-2], v[-1]], known
