"""Every example that a reader may copy runs: the python blocks of the documents, and the docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spartan
from spartan.app.train.config import load_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(m.name for m in pkgutil.walk_packages(spartan.__path__, "spartan.") if not m.name.endswith("__main__"))


def code_of(text: str) -> str:
    """The python blocks of a page as one program, each line where it stands on the page."""
    lines, inside, margin = [], False, 0
    for line in text.splitlines():
        fence = line.strip().startswith("```")
        lines.append(line[margin:] if inside and not fence else "")
        inside = line.strip() == "```python" if fence else inside
        margin = len(line) - len(line.lstrip()) if fence else margin  # blocks in tabs are indented
    return "\n".join(lines) + "\n"


def test_code_of_keeps_line_numbers() -> None:
    assert (
        code_of("a\n```python\nx = 1\n```\n```sh\nls\n```\n```python\ny = 2\n```") == "\n\nx = 1\n\n\n\n\n\ny = 2\n\n"
    )


# A process of its own for each page, so that a method registered there is not seen by other tests.
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{page.stem}.py"
    program.write_text(code_of(page.read_text(encoding="utf-8")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", program.name], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{page.name}, line numbers as on the page:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("kind", ["method", "pattern", "cost"])
def test_new_kinds_in_one_file(kind: str) -> None:
    """The three worked examples run, and the page shows them as they are."""
    file = ROOT / "examples" / f"new_{kind}.py"
    done = subprocess.run([sys.executable, "-W", "error", file], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    shown = [block for block in page.split("```python\n")[1:] if f"new_{kind}.py" in page.split(block)[0][-400:]]
    assert len(shown) == 1
    assert shown[0].split("```")[0] in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_guide_describes_the_methods_as_the_registry_does() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").replace(r"\|", "│")  # bars inside a cell
    rows = re.findall(
        r"^\| `([\w-]+)` \| (.+?) \| (.+?) \|", guide.split("## Methods")[1].split("\n## ")[0], re.MULTILINE
    )
    registry = {entry.name: (entry.mask_rule, entry.gradient_rule) for entry in spartan.methods()}
    assert {name for name, *_ in rows} == set(registry)
    for name, mask_rule, gradient_rule in rows:
        assert registry[name] == (mask_rule.replace("│", "|"), gradient_rule.replace("│", "|"))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    names = {"torch": torch, "spartan": spartan, **vars(module)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for example in doctest.DocTestFinder().find(module, name, globs=names):
            runner.run(example)
    assert not runner.failures, (
        f"{runner.failures} of {runner.tries} examples of {name} fail; the output above says which"
    )


def test_docstring_examples_are_found() -> None:
    """The test above passes on a module without examples; the package as a whole has some."""
    found = sum(
        bool(test.examples) for name in MODULES for test in doctest.DocTestFinder().find(importlib.import_module(name))
    )
    assert found >= 8


def test_tables_are_those_of_the_csvs() -> None:
    """What docs/comparison.md and the README show of runs is what benchmarks/compare.py makes of them."""
    script = ROOT / "benchmarks" / "compare.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_runs_that_the_tables_lack_are_recipes() -> None:
    """Each line that `--missing` prints can be run, and is listed once."""
    script = ROOT / "benchmarks" / "compare.py"
    done = subprocess.run([sys.executable, script, "--missing"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(set(lines)) == len(lines)
    for line in filter(None, lines):
        recipe, *sets = line.split()
        load_recipe(recipe, sets)
