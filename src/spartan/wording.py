"""Words for error messages: the name that was probably meant, and what another error says."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
