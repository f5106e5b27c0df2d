"""`spartan doctor`, extras that are missing, and other projects' packages called `spartan`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import spartan
from spartan.app import doctor, extras
from spartan.app.cli import app

SOURCES = Path(spartan.__file__).parent.parent
# Takes the place of packages that are not to be found, in a process of its own.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in {names!r} else find(name, *more)
import spartan_sparsity
sys.argv = ["spartan", *{args!r}]
spartan_sparsity.main()
"""


def run(*args: str, without: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(names=without, args=args)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCES), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_doctor_says_what_is_here(tmp_path: Path) -> None:
    done = run("doctor", SPARTAN_NO_KERNELS="1", SPARTAN_CACHE=str(tmp_path / "none yet"))
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        rf"  spartan {spartan.__version__}, {re.escape(str(SOURCES))}/spartan",
        rf"  torch {re.escape(metadata.version('torch'))}",
        r"  cpu: \d+ cores, torch uses \d+ threads",
        r"  cpu, single weights: chunks",
        r"  cpu, NM\(2, 4\): chunks",
        r"  cpu: plain torch: SPARTAN_NO_KERNELS=1",
        rf"  kernels and their times: {re.escape(str(tmp_path))}/none yet, 0 files, 0 bytes",
        r"  SPARTAN_NO_KERNELS=1",
        r"no problem found",
    ):
        assert re.search(f"^{line}$", done.stdout, re.MULTILINE), (line, done.stdout)


def test_doctor_needs_no_extra_and_names_those_that_are_missing() -> None:
    done = run("doctor", without=("typer", "rich", "yaml", "safetensors", "timm", "onnx"), SPARTAN_NO_KERNELS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  app: without pyyaml, rich, safetensors, typer: pip install 'spartan-sparsity[app]'" in done.stdout
    assert "  vision: without timm: pip install 'spartan-sparsity[vision]'" in done.stdout
    done = run("recipes", without=("typer",))
    assert done.returncode == 1
    assert done.stderr.strip() == "the command line needs typer: pip install 'spartan-sparsity[app]'"


def test_a_command_names_the_extra_it_misses() -> None:
    done = run("recipes", without=("yaml",))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == "error: No module named 'yaml': pip install 'spartan-sparsity[app]'"


def test_doctor_without_torch() -> None:
    done = run("doctor", without=("torch",))
    assert done.returncode == 1
    assert "problem: torch cannot be imported (No module named 'torch')" in done.stdout


def test_what_fails_on_this_machine_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(spartan, "Sparsifier", broken)
    problems: list[str] = []
    lines = list(doctor._solvers(problems))
    assert lines[0] == "cpu, single weights: fails, see below"
    assert problems[0] == "single weights on cpu: RuntimeError: no kernel image is available"


def test_extras_are_those_of_the_package() -> None:
    found = extras.extras()
    assert {"app", "vision", "plot", "onnx", "bench"} <= set(found)
    assert "dev" not in found
    assert extras.how_to_get("sklearn") == "pip install 'spartan-sparsity[app]'"


def install(folder: Path, name: str, init: str) -> None:
    """What pip leaves of a distribution with a package `spartan`."""
    (folder / "spartan").mkdir(parents=True, exist_ok=True)
    (folder / "spartan" / "__init__.py").write_text(init)
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("spartan\n")


def test_another_package_in_our_place_is_named(tmp_path: Path) -> None:
    """As PyPI's spartan-py, whose `spartan/__init__.py` is what Python finds, or has overwritten ours."""
    install(tmp_path, "spartan-py", "from .request import Request")
    done = run("train", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCES}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == (
        f"error: `import spartan` finds {tmp_path}/spartan, which is not this library but that of spartan-py: python -m pip "
        "uninstall spartan-py, then python -m pip install --force-reinstall --no-deps spartan-sparsity"
    )


def test_a_folder_of_the_users_in_our_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "spartan").mkdir()
    (tmp_path / "spartan" / "__init__.py").write_text("")
    done = run("--version", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCES}")
    assert done.returncode == 1
    assert "which is not this library but another package or a folder of yours" in done.stderr


def test_doctor_names_another_package_beside_ours(tmp_path: Path) -> None:
    install(tmp_path, "spartan-py", "from .request import Request")
    done = run("doctor", PYTHONPATH=f"{SOURCES}{os.pathsep}{tmp_path}", SPARTAN_NO_KERNELS="1")
    assert done.returncode == 1
    assert "problem: spartan-py also brings a package spartan, and may have put files into" in done.stdout


def test_files_that_are_gone_name_the_other_package(tmp_path: Path) -> None:
    """The other package was uninstalled over ours, or ours is there only in part."""
    install(tmp_path, "spartan-py", (SOURCES / "spartan" / "__init__.py").read_text())
    code = "import spartan; spartan.Sparsifier"
    path = f"{tmp_path}{os.pathsep}{SOURCES}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert "ImportError: No module named 'spartan.sparsifier': spartan-py also brings a package spartan" in done.stderr


def test_the_command_is_on_the_list() -> None:
    assert "doctor" in [command.callback.__name__ for command in app.registered_commands if command.callback]
