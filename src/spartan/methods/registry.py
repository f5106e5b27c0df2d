"""The registry: every method with its name, its paper and what it does. Help, docs and tests are made from it."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from spartan.methods.base import Method
from spartan.problem.patterns import Pattern
from spartan.scalars import takes_numbers
from spartan.wording import nearest

T = TypeVar("T", bound=type[Method])


@dataclass(frozen=True)
class Entry:
    """What the registry says about one method."""

    cls: type[Method]
    name: str
    year: int
    summary: str
    mask_rule: str
    gradient_rule: str
    needs: str
    sparse_from: str
    reference: str
    refuses_nm: str


_ENTRIES: dict[str, Entry] = {}


def register(cls: T) -> T:
    """Class decorator: makes a method known by its name."""
    summary = (cls.__doc__ or "").strip().split("\n")[0].rstrip(".")
    if not summary:
        raise ValueError(f"{cls.__name__} has no docstring; its first line is what the registry shows")
    facts = {f: getattr(cls, f) for f in ("name", "year", "mask_rule", "gradient_rule", "needs", "reference")}
    sparse_from = cls.sparse_from if isinstance(cls.sparse_from, str) else "warmup"  # a property: by its settings
    refuses_nm = cls.refuses_nm if isinstance(cls.refuses_nm, str) else ""
    _ENTRIES[cls.name] = Entry(cls=cls, summary=summary, sparse_from=sparse_from, refuses_nm=refuses_nm, **facts)
    return takes_numbers(cls)


def entries() -> Iterator[Entry]:
    """Every registered method, by name."""
    for name in sorted(_ENTRIES):
        yield _ENTRIES[name]


def as_method(method: str | Method | type[Method], arguments: Mapping[str, Any] | None = None) -> Method:
    """The one way from a name or a class, with arguments, to a method; a method that is one already stays as it is.

    ValueError names what is unknown, what was probably meant and what is accepted.

    Example:
        >>> as_method("topkast", {"exploration": 0.1}).exploration
        0.1
        >>> as_method("static", {"sed": 1})
        Traceback (most recent call last):
        ValueError: method_args.sed=1: static has no such argument; accepted: none
    """
    if isinstance(method, Method):
        if arguments:
            raise ValueError(
                f"method_args={dict(arguments)!r} goes with a method's name; {method!r} has its settings already"
            )
        return method
    cls = _ENTRIES[method].cls if isinstance(method, str) and method in _ENTRIES else method
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        known = sorted(_ENTRIES)
        raise ValueError(
            f"method={method!r} is unknown{nearest(method, known)}; accepted: {', '.join(known)}, or a Method object"
        )
    if not arguments:
        return cls()
    accepted = list(inspect.signature(cls).parameters)
    for key, value in arguments.items():
        if key not in accepted:
            raise ValueError(
                f"method_args.{key}={value!r}: {cls.name} has no such argument{nearest(key, accepted)}; "
                f"accepted: {', '.join(accepted) or 'none'}"
            )
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method_args: {error}") from error


def check_together(method: Method, pattern: Pattern) -> None:
    """ValueError with the reason where a method and a pattern make no sense together."""
    if pattern.rows is not None and method.refuses_nm:
        others = ", ".join(entry.name for entry in entries() if not entry.refuses_nm)
        raise ValueError(
            f"method={method.name!r} does not go with pattern={pattern!r}: {method.refuses_nm}; these do: {others}"
        )
