"""Writes files whole or not at all: a reader, or a crash at any moment, finds the old file or the new one."""

import contextlib
import os
from pathlib import Path
from typing import Any


def replace_file(path: Path, *parts: Any) -> None:
    """Write bytes to a file beside the old one, flush it to the disk, and only then put it in the old one's place.

    A link is followed, and the permissions of a file that was there are kept. What cannot be written is an OSError, and
    leaves nothing behind.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder")
    aside = target.with_name(f".{target.name[:200]}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with aside.open("xb") as file:
            for part in parts:
                file.write(part)
            flush(file)
        if target.exists():
            aside.chmod(target.stat().st_mode & 0o777)
        aside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def flush(file: Any) -> None:
    """Make what was written to an open file last."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make new names in a folder last; some file systems refuse, and then have no need of it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
