"""Shows tables, bars and status lines on a terminal, and plain lines in pipes, files and logs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from spartan.wording import aligned


def is_plain() -> bool:
    """Whether output goes to a file, a pipe or a CI log rather than to a person."""
    return not sys.stdout.isatty() or os.environ.get("CI", "").lower() not in ("", "0", "false")


def print_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """A rich table on a terminal; aligned lines, never cut or wrapped, anywhere else."""
    if is_plain():
        print("\n".join(aligned([header, *cells])))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD)
    for column in header:
        shown.add_column(column, overflow="fold")
    for line in cells:
        shown.add_row(*(Text(cell) for cell in line))
    Console().print(shown)


@contextmanager
def status_line(text: str) -> Iterator[Callable[[str], None]]:
    """A moving line on a terminal while something takes its time; elsewhere a line on stderr every few seconds.

    Gives the function that changes the line.
    """
    if not is_plain():
        from rich.console import Console

        with Console(stderr=True).status(text) as status:
            yield status.update
        return
    printed = time.monotonic()

    def update(text: str) -> None:
        nonlocal printed
        if time.monotonic() - printed > 2:
            print(f"{text} ...", file=sys.stderr, flush=True)
            printed = time.monotonic()

    yield update


class ProgressBar:
    """A bar below what is printed, on a terminal; where it is not `shown`, there is none.

    `columns` names those of `rich.progress` that stand behind the text and the bar.
    """

    def __init__(self, shown: bool, text: str, total: int, columns: Sequence[str]) -> None:
        self._bar: Any = None
        if shown:
            from rich import progress

            after = (getattr(progress, column)() for column in columns)
            self._bar = progress.Progress(progress.TextColumn("{task.description}"), progress.BarColumn(), *after)
            self._task = self._bar.add_task(text, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
