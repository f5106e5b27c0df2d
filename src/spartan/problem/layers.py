"""Recognises the layers whose weights are made sparse by default, and reads which axes of a weight are which.

Layers of other libraries are known by what they have, not by their class, which would have to be imported.
"""

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from spartan.problem.axes import PLAIN, Axes

# What `find_targets` says that it looks for.
DEFAULT = "Linear, Conv*d, transformers' Conv1D, MultiheadAttention, LSTM, GRU, RNN and stacked experts"
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# Words that tell experts from the other tensors of three dimensions, and words that tell what is no weight of theirs.
_EXPERTS = ("expert", "moe")
_NO_EXPERTS = ("bias", "embed", "token", "position", "router", "norm", "scale")
_COUNTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts")


def bare_name(attribute: str) -> str:
    """The weight that a hook of nn.utils.prune or weight_norm makes from a parameter of this name."""
    return attribute.removesuffix("_orig").removesuffix("_v")


def axes_of(owner: nn.Module, own_name: str, attribute: str, parameter: Tensor) -> Axes | None:
    """How the axes of a layer's weight read; None where the parameter is no weight that becomes sparse by default.

    Weights are: those of Linear, convolutions, MultiheadAttention, LSTM, GRU, RNN and their cells; the 2-D `weight` of a
    transformers' Conv1D (inputs × outputs), and of any module that has `in_features` and `out_features` of those sizes;
    and experts, which are tensors of three dimensions, (experts, a, b), all larger than 1, if

    - they are the `weight` of a module whose `in_features` and `out_features` are the sizes a, b; or
    - the name or the class of the module, or the parameter's name, speaks of experts ("expert", "moe"), or the module
      has a number of experts (`num_experts`) that is the first size; and the parameter's name speaks of nothing else
      (bias, embed, token, position, router, norm, scale).

    Positional embeddings, class tokens and tables of relative positions are none of these.

    Args:
        owner: the module that has the parameter.
        own_name: the name that the module has in the one around it.
        attribute: the parameter's name in the module.
        parameter: the parameter.
    """
    name = bare_name(attribute)
    if isinstance(owner, nn.MultiheadAttention):
        return PLAIN if name in _ATTENTION else None
    if isinstance(owner, (nn.RNNBase, nn.RNNCellBase)):
        return PLAIN if name.startswith("weight_") else None
    if isinstance(owner, _ConvNd) or (isinstance(owner, nn.Linear) and isinstance(parameter, UninitializedParameter)):
        return PLAIN if name == "weight" else None
    if isinstance(parameter, UninitializedParameter):
        return None
    if name == "weight" and (found := _by_sizes(owner, tuple(parameter.shape))):
        return found
    if isinstance(owner, nn.Linear):
        return PLAIN if name == "weight" else None
    return expert_axes(owner) if _is_expert(owner, own_name, attribute, tuple(parameter.shape)) else None


def axes_if_named(owner: nn.Module, parameter: Tensor) -> Axes:
    """How the axes read of a parameter that is a target only because `include` names it.

    One of three dimensions is a stack of matrices, unless a convolution has it.
    """
    stacked = parameter.ndim == 3 and not _is_convolution(owner)
    return expert_axes(owner) if stacked else PLAIN


def expert_axes(owner: nn.Module) -> Axes:
    """A stack of matrices; transformers' experts say in `is_transposed` which of their axes are the inputs."""
    swapped = getattr(owner, "is_transposed", None)
    return Axes(swapped=bool(swapped), stacked=True, known=isinstance(swapped, bool))


def is_embedding(owner: nn.Module) -> bool:
    """Whether a module looks rows up in a table."""
    return isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) or hasattr(owner, "num_embeddings")


def _is_convolution(owner: nn.Module) -> bool:
    return isinstance(owner, _ConvNd) or hasattr(owner, "kernel_size")


def _by_sizes(owner: nn.Module, shape: tuple[int, ...]) -> Axes | None:
    """The axes of a weight whose module says how many inputs and outputs it has."""
    if any(kind.__name__ == "Conv1D" for kind in type(owner).__mro__) and len(shape) == 2:
        return Axes(swapped=True) if getattr(owner, "nf", None) == shape[1] else None
    sides = getattr(owner, "out_features", None), getattr(owner, "in_features", None)
    stacked = len(shape) == 3 and shape[0] > 1
    if _is_convolution(owner) or (len(shape) != 2 and not stacked) or shape[-2:] not in (sides, sides[::-1]):
        return None
    return Axes(swapped=shape[-2:] != sides, stacked=stacked)


def _is_expert(owner: nn.Module, own_name: str, attribute: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter holds a matrix for each of several experts."""
    if len(shape) != 3 or min(shape) < 2 or _is_convolution(owner) or is_embedding(owner):
        return False
    if isinstance(owner, nn.Bilinear) or any(word in attribute.lower() for word in _NO_EXPERTS):
        return False
    names = (type(owner).__name__.lower(), own_name.lower(), attribute.lower())
    if any("norm" in name for name in names[:2]):
        return False
    counted = any(getattr(owner, count, None) == shape[0] for count in _COUNTS)
    return counted or any(word in name for word in _EXPERTS for name in names)
