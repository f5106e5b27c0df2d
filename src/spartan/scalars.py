"""Takes numbers as people have them: Python's, numpy's, and arrays or tensors of no dimension."""

import functools
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

C = TypeVar("C", bound=type[Any])
_PLAIN = (float, int, bool, str, type(None))
_SHORT = {2: torch.float16, 4: torch.float32}  # numpy's by their bytes


def as_plain(value: Any) -> Any:
    """A number of numpy's, or an array or tensor of no dimension, as Python's own; all else as it is.

    One of fewer digits than Python's is the decimal number that it was written as, so that shares and counts come out
    whole. Inside tables and lists likewise. What a number may be is for others to check.

    Example:
        >>> as_plain(torch.tensor(0.3)), as_plain(torch.tensor(7)), as_plain({"fc.*": torch.tensor(0.5)}), as_plain("erk")
        (0.3, 7, {'fc.*': 0.5}, 'erk')
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {key: as_plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(as_plain, value))
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    number = value.item()
    if hasattr(number, "dtype"):  # numpy's longdouble stays what it is
        return float(number)
    short = value.dtype if isinstance(value, Tensor) else _SHORT.get(value.dtype.itemsize)
    if not isinstance(number, float) or short is None or short == torch.float64 or not math.isfinite(number):
        return number
    digits = -round(math.log10(torch.finfo(short).resolution))  # so many survive in this type
    written = float(f"{number:.{digits}g}")
    return written if torch.tensor(written, dtype=short).item() == number else number


def takes_numbers(cls: C) -> C:
    """Class decorator: the class is made with plain numbers, whichever kind it is given."""
    init = cls.__init__

    @functools.wraps(init)
    def with_plain_numbers(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *map(as_plain, args), **{name: as_plain(value) for name, value in kwargs.items()})

    cls.__init__ = with_plain_numbers
    return cls
