"""Shows how far pruning has come: a bar on a terminal where rich is installed, else plain lines."""

import importlib.util
import sys
from typing import Any, Self


class PruningProgress:
    """On stderr, with a step for every layer.

    Args:
        shown: None shows it on a terminal only.
        total: how many layers there are.
    """

    def __init__(self, shown: bool | None, total: int) -> None:
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._total, self._done = total, 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._shown and sys.stderr.isatty() and importlib.util.find_spec("rich"):
            from rich import console, progress

            columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
            self._bar = progress.Progress(
                *columns, progress.TimeRemainingColumn(), console=console.Console(stderr=True), transient=True
            )
            self._task = self._bar.add_task("pruning", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, text: str) -> None:
        """What is being worked on."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif self._shown:
            print(f"pruning: {text}, {self._done} of {self._total} layers done", file=sys.stderr, flush=True)

    def layer_done(self) -> None:
        """One more."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
