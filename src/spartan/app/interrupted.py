"""How a run that was asked to stop ends; apart from what trains, so that the command line knows it without torch."""

import signal
from pathlib import Path


class Interrupted(SystemExit):
    """The run was asked to stop; it is saved, and the text says how to go on."""

    def __init__(self, out: Path, number: int) -> None:
        super().__init__(128 + number)
        self.message = f"stopped by {signal.Signals(number).name}; continue with: spartan train --resume {out}"
