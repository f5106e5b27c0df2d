"""Rules of norms, pooling, reductions, and whatever else computes an entry from several places."""

from collections.abc import Sequence

import torch

from spartan.shrink.axes import Axis, Joined, Reshaped
from spartan.shrink.constants import Constants
from spartan.shrink.rules.base import Call, Outcome, dims_of, rule

_POOLS = [f"{kind}_pool{n}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)]
_UPSAMPLES = ["upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"]
_UPSAMPLES += ["upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"]
# What gives a constant back that it is given everywhere; and what gives zero for zeros, where sums or borders change others.
_KEEPS_CONSTANTS = {"mean", "amax", "amin", "roll", "flip", *_POOLS, *_UPSAMPLES}
_KEEPS_ZEROS = {"sum", "cumsum", "pad", "constant_pad_nd", "avg_pool1d", "avg_pool2d", "avg_pool3d"}


def _constants(call: Call, known: Constants | None, dims: Sequence[int]) -> Constants | None:
    """What is left of the constants where these dimensions are mixed."""
    known = known.uniform(dims) if known is not None else None
    if known is None:
        return None
    keeps = call.op in _KEEPS_CONSTANTS
    if call.op.startswith("avg_pool"):  # which counts the zeros of its padding in
        keeps = not any(call["padding"]) and not call["ceil_mode"] and call["divisor_override"] is None
    if call.op == "pad" and call["mode"] != "constant":  # which repeats what is there
        keeps = True
    if keeps:
        return known
    if call.op not in _KEEPS_ZEROS or call["value"]:  # of padding
        return None
    return Constants.of(known.where & (known.value == 0), torch.zeros_like(known.value))


@rule(*_POOLS, *_UPSAMPLES, "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
def pool(call: Call) -> Outcome:
    """Over pixels, channel by channel."""
    axes, known = call.found(call.node.all_input_nodes[0])
    pixels = range(-int(call.op.removesuffix("_with_indices")[-2]), 0)
    call.pin([axes[d] for d in pixels])
    left = [*axes[: pixels[0]], *(call.new_axis(call.shape[d]) for d in pixels)]
    several = not isinstance(call.node.meta["val"], torch.Tensor)
    kept = _constants(call, known, pixels)
    return [(left, kept), (left, None)] if several else (left, kept)


@rule("roll", "flip", "pad", "constant_pad_nd", "cumsum")
def within(call: Call) -> Outcome:
    """Along some dimensions, which stay as they are."""
    axes, known = call.found(call.node_of("self"))
    if "pad" in call.op:
        dims = [len(axes) - 1 - i // 2 for i, n in enumerate(call["pad"]) if n]
    else:
        dims = dims_of(call["dims"] if call.op in ("roll", "flip") else call["dim"], len(axes))
    call.pin([axes[d] for d in set(dims)], f"{call.place} counts on how many there are")
    left = [call.new_axis(call.shape[d]) if d in dims else axis for d, axis in enumerate(axes)]
    return left, _constants(call, known, dims)


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(call: Call) -> Outcome:
    """Channels to pixels: those of one place go together."""
    axes, _ = call.found(call.node_of("self"))
    call.pin(axes[-2:])
    size = call.shape[-3]
    channels = call.ties.axis(size)
    more, less = (axes[-3], channels) if call.op == "pixel_shuffle" else (channels, axes[-3])
    if less.size == 1:
        call.pin([more, less])
    else:
        call.ties.rules.append(Reshaped([more], [less, call.new_axis(more.size // less.size)]))
    return [*axes[:-3], channels, *(call.new_axis(n) for n in call.shape[-2:])], None


@rule("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "cudnn_batch_norm")
def batch_norm(call: Call) -> Outcome:
    """Each channel by itself, with statistics that are part of the model."""
    if call["training"] or call["running_mean"] is None:
        return None
    axes = call.axes("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call[name] is not None:
            axes[1].join(call.axes(name)[0])
    found = axes, _batch_norm_constants(call, len(axes))
    return found if call.op == "batch_norm" else [found, *[([axis], None) for axis in (axes[1], axes[1])]]


def _batch_norm_constants(call: Call, ndim: int) -> Constants | None:
    """Constants scaled and shifted; and the shift alone where the scale is zero."""
    values: dict[str, torch.Tensor] = {}
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call[name] is not None:
            known = call.known(name)
            if known is None or not known.complete:
                return None
            values[name] = known.value.reshape([1, -1, *[1] * (ndim - 2)])
    scale = (values["running_var"] + call["eps"]).rsqrt() * values.get("weight", 1.0)
    shift = values.get("bias", 0.0) - values["running_mean"] * scale
    given = call.known("input")
    if given is None:
        return Constants.of(scale == 0, torch.zeros_like(scale) + shift)
    return Constants.of((scale == 0) | given.where, given.value * scale + shift)


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call) -> Outcome:
    """Statistics of a few dimensions, which change with their size; where the weight is zero, the bias is left."""
    axes, _ = call.found(call.node_of("input"))
    last = len(call["normalized_shape"])
    call.pin(axes[-last:], f"{call.module} ({call.op}) takes the mean over all of them")
    weight = call.known("weight") if call["weight"] is not None else None
    bias = call.known("bias") if call["bias"] is not None else None
    for name in ("weight", "bias"):
        if call[name] is not None:
            for axis, own in zip(axes[-last:], call.axes(name), strict=True):
                axis.join(own)
    if weight is None or not weight.complete or (call["bias"] is not None and not (bias and bias.complete)):
        return axes, None
    lead = [1] * (len(axes) - last)
    where = (weight.value == 0).reshape(lead + list(weight.value.shape))
    value = torch.zeros_like(weight.value) if bias is None else bias.value
    return axes, Constants.of(where, value.reshape(where.shape))


@rule("group_norm")
def group_norm(call: Call) -> Outcome:
    """Statistics of each group of channels: they go by groups."""
    axes, count = call.axes("input"), call["num_groups"]
    call.pin(axes[2:])
    groups = call.ties.axis(count)
    call.ties.counts += [(call.node, "num_groups", groups), (call.node, "num_channels", axes[1])]
    call.ties.rules.append(Reshaped([axes[1]], [groups, call.new_axis(axes[1].size // count)]))
    for name in ("weight", "bias"):
        if call[name] is not None:
            axes[1].join(call.axes(name)[0])
    return axes, _affine_only(call, len(axes))


@rule("instance_norm")
def instance_norm(call: Call) -> Outcome:
    """Statistics of each channel."""
    axes, _ = call.found(call.node_of("input"))
    call.pin(axes[2:])
    call.ties.counts.append((call.node, "num_features", axes[1]))
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call[name] is not None:
            axes[1].join(call.axes(name)[0])
    return axes, _affine_only(call, len(axes))


def _affine_only(call: Call, ndim: int) -> Constants | None:
    """Where a norm's weight is zero its bias is left."""
    if call["weight"] is None or call["bias"] is None:
        return None
    weight, bias = call.known("weight"), call.known("bias")
    if weight is None or bias is None or not (weight.complete and bias.complete):
        return None
    shape = [1, -1, *[1] * (ndim - 2)]
    return Constants.of((weight.value == 0).reshape(shape), bias.value.reshape(shape))


@rule("prelu")
def prelu(call: Call) -> Outcome:
    """A slope for each channel, or one for all."""
    axes, known = call.found(call.node_of("self"))
    slopes, weight = call.axes("weight"), call.known("weight")
    if slopes and slopes[0].size > 1:
        axes[1].join(slopes[0])
    if known is None or weight is None or not weight.complete:
        return axes, None
    slope = weight.value.reshape([1, -1, *[1] * (len(axes) - 2)] if len(axes) > 1 else [-1])
    return axes, Constants.of(known.where, torch.where(known.value > 0, known.value, known.value * slope))


@rule("glu")
def glu(call: Call) -> Outcome:
    """The first half times the second half's sigmoid."""
    axes, known = call.found(call.node_of("self"))
    dim = call["dim"] % len(axes)
    half = call.ties.axis(call.shape[dim])
    call.ties.rules.append(Joined(axes[dim], [half, half]))
    if known is not None:
        halves = zip(*(x.chunk(2, dim) for x in known.spread(dim, axes[dim].size)), strict=True)
        first, second = (Constants.of(*x) for x in halves)
        known = None
        if first is not None:
            gate = torch.zeros_like(first.value) if second is None else second.value.sigmoid()
            sure = first.value == 0 if second is None else (first.value == 0) | second.where
            known = Constants.of(first.where & sure, first.value * gate)
    return [*axes[:dim], half, *axes[dim + 1 :]], known


@rule("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax")
def softmax(call: Call) -> Outcome:
    """Every entry depends on all along a dimension."""
    axes, _ = call.found(call.node_of("self"))
    dim = call["dim"] % len(axes)
    call.pin([axes[dim]], f"{call.place} is over all of them")
    if dim == len(axes) - 1 and "log" not in call.op:
        call.survey.stochastic.add(call.node)
    return axes, None


@rule(
    "mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "prod", "logsumexp", "linalg_vector_norm",
    "argmax", "argmin", "any", "all",
)  # fmt: skip
def reduce(call: Call) -> Outcome:
    """Over some dimensions, whose size counts."""
    if len([node for node in call.node.all_input_nodes if node.meta.get("val") is not None]) != 1:
        return None  # max and min of two tensors
    axes, known = call.found(call.node.all_input_nodes[0])
    dims = dims_of(call["dim"], len(axes))
    several = not isinstance(call.node.meta["val"], torch.Tensor)
    whole = len(call.shape) == len(axes)
    if len(call.shape) not in (len(axes), len(axes) - len(dims)):
        return None
    call.pin([axes[d] for d in dims], f"{call.place} is over all of them")
    left: list[Axis] = []
    for d, axis in enumerate(axes):
        if d not in dims:
            left.append(axis)
        elif whole:
            left.append(call.new_axis(1))
    kept = _constants(call, known, dims)
    if kept is not None and not whole:
        kept = Constants(*(x.squeeze(dims) for x in kept))
    return [(left, None) for _ in call.node.meta["val"]] if several else (left, kept)
