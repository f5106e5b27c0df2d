"""Measures the most memory that is in use while something runs."""

import re
from contextlib import suppress
from pathlib import Path

import torch


class PeakMemory:
    """From its making on: of a CUDA device what torch has allocated there, else what the process holds in main memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):  # Linux only; elsewhere the peak is unknown
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def where(self) -> str:
        """A CUDA device, or "process" for main memory."""
        return str(self._device) if self._device.type == "cuda" else "process"

    def bytes(self) -> int | None:
        """The peak so far; None where the system does not tell."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        with suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            return None if found is None else int(found[1]) * 1024
        return None
