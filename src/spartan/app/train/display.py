"""What a person sees while a run trains: a bar in a terminal, a plain line per epoch elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from spartan import Sparsifier
from spartan.app.train.config import Config


class Display:
    """A progress bar with loss, accuracy, density, β and the time left; quiet under CI or a pipe."""

    def __init__(self, config: Config, total_steps: int, quiet: bool) -> None:
        self._config, self._total, self._quiet = config, total_steps, quiet
        self._accuracy, self._drawn = "", 0.0
        self._bar: Any = None
        if not quiet and sys.stdout.isatty() and not os.environ.get("CI"):
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("starting", total=total_steps)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, loss: float, sparsifier: Sparsifier) -> None:
        """A step is done; the bar is redrawn ten times a second at most."""
        if self._bar is None or (time.monotonic() - self._drawn < 0.1 and step < self._total):
            return
        self._drawn = time.monotonic()
        now = sparsifier.progress()
        beta = f" β {now['beta']:.3g}" if now["beta"] is not None else ""
        text = f"loss {loss:.3f}{self._accuracy} density {now['target_density']:.2%}{beta}"
        self._bar.update(self._task, completed=step, description=text)

    def epoch(self, record: dict[str, Any]) -> None:
        """An epoch is done."""
        self._accuracy = f" top-1 {record['top1']:.2%}"
        if self._bar is None and not self._quiet:
            beta = f"  β {record['beta']:.3g}" if record["beta"] is not None else ""
            print(
                f"epoch {record['epoch']}/{self._config.epochs}  loss {record['train_loss']:.4f}  "
                f"test loss {record['test_loss']:.4f}  top-1 {record['top1']:.2%}  density {record['density']:.3%}{beta}  "
                f"{record['images_per_s']:.0f} images/s",
                flush=True,
            )
