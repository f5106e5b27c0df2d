"""Shows how far a run has come: a bar in a terminal, a plain line per epoch elsewhere."""

from __future__ import annotations

import time
from typing import Any

from spartan import Sparsifier
from spartan.app.terminal import ProgressBar, is_plain
from spartan.app.train.config import Config


class Display(ProgressBar):
    """A progress bar with loss, accuracy, density, β and the time left; quiet under CI or a pipe."""

    def __init__(self, config: Config, total_steps: int, quiet: bool) -> None:
        self._config, self._total, self._quiet = config, total_steps, quiet
        self._accuracy, self._drawn = "", 0.0
        shown = not quiet and not is_plain()
        super().__init__(shown, "starting", total_steps, ("MofNCompleteColumn", "TimeRemainingColumn"))

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
