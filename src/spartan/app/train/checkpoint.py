"""Writes and reads checkpoints that survive anything: made aside, flushed, renamed; checked when read; the last two kept.

One is a file `step-….pt`, or a folder `step-….shards` of parts that several processes wrote (`shards.py`).
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spartan.disk import flush, replace_file, sync_folder
from spartan.wording import first_line

Plain = dict[str, Any]  # what a checkpoint holds beside the state of model, optimizer and sparsifier
KEEP = 2
# In a folder of parts: what belongs to no weight, and the digests of all files.
PLAIN, DIGESTS = "run.pt", "digests.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text says which, and what is still good."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    home = folder / "checkpoints"
    return sorted([*home.glob("step-*.pt"), *home.glob("step-*.shards")], reverse=True)


def save(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint; older ones are removed only when it is safely there."""
    path = folder / "checkpoints" / f"step-{step:08d}.pt"
    aside = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        write_state(aside, state)
        replace_file(path.with_suffix(".sha256"), digest(aside).encode())
        aside.replace(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        aside.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
    remove_old(folder)
    return path


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Tensors and plain values as a file, safely on the disk."""
    with path.open("wb") as file:
        torch.save(dict(state), file)
        flush(file)


def cannot_write(path: Path, error: BaseException) -> CheckpointError:
    """The error that a checkpoint could not be written."""
    older = [p.name for p in checkpoints(path.parent.parent)]
    good = f"the last good one is {older[0]}" if older else "there is none before it"
    return CheckpointError(f"could not write checkpoint {path}: {first_line(error)}; {good}")


def remove_old(folder: Path) -> None:
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
        beside, expected = path.with_suffix(".sha256"), {}
        if path.is_dir():
            expected = {path / name: value for name, value in json.loads((path / DIGESTS).read_text()).items()}
        elif beside.is_file():
            expected = {path: beside.read_text().strip()}
        for file, wanted in expected.items() if check else ():
            if digest(file) != wanted:
                which = "its checksum" if file == path else f"the checksum of {file.name}"
                raise CheckpointError(f"{path.name} is damaged: {which} does not match")
        return torch.load(path / PLAIN if path.is_dir() else path, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        # A truncated zip surfaces as almost any exception; whatever it is, the file is of no use.
        raise CheckpointError(f"{path.name} cannot be read: {first_line(error)}") from error


def digest(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
