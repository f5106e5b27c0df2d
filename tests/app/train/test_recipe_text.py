"""Recipes that nobody means well, or that an editor spoilt: each is one short line, soon, in files and in --set."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spartan.app.cli import app
from spartan.app.train.config import Config, RecipeError, load_recipe, to_yaml
from spartan.app.train.recipe_text import LARGEST_FILE, MOST_VALUES

NINE = range(9)
BOMB = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join(f'*a{i - 1}' for _ in NINE)}]" for i in range(1, 11))])
MERGE = "b{0}: &b{0} {{k{0}: {{<<: [{1}]}}, <<: *b{2}}}"
MERGES = "\n".join(
    ["b0: &b0 {k: 1}", *(MERGE.format(i, ", ".join(f"*b{i - 1}" for _ in NINE), i - 1) for i in range(1, 30))]
)
# The text of a file, and what is said of it.
FILES: dict[str, tuple[str | bytes, str]] = {
    "an alias bomb": (BOMB, r"more than 10,000 values, aliases \(\*\) counted in full \(line 5, column \d+\)"),
    "a bomb of merges": (MERGES, r"more than 10,000 values"),
    "deep lists": ("model_args: {a: " + "[" * 100_000, "more than 20 levels, one inside the other"),
    "deep tables": ("model_args: " + "{a: " * 100_000, "more than 20 levels"),
    "deep by lines": ("\n".join(" " * i + "a:" for i in range(1000)), "more than 20 levels"),
    "deep questions": ("? " * 10_000, "more than 20 levels"),
    "itself": ("model_args: &a {again: *a}", r"an alias \(\*\) inside of what it stands for \(line 1, column \d+\)"),
    "itself, in a list": ("exclude: &a [*a]", "an alias .* inside of what it stands for"),
    "an unknown alias": ("epochs: *nobody", "found undefined alias 'nobody'"),
    "many values": ("exclude: [" + "a, " * 20_000 + "]", "more than 10,000 values"),
    "a huge file": ("# " + "x" * LARGEST_FILE, "has more than 1,048,576 bytes; no recipe is that long"),
    "digits": ("epochs: " + "9" * 10_000, r"9999.* … .*9999 is too large a number \(line 1, column 9\)"),
    "hexadecimal": ("seed: 0x" + "f" * 10_000, "0xfff.* is too large a number"),
    "octal": ("seed: 0" + "7" * 10_000, "07777.* is too large a number"),
    "a large int": ("seed: 99999999999999999999", "99999999999999999999 is too large a number"),
    "an exponent": ("epochs: 1e400", "epochs: 1e400 is too large a number"),
    "an exponent with a point": ("sparsity: 1.0e+400", r"1.0e\+400 is too large a number"),
    "many epochs": ("epochs: 1e30", "epochs: 1e.30 is too large a number"),
    "too many epochs": ("epochs: 10000000000", "epochs: 10000000000 is too large; it must be at most 1,000,000"),
    "a formula": ("epochs: 10**30", r"epochs: '10\*\*30' is str; a whole number is needed"),
    "infinity": ("epochs: .inf", "epochs: inf is no number to count with"),
    "nothing": ("clip: .nan", "clip: nan is no number to count with"),
    "a key twice": ("epochs: 3\nseed: 1\nepochs: 4", r"the key epochs is there twice, first in line 1 \(line 3, column 1\)"),
    "an inner key twice": ("optimizer:\n  lr: 0.1\n  lr: 0.2", "the key lr is there twice, first in line 2"),
    "a long key": ("a" * 1000 + ": 3", "aaa … aaa.*: there is no such key"),
    "a list as key": ("? [a]\n: 3", "found unhashable key"),
    "a tag of Python's": ("epochs: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "a date by its tag": ("description: !!timestamp 2020-13-45", "could not determine a constructor"),
    "a wrong number by its tag": ("epochs: !!int x", "cannot be read: invalid literal"),
    "UTF-16": ("epochs: 3".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "UTF-16 without a mark": ("epochs: 3".encode("utf-16-le"), "is no text: it holds NUL bytes"),
    "latin-1": ("seed: 1\ndescription: grün".encode("latin-1"), r"not UTF-8 text \(byte 0xfc in line 2\); save it as UTF-8"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", r"is not UTF-8 text \(byte 0x89 in line 1\)"),
    "NUL bytes": (b"epochs: 3\n\0\0\0", "is no text: it holds NUL bytes"),
    "escape sequences": ("epochs: \x1b[2J", "special characters are not allowed"),
    "escape sequences in quotes": (r'epochs: "\e[2J"', r"epochs: '\\x1b\[2J' is str"),
    "two documents": ("epochs: 3\n---\nepochs: 4", "but found another document"),
    "a wrong list": ("exclude: " + str([["deep"] * 300] * 10), r"exclude\[0\]: \['deep', .* … .*'deep'\] is list; text"),
}  # fmt: skip
# What is given to --set, and what is said of it.
SETS: dict[str, tuple[str, str]] = {
    "deep lists": ("exclude=" + "[" * 50_000, "more than 20 levels"),
    "deep keys": ("method_args" + ".a" * 30_000 + "=1", "more than 20 levels"),
    "itself": ("exclude=&a [*a]", "an alias .* inside of what it stands for"),
    "an alias bomb": (f"method_args={{{', '.join(BOMB.splitlines())}}}", "more than 10,000 values"),
    "digits": ("epochs=" + "9" * 10_000, "--set 'epochs=999.*: the value cannot be read: 999.* is too large a number"),
    "an exponent": ("epochs=1e400", "epochs: 1e400 is too large a number"),
    "an exponent for a method": ("method_args.beta=1e400", "method_args.beta: 1e400 is too large a number"),
    "too many epochs": ("epochs=1e9", "epochs: 1000000000 is too large; it must be at most 1,000,000"),
    "a key twice": ("optimizer={lr: 1, lr: 2}", "the key lr is there twice"),
    "a long value": ("epochs=" + "x" * 20_000, "epochs: 'xxx.* … .*xxx' is str; a whole number is needed"),
    "a long key": ("e" * 20_000 + "=3", "eee.* … .*eee: there is no such key"),
    "without a value": ("e" * 20_000, "--set 'eee.* … .*eee': write key=value"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file(kind: str, tmp_path: Path) -> None:
    text, words = FILES[kind]
    path = tmp_path / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    started = time.monotonic()
    with pytest.raises(RecipeError, match=words) as caught:
        load_recipe(path)
    assert time.monotonic() - started < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))
    result = CliRunner().invoke(app, ["train", str(path), "--out", str(tmp_path / "run")])
    assert (result.exit_code, result.stderr) == (2, f"error: {' '.join(str(caught.value).split())}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", SETS)
def test_a_setting(kind: str) -> None:
    setting, words = SETS[kind]
    started = time.monotonic()
    with pytest.raises(RecipeError, match=words) as caught:
        load_recipe("digits", [setting])
    assert time.monotonic() - started < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    # The same in a grid; of what cannot be split into values, how to write them is told.
    result = CliRunner().invoke(app, ["sweep", "digits", "--set", setting, "--out", "nowhere"])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stderr) < 400


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A process that reads the bombs may take 200 MB more than one that does not; expanded, they would be 10⁹ values."""
    for i, text in enumerate((BOMB, MERGES)):
        (tmp_path / f"{i}.yaml").write_text(text)
    code = f"""
import resource
from spartan.app.train.config import RecipeError, load_recipe
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i in range(2):
    try:
        load_recipe(f"{tmp_path}/{{i}}.yaml")
    except RecipeError:
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert len(found.stdout.split()) == 2
    assert all(int(grown) < 200 for grown in found.stdout.split()), found.stdout


def test_what_people_write_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "description: &why 2020-01-01\nepochs: 3.0\nmethod_args: {beta: [1, 1.0e+1]}\npattern: nm:2:4\nsparsity: 5e-1\n"
        "model_args: {a: &shared {x: 1, <<: {y: 2}}, b: {<<: *shared, x: 3}, c: [*why, =, 12:30, .inf]}\n"
        "start: ~\nclip: null\n",
        "utf-8-sig",
    )
    found = load_recipe(path)
    assert (found.description, found.epochs, found.sparsity, found.pattern) == ("2020-01-01", 3, 0.5, "nm:2:4")
    assert found.model_args["a"] == {"x": 1, "y": 2}
    assert found.model_args["b"] == {"x": 3, "y": 2}
    assert found.model_args["c"] == ["2020-01-01", "=", "12:30", float("inf")]
    path.write_text(to_yaml(found))
    assert load_recipe(path) == found
    path.write_text("")
    assert load_recipe(path) == Config()
    path.write_text("exclude: [" + ", ".join(f"layer{i}" for i in range(MOST_VALUES - 10)) + "]")
    assert len(load_recipe(path).exclude) == MOST_VALUES - 10
    assert load_recipe("digits", ["method_args.beta=.inf"]).method_args == {"beta": float("inf")}


@pytest.mark.parametrize("text", ["[]", "false", "0", "text", "[1]"])
def test_what_is_no_table_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match="must be a table of keys and values"):
        load_recipe(tmp_path / "r.yaml")
