"""Catches SIGTERM and Ctrl-C, so that a run ends after the current step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupted(SystemExit):
    """The run was asked to stop; it is saved, and the text says how to go on."""

    def __init__(self, out: Path, number: int) -> None:
        super().__init__(128 + number)
        self.message = f"stopped by {signal.Signals(number).name}; continue with: spartan train --resume {out}"


class StopSignals:
    """Remembers the first stop signal instead of dying of it; a second one ends the process as usual.

    Not so where a launcher looks after several processes: Ctrl-C reaches each of them from the terminal and once more
    from the launcher, who ends by force those that take too long.
    """

    def __init__(self, launched: bool = False, numbers: Sequence[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._launched, self._numbers = launched, numbers
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._before[number] = signal.signal(number, self._catch)
        return self

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        if not self._launched:
            signal.signal(number, self._before[number])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
