"""Writes checkpoints in parts: every process its own, and only when all have done so is there a checkpoint."""

import dataclasses
import datetime
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from spartan import Sparsifier
from spartan.app.train import checkpoint
from spartan.app.train.checkpoint import CheckpointError, Plain, cannot_write, digest, remove_old, write_state
from spartan.app.train.processes import Processes, timeout_seconds
from spartan.disk import replace_file, sync_folder
from spartan.state.sharded import save_sharded


class ShardedCheckpoints:
    """Writes folders `step-….shards`: parts by torch.distributed.checkpoint, plain values, and digests of it all.

    A folder has its name only when it is complete. In the background, training goes on while files are written; what
    goes wrong there is raised when the next checkpoint is due.
    """

    def __init__(self, us: Processes, background: bool) -> None:
        self._us = us
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1) if background else None
        if background:
            # What is agreed upon in the background must not get mixed up with what training sends.
            limit = datetime.timedelta(seconds=timeout_seconds())
            self._us = dataclasses.replace(us, group=dist.new_group(backend="gloo", timeout=limit))

    def save(
        self, out: Path, step: int, plain: Plain, model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier
    ) -> None:
        """Write a checkpoint; every process must call it. In the background, this takes as long as a copy does."""
        self.wait()
        path = out / "checkpoints" / f"step-{step:08d}.shards"
        aside, trouble, writing = path.with_suffix(".tmp"), "", None
        self._us.decide(lambda: _start_folder(path, plain))
        try:
            writing = save_sharded(aside, model, optimizer, sparsifier, self._thread is not None, self._us.group)
        except (OSError, RuntimeError, CheckpointException) as error:
            trouble = _why_not_written(path, error)
        if self._thread is None:
            self._finish(path, None, trouble)
        else:
            self._pending = self._thread.submit(self._finish, path, writing, trouble)

    def wait(self) -> None:
        """Until the last checkpoint is complete."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _finish(self, path: Path, writing: Future[Any] | None, trouble: str) -> None:
        """Digests, by each process of the files it wrote, and then the name; or the same error on all."""
        aside, mine = path.with_suffix(".tmp"), {}
        try:
            if writing is not None:
                writing.result()
            # torch names parts by rank, and all else is the first one's
            own = f"__{self._us.rank}_"
            files = (p for p in aside.iterdir() if p.name.startswith(own) or (self._us.first and p.name[:2] != "__"))
            mine = {p.name: digest(p) for p in files}
        except (OSError, RuntimeError, CheckpointException) as error:
            trouble = trouble or _why_not_written(path, error)
        everyone = self._us.gather((trouble, mine))
        trouble = self._us.decide(lambda: _put_in_place(aside, path, everyone))
        if trouble:
            raise CheckpointError(trouble)


def _why_not_written(path: Path, error: BaseException) -> str:
    """Why a checkpoint could not be written; torch wraps what happened on each process."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(cannot_write(path, error))


def _start_folder(path: Path, plain: Plain) -> None:
    """A folder aside, with the plain values; what a killed process left of another is removed."""
    try:
        path.parent.mkdir(exist_ok=True)
        for left in path.parent.glob("*.tmp"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        aside = path.with_suffix(".tmp")
        aside.mkdir()
        write_state(aside / checkpoint.PLAIN, plain)
    except (OSError, RuntimeError) as error:
        raise cannot_write(path, error) from error


def _put_in_place(aside: Path, path: Path, everyone: Sequence[tuple[str, dict[str, str]]]) -> str:
    """Give a complete folder its name and remove older ones; or remove it, and say why it is not complete."""
    trouble = next((words for words, _ in everyone if words), "")
    try:
        if not trouble:
            digests = {name: value for _, mine in everyone for name, value in mine.items()}
            replace_file(aside / checkpoint.DIGESTS, json.dumps(digests).encode())
            sync_folder(aside)
            if path.exists():  # one that was damaged, since the run has come here again
                path.rename(path.with_suffix(".old.tmp"))
            aside.rename(path)
            sync_folder(path.parent)
            shutil.rmtree(path.with_suffix(".old.tmp"), ignore_errors=True)
            remove_old(path.parent.parent)
    except OSError as error:
        trouble = _why_not_written(path, error)
    if trouble:
        shutil.rmtree(aside, ignore_errors=True)
    return trouble
