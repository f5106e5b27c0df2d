"""Says which runs of a sweep can still end within a time, by how long the others took."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from spartan.app.runs import epochs_done
from spartan.app.train.config import Config
from spartan.app.train.setup import passes_a_step

if TYPE_CHECKING:
    from spartan.app.train.sweep import Job

STOP_SECONDS = 10.0  # before the end: runs that have not ended by then are asked to save and stop
KILL_SECONDS = 3.0  # before the end: those that have not done so go on from their last checkpoint
LAST_RUNS = 4  # that say how long the next one takes
START_SECONDS = 15.0  # of a run: imports, data, compiling


def seconds_alone(config: Config, seconds_an_epoch: float = 1.0) -> float:
    """About how long a run takes when nothing else runs: its start, and its epochs once for every pass over a batch."""
    passes = 1
    with suppress(ValueError):  # a recipe that cannot run says so when it is tried
        passes = passes_a_step(config)
    return START_SECONDS + config.epochs * passes * seconds_an_epoch


class TimeLimit:
    """The time that a sweep has.

    What a run takes is not known before some have ended, since several share a machine. So it is `guess` times what ended
    runs took over what was guessed of them: the slowest of the last few of the same recipe, or of all where there is none.
    The first ones also fill the caches of compilers, and are forgotten.

    Args:
        end: when it is over, by time.monotonic().
        guess: how long a run takes alone; only ratios count.
    """

    def __init__(self, end: float, guess: "Callable[[Job], float]" = lambda job: seconds_alone(job.config)) -> None:
        self.end, self._guess = end, guess
        self._ratios: dict[str, deque[float]] = {}  # by recipe

    @property
    def left(self) -> float:
        """Seconds until runs are asked to stop."""
        return self.end - STOP_SECONDS - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nothing may run any longer."""
        return time.monotonic() > self.end - KILL_SECONDS

    def add(self, job: "Job", seconds: float) -> None:
        """A run took so long, from its start to its end."""
        self._ratios.setdefault(job.recipe, deque(maxlen=LAST_RUNS)).append(seconds / self._guess(job))

    def allows(self, job: "Job") -> bool:
        """Whether a run that is started now would probably end in time; with nothing known yet, it may try."""
        if self.left <= 0:
            return False
        if not self._ratios:
            return True
        ratio = max(self._ratios.get(job.recipe) or itertools.chain(*self._ratios.values()))
        remaining = 1.0 - epochs_done(job.folder) / job.config.epochs
        return remaining * ratio * self._guess(job) <= self.left
