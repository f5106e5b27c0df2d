"""Cuts channels, heads and columns that are all zero out of a model (`spartan.shrink`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import Tensor, nn

if TYPE_CHECKING:
    from spartan.shrink.report import ShrinkReport

M = TypeVar("M", bound=nn.Module)
Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@overload
def shrink(model: M, example_inputs: Inputs, *, report: Literal[False] = False) -> M: ...


@overload
def shrink(model: M, example_inputs: Inputs, *, report: Literal[True]) -> "tuple[M, ShrinkReport]": ...


def shrink(model: M, example_inputs: Inputs, *, report: bool = False) -> "M | tuple[M, ShrinkReport]":
    """A narrower model with the same outputs: channels, heads and columns that are all zero are cut out.

    What is cut is dead: it is computed from zeros only (a constant that it still gives, from a bias, goes into the bias
    or the weights of whoever reads it), or everything that reads it has zeros for it. The result is a plain model of
    the same class, in eval mode; it is run beside the one given, on the example inputs and on fresh ones, before it is
    returned. The model given stays as it is, so that for a while both take memory.

    Args:
        model: in eval mode, with whole tensors; wrappers (DDP, torch.compile) are taken off.
        example_inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments. Small ones do:
            the result takes inputs of every size that the model takes.
        report: whether to return a `ShrinkReport` too: what was cut, and what could not be and why.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
        >>> model = spartan.prune(model, 0.75, pattern=spartan.Channel(), include="0.weight")
        >>> shrink(model, torch.randn(2, 8))
        Sequential(
          (0): Linear(in_features=8, out_features=16, bias=True)
          (1): ReLU()
          (2): Linear(in_features=16, out_features=4, bias=True)
        )
    """
    from spartan.shrink.search import cut  # torch.export takes a second to import

    smaller, told = cut(model, example_inputs)
    return (smaller, told) if report else smaller
