"""Metrics: one JSON line a step and an epoch, and TensorBoard. What is on the device stays there until a flush."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Metrics:
    """Writes metrics.jsonl and event files; a step only appends to a list."""

    def __init__(self, folder: Path, offset: int | None = None) -> None:
        self._path = folder / "metrics.jsonl"
        self._pending: list[dict[str, Any]] = []
        self._file = self._path.open("ab")
        if offset is not None:
            # What a killed run wrote after its last checkpoint will be written again.
            self._file.truncate(offset)
        self._board = _tensorboard(folder)
        self.last_loss = math.nan

    def step(self, loss: Tensor, **values: Any) -> None:
        """Note a step; numbers may still be on their way."""
        self._pending.append({"kind": "step", **values, "loss": loss})

    def epoch(self, **values: Any) -> None:
        """Write an epoch."""
        self.flush()
        self._write({"kind": "epoch", **values})
        if self._board is not None:
            for key in ("train_loss", "test_loss", "top1", "top5", "images_per_s", "density"):
                self._board.add_scalar(f"epoch/{key}", values[key], values["step"])
        self.sync()

    def flush(self) -> None:
        """Fetch what is still on the device, all at once, and write the steps."""
        if not self._pending:
            return
        waiting = [(i, key) for i, step in enumerate(self._pending) for key, v in step.items() if isinstance(v, Tensor)]
        found = torch.stack([self._pending[i][key].detach().double() for i, key in waiting]).tolist()
        for (i, key), value in zip(waiting, found, strict=True):
            self._pending[i][key] = int(value) if key == "passes" else value
        for values in self._pending:
            self._write(values)
            if self._board is not None:
                for key in ("loss", "lr", "target_density", "density", "beta"):
                    if values.get(key) is not None:
                        self._board.add_scalar(f"step/{key}", values[key], values["step"])
        self.last_loss = self._pending[-1]["loss"]
        self._pending.clear()

    def _write(self, values: dict[str, Any]) -> None:
        self._file.write((json.dumps(_finite(values)) + "\n").encode())

    def sync(self) -> int:
        """Everything on disk; returns how many bytes the file has."""
        self.flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Flush and close."""
        self.sync()
        self._file.close()
        if self._board is not None:
            self._board.close()


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: it becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _tensorboard(folder: Path) -> Any:
    """TensorBoard's writer where it is installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))
