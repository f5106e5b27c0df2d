"""Public names come when they are asked for, and stay what they are whatever is imported besides."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spartan


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_of_them_are_there() -> None:
    assert all(hasattr(spartan, name) for name in spartan.__all__)
    assert set(spartan.__all__) <= set(dir(spartan))
    names: dict[str, object] = {}
    exec("from spartan import *", names)
    assert set(spartan.__all__) <= set(names)


def test_unknown_names_are_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'spartan' has no attribute 'Sparsfier'"):
        _ = spartan.Sparsfier  # type: ignore[attr-defined]


@pytest.mark.parametrize("modules_first", [True, False], ids=["modules first", "functions first"])
def test_functions_are_not_hidden_by_their_modules(modules_first: bool) -> None:
    """`spartan.prune` is a function, and `spartan/prune.py` the module it is in: whoever is imported first."""
    names = ["prune", "shrink", "verify", "passes"]
    modules = "; ".join(f"import spartan.{name}" for name in names)
    functions = f"import spartan; before = [{', '.join(f'spartan.{name}' for name in names)}]"
    after = (
        f"import sys; modules = [sys.modules['spartan.' + n] for n in {names}]; "
        f"after = [getattr(m, n) for m, n in zip(modules, {names})]; from spartan import {', '.join(names)}; "
        f"print(before == after == [{', '.join(names)}], all(map(callable, after)))"
    )
    assert run("; ".join([modules, functions, after] if modules_first else [functions, modules, after])) == "True True"


def test_methods_is_a_package_that_can_be_called() -> None:
    told = run(
        "import spartan.methods; from spartan.methods import RigL; print(len(list(spartan.methods())), RigL.name)"
    )
    assert told == f"{len(list(spartan.methods()))} rigl"


def test_help_and_version_need_no_torch() -> None:
    """Also of every command by itself; importing torch would take seconds."""
    code = (
        "import sys; from typer.testing import CliRunner; from spartan.app.cli import app; run = CliRunner().invoke; "
        "names = [c.callback.__name__ for c in app.registered_commands]; "
        "asked = [['--help'], ['--version'], *([name, '--help'] for name in names)]; "
        "codes = [run(app, args, prog_name='spartan').exit_code for args in asked]; "
        "heavy = [m for m in ('torch', 'numpy', 'yaml', 'safetensors') if m in sys.modules]; "
        "print(len(names), set(codes), heavy)"
    )
    count, rest = run(code).split(" ", 1)
    assert int(count) >= 11
    assert rest == "{0} []"
