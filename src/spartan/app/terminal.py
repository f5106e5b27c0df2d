"""Shows tables, status lines and how far a run has come: with bars on a terminal, as plain lines in pipes and logs."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from spartan.app.runs import measure_of
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


class Display(ProgressBar):
    """A progress bar with loss, score, density, β and the time left; quiet under CI or a pipe."""

    def __init__(self, epochs: int, total_steps: int, quiet: bool) -> None:
        self._epochs, self._total, self._quiet = epochs, total_steps, quiet
        self._score, self._drawn = "", 0.0
        shown = not quiet and not is_plain()
        super().__init__(shown, "starting", total_steps, ("MofNCompleteColumn", "TimeRemainingColumn"))

    def step(self, step: int, loss: float, progress: Callable[[], Mapping[str, Any]]) -> None:
        """A step is done; the bar is redrawn, with the sparsifier's progress, ten times a second at most."""
        if self._bar is None or (time.monotonic() - self._drawn < 0.1 and step < self._total):
            return
        self._drawn, now = time.monotonic(), progress()
        beta = f" β {now['beta']:.3g}" if now["beta"] is not None else ""
        text = f"loss {loss:.3f}{self._score} density {now['target_density']:.2%}{beta}"
        self._bar.update(self._task, completed=step, description=text)

    def epoch(self, record: dict[str, Any]) -> None:
        """An epoch is done."""
        by = measure_of(record)
        self._score = f" {by.name} {by.text(record[by.key])}"
        if self._bar is None and not self._quiet:
            beta = f"  β {record['beta']:.3g}" if record["beta"] is not None else ""
            print(
                f"epoch {record['epoch']}/{self._epochs}  loss {record['train_loss']:.4f}  "
                f"test loss {record['test_loss']:.4f} {self._score}  density {record['density']:.3%}{beta}  "
                f"{record['images_per_s']:.0f} {by.unit}/s",
                flush=True,
            )
