"""Metrics: one JSON line a step and an epoch, and TensorBoard. What is on the device stays there until a flush."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from spartan.app.train.processes import Processes


class Metrics:
    """Writes metrics.jsonl and event files; a step only appends to a list.

    Of several processes the first writes; the others give their losses for the mean.
    """

    def __init__(self, folder: Path, offset: int | None = None, us: Processes = Processes()) -> None:  # noqa: B008
        self._us = us
        self._pending: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._board = None
        self.last_loss = math.nan
        if us.first:
            self._file = (folder / "metrics.jsonl").open("ab")
            if offset is not None:
                # What a killed run wrote after its last checkpoint will be written again.
                self._file.truncate(offset)
            self._board = _tensorboard(folder)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._us.alone:
            self._pending.clear()  # the others may be gone, and no mean can be had without them
        self.close()

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
        # Taken first: should the disk be full, what could not be written is not written again on the way out.
        steps, self._pending = self._pending, []
        losses = self._us.mean_(torch.stack([step["loss"].detach().double() for step in steps]))
        for step, loss in zip(steps, losses, strict=True):
            step["loss"] = loss
        waiting = [(i, key) for i, step in enumerate(steps) for key, v in step.items() if isinstance(v, Tensor)]
        found = torch.stack([steps[i][key].detach().double() for i, key in waiting]).tolist()
        for (i, key), value in zip(waiting, found, strict=True):
            steps[i][key] = int(value) if key == "passes" else value
        for values in steps:
            self._write(values)
            if self._board is not None:
                for key in ("loss", "lr", "target_density", "density", "beta"):
                    if values.get(key) is not None:
                        self._board.add_scalar(f"step/{key}", values[key], values["step"])
        self.last_loss = steps[-1]["loss"]

    def _write(self, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write((json.dumps(_finite(values)) + "\n").encode())

    def sync(self) -> int:
        """Everything on disk; returns how many bytes the file has."""
        self.flush()
        if self._file is None:
            return 0
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Flush and close."""
        self.sync()
        if self._file is not None:
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
