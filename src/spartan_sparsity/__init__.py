"""Starts the `spartan` command, once it is known whose package `spartan` Python finds.

On PyPI the names `spartan` and `spartan-py` belong to other projects, and both install a package `spartan`: over ours,
where they share a folder. This package has the name that ours has on PyPI, and imports nothing but Python's library.
"""

import importlib.util
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

OURS = "spartan-sparsity"


def other_owners() -> list[str]:
    """The installed distributions, other than this one, that have a package `spartan`."""
    names = packages_distributions().get("spartan", [])
    return sorted({name for name in names if re.sub(r"[-_.]+", "-", name).lower() != OURS})


def found_folder() -> Path | None:
    """The folder in which Python finds a package `spartan`, whosever it is."""
    spec = importlib.util.find_spec("spartan")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def is_ours(folder: Path) -> bool:
    """Whether the package in a folder is this library: its first file names `Sparsifier`, no other's does."""
    return "Sparsifier" in (folder / "__init__.py").read_text("utf-8", errors="replace")


def conflict() -> str:
    """What is wrong where another package `spartan` is installed, and what to do; "" where there is none."""
    folder, others = found_folder(), other_owners()
    remove = f"python -m pip uninstall {' '.join(others)}, then " if others else ""
    remedy = f"{remove}python -m pip install --force-reinstall --no-deps {OURS}"
    if folder is None:
        return f"Python finds no package spartan that it can import: {remedy}"
    whose = " and ".join(others)
    if not is_ours(folder):
        whose = f"that of {whose}" if others else "another package or a folder of yours; move it, or"
        return f"`import spartan` finds {folder}, which is not this library but {whose}: {remedy}"
    return f"{whose} also brings a package spartan, and may have put files into {folder}: {remedy}" if others else ""


def main() -> None:
    """Entry point of `spartan`; `doctor` and `--version` need no extra."""
    folder = found_folder()
    if folder is None or not is_ours(folder):
        raise SystemExit(f"error: {conflict()}")
    if sys.argv[1:] == ["--version"]:
        from spartan import __version__

        print(f"spartan {__version__}")
    elif sys.argv[1:] == ["doctor"]:
        from spartan.app.doctor import doctor

        raise SystemExit(doctor())
    else:
        from spartan.app.cli import main as start

        start()
