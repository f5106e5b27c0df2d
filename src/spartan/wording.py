"""Words for people: the name that was probably meant, what an error says and who raised it, and tables as text."""

import difflib
import traceback
from collections.abc import Iterable, Sequence


def nearest(word: object, words: Iterable[object]) -> str:
    """A hint at the accepted word that a misspelt one is nearest to; empty where none is near.

    Example:
        >>> nearest("spartn", ["imp", "spartan"]), nearest("x", ["imp"])
        (' (did you mean spartan?)', '')
    """
    near = difflib.get_close_matches(str(word), map(str, words), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none; torch adds its stack in further lines."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def one_line(error: BaseException) -> str:
    """All of an error's text in one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def raised_in(error: BaseException) -> str:
    """The name of the module whose code raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")) if frames else ""


def printable(text: str) -> str:
    """Text that others wrote, fit for a terminal: whatever could steer one (escape sequences, line ends) is a question mark.

    Example:
        >>> printable("\\x1b[2Jweight")
        '?[2Jweight'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def shortened(text: str, most: int = 80) -> str:
    """Text that others wrote, with what a line has no room for left out of its middle.

    Example:
        >>> shortened("a" * 1000, most=9)
        'aaa … aaa'
    """
    half = (most - 3) // 2
    return printable(text if len(text) <= most else f"{text[:half]} … {text[-half:]}")


def alike_together(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows about layers, of which those that differ in numbers of their names and in the last column alone are one.

    That of the first one is shown, since what is measured differs a little from layer to layer.

    Example:
        >>> alike_together([["b.0.fc", "rows", "3 ms"], ["head", "dense", ""], ["b.1.fc", "rows", "4 ms"]])
        [['b.*.fc (2 layers)', 'rows', '3 ms'], ['head', 'dense', '']]
    """
    groups: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for row in rows:
        parts = row[0].split(".")
        named = not all(map(str.isdigit, parts))  # numbers alone say more than a star
        kind = ".".join("*" if named and part.isdigit() else part for part in parts)
        groups.setdefault((kind, *row[1:-1]), []).append(row)
    found = []
    for (kind, *_), members in groups.items():
        name = members[0][0] if len(members) == 1 else f"{kind} ({len(members)} layers)"
        found.append([name, *members[0][1:]])
    return found


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """A table as lines, its first `left` columns (all, where that is not given) to the left and the others to the right.

    Example:
        >>> print("\\n".join(aligned([["layer", "zeros"], ["fc", "5"]], left=1)))
        layer  zeros
        fc         5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if left is None else left
    sides = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    return ["  ".join(side(c, n) for side, c, n in zip(sides, row, widths, strict=True)).rstrip() for row in rows]
