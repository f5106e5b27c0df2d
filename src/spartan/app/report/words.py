"""Writes numbers as people read them, and small pieces of HTML."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spartan.app.runs import number

NONE = "–"
_RIGHT = ' class="num"'
# Text that sorts by itself; what is shown and what it sorts by; or these and HTML of its own.
Cell = str | tuple[str, Any] | tuple[str, Any, str]


def escape(value: Any) -> str:
    """Text that is safe in HTML, in attributes too."""
    return html.escape(str(value), quote=True)


def percent(value: Any, digits: int = 2) -> str:
    """0.9234 is 92.34%; here and below, what is no number is a dash."""
    return NONE if number(value) is None else f"{100 * value:.{digits}f}%"


def count(value: Any) -> str:
    """1,234,567."""
    return NONE if number(value) is None else f"{round(value):,}"


def short(value: Any, unit: str = "") -> str:
    """1.23 M, 41.1 M, 3.6 G."""
    if number(value) is None:
        return NONE
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def size(value: Any) -> str:
    """Bytes with a unit."""
    return short(value, "B")


def duration(value: Any) -> str:
    """Seconds as hours and minutes."""
    if number(value) is None or value < 60:
        return NONE if number(value) is None else f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def ratio(part: Any, whole: Any) -> float | None:
    """part / whole where both are known."""
    a, b = number(part), number(whole)
    return None if a is None or not b else a / b


def figure(value: Any, show: Callable[..., str], *options: Any) -> Cell:
    """A number as `show` writes it, sorted by its value."""
    return show(value, *options), number(value)


def table(rows: Sequence[Mapping[str, Cell]], caption: str, text: int = 1) -> str:
    """A sortable table of rows, each its cells by column; the first `text` columns are words and the others numbers."""
    head = "".join(
        f'<th scope="col" aria-sort="none"{"" if i < text else _RIGHT}><button type="button">{escape(c)}</button></th>'
        for i, c in enumerate(rows[0])
    )
    body = "".join("<tr>" + "".join(_cell(c, i >= text) for i, c in enumerate(row.values())) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="sortable">'
        f'<caption class="hidden">{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _cell(cell: Cell, right: bool) -> str:
    cell = (cell, cell) if isinstance(cell, str) else cell
    key = "" if cell[1] is None else escape(cell[1])
    inner = cell[2] if len(cell) == 3 else escape(cell[0])
    return f'<td data-key="{key}"{_RIGHT if right else ""}>{inner}</td>'
