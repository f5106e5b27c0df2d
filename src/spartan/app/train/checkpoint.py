"""Checkpoints that survive anything: written aside, flushed, renamed; checked when read; the last two kept.

One is a file `step-….pt`, or a folder `step-….shards` of parts that several processes wrote (`shards.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from spartan.wording import first_line

KEEP = 2
# In a folder of parts: what belongs to no weight, and the digests of all files.
PLAIN, DIGESTS = "run.pt", "digests.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text says which, and what is still good."""


class _Hashing:
    """A file that knows the digest of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_atomically(path: Path, data: bytes) -> None:
    """A small file, whole or not at all."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was renamed in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    home = folder / "checkpoints"
    return sorted([*home.glob("step-*.pt"), *home.glob("step-*.shards")], reverse=True)


def save(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint; older ones are removed only when it is safely there."""
    home = folder / "checkpoints"
    path = home / f"step-{step:08d}.pt"
    aside = path.with_suffix(".tmp")
    try:
        home.mkdir(exist_ok=True)
        with aside.open("wb") as raw:
            file = _Hashing(raw)
            torch.save(dict(state), file)  # type: ignore[arg-type]
            raw.flush()
            os.fsync(raw.fileno())
        write_atomically(path.with_suffix(".sha256"), file.digest.hexdigest().encode())
        aside.replace(path)
        sync_folder(home)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        aside.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
    prune(folder)
    return path


def cannot_write(path: Path, error: BaseException) -> CheckpointError:
    """The error that a checkpoint could not be written."""
    older = [p.name for p in checkpoints(path.parent.parent)]
    good = f"the last good one is {older[0]}" if older else "there is none before it"
    return CheckpointError(f"could not write checkpoint {path}: {first_line(error)}; {good}")


def prune(folder: Path) -> None:
    """Keep the newest checkpoints only."""
    for old in checkpoints(folder)[KEEP:]:
        if old.is_dir():
            going = old.with_suffix(".old.tmp")  # what is half removed must not look like a checkpoint
            shutil.rmtree(going, ignore_errors=True)
            old.rename(going)
            shutil.rmtree(going, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)
            old.with_suffix(".sha256").unlink(missing_ok=True)


def load_newest(folder: Path, device: torch.device) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The newest checkpoint that can be read, and a line for each newer one that cannot; None if there is none."""
    trouble: list[str] = []
    for path in checkpoints(folder):
        try:
            return path, load(path, device), trouble
        except CheckpointError as error:
            trouble.append(str(error))
    if trouble:
        raise CheckpointError("no checkpoint can be read: " + "; ".join(trouble) + ". Nothing was changed.")
    return None


def load(path: Path, device: torch.device, check: bool = True) -> dict[str, Any]:
    """The state in one checkpoint, checked; of a folder of parts, what belongs to no weight."""
    try:
        expected = path.with_suffix(".sha256")
        if path.is_dir():
            for name, wanted in json.loads((path / DIGESTS).read_text()).items() if check else ():
                if digest(path / name) != wanted:
                    raise CheckpointError(f"{path.name} is damaged: the checksum of {name} does not match")
            path = path / PLAIN
        elif check and expected.is_file() and digest(path) != expected.read_text().strip():
            raise CheckpointError(f"{path.name} is damaged: its checksum does not match")
        return torch.load(path, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        # A truncated zip surfaces as almost any exception; whatever it is, the file is of no use.
        raise CheckpointError(f"{path.name} cannot be read: {first_line(error)}") from error


def digest(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
