"""The registry: every method with its name, its paper and what it does. Help, docs and tests are made from it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from spartan.methods.base import Method
from spartan.problem.patterns import Pattern

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
    return cls


def entries() -> Iterator[Entry]:
    """Every registered method, by name."""
    for name in sorted(_ENTRIES):
        yield _ENTRIES[name]


def as_method(method: str | Method | type[Method]) -> Method:
    """A method from its name, its class or itself."""
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        return method()
    if isinstance(method, str) and method in _ENTRIES:
        return _ENTRIES[method].cls()
    near = difflib.get_close_matches(str(method), _ENTRIES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"method={method!r} is unknown; accepted: {', '.join(sorted(_ENTRIES))}, or a Method object.{hint}"
    )


def check_together(method: Method, pattern: Pattern) -> None:
    """ValueError with the reason where a method and a pattern make no sense together."""
    if pattern.rows is not None and method.refuses_nm:
        others = ", ".join(entry.name for entry in entries() if not entry.refuses_nm)
        raise ValueError(
            f"method={method.name!r} does not go with pattern={pattern!r}: {method.refuses_nm}; these do: {others}"
        )
