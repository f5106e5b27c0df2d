"""Writes metrics: one JSON line a step and an epoch, and to trackers. What is on the device stays there until a flush."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from spartan.app.runs import read_metric
from spartan.app.train.processes import Processes
from spartan.app.train.trackers import Tracker, shown, trackers


def _end_of(path: Path, offset: int) -> int:
    """Where the lines end that belong to a checkpoint, which says that it was at `offset`; what is amiss is told.

    Never further than there are lines: bytes that somebody cut off are not made up, and half a line would spoil the
    next one.
    """
    end = damaged = 0
    with path.open("rb") as file:
        for line in file:
            if end + len(line) > offset or not line.endswith(b"\n"):
                break
            end += len(line)
            damaged += read_metric(line) is None
    trouble = [f"{damaged} of its lines cannot be read"] if damaged else []
    if end < offset:
        trouble.append(f"it has {end:,} of the {offset:,} bytes that belong to the checkpoint")
    if trouble:
        how = "the run goes on, and its report lacks what is gone"
        print(f"warning: {path} is damaged: {' and '.join(trouble)}; {how}", file=sys.stderr)
    return end


class Metrics:
    """Writes metrics.jsonl, and to trackers; a step only appends to a list.

    Of several processes the first writes; the others give their losses for the mean.

    Args:
        folder: the run's.
        offset: where a resumed run's metrics.jsonl goes on.
        us: the processes.
        tracker: "none", "wandb" or "mlflow", beside TensorBoard.
        recipe: what a tracker is told of the run.
    """

    def __init__(
        self,
        folder: Path,
        offset: int | None = None,
        us: Processes = Processes(),  # noqa: B008
        tracker: str = "none",
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        self._us = us
        self._pending: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._trackers: list[Tracker] = []
        self.last_loss = math.nan
        if us.first:
            self._file = (folder / "metrics.jsonl").open("ab")
            if offset is not None:
                # What a killed run wrote after its last checkpoint will be written again.
                self._file.truncate(_end_of(folder / "metrics.jsonl", offset))
            self._trackers = trackers(tracker, folder, recipe or {})

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._us.alone:
            self._pending.clear()  # the others may be gone, and no mean can be had without them
        self.sync()
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.close(finished=kind is None)

    def step(self, loss: Tensor, **values: Any) -> None:
        """Note a step; numbers may still be on their way."""
        self._pending.append({"kind": "step", **values, "loss": loss})

    def epoch(self, **values: Any) -> None:
        """Write an epoch."""
        self.flush()
        keys = ("train_loss", "test_loss", "bits_per_byte", "top1", "top5", "images_per_s", "density")
        self._write({"kind": "epoch", **values}, keys)
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
            self._write(values, ("loss", "lr", "target_density", "density", "beta"))
        self.last_loss = steps[-1]["loss"]
        for tracker in self._trackers:
            tracker.flush()

    def _write(self, values: dict[str, Any], keys: tuple[str, ...]) -> None:
        """A line of the file, and what trackers show of it."""
        if self._file is not None:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self._file.write((json.dumps(finite) + "\n").encode())  # JSON has no NaN: it becomes null
        for tracker in self._trackers:
            tracker.log(shown(values, keys), values["step"])

    def sync(self) -> int:
        """Everything on disk; returns how many bytes the file has."""
        self.flush()
        if self._file is None:
            return 0
        self._file.flush()
        for tracker in self._trackers:
            tracker.flush()
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)
