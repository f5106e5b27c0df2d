"""The site: every page is on its list, troubleshooting speaks of errors that exist, and it builds without a warning."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import spartan

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def nav_pages(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [page for inner in (node.values() if isinstance(node, dict) else node) for page in nav_pages(inner)]


def test_every_page_is_on_the_list_once() -> None:
    listed = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    own = sorted(page for page in listed if not page.startswith("project/"))
    assert own == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert all((ROOT / page.removeprefix("project/")).is_file() for page in listed if page.startswith("project/"))


def texts() -> list[str]:
    """Every text in the sources, with … where an expression stands in it."""
    found = []
    for folder in ("spartan", "spartan_sparsity"):
        for path in (ROOT / "src" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_troubleshooting_is_keyed_by_errors_that_exist() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    keys = [key.strip("`").strip() for key in re.findall(r"^### (.+)$", page, re.MULTILINE)]
    assert len(keys) >= 20
    known = texts()
    for key in keys:
        pattern = re.compile(".*?".join(re.escape(part) for part in key.split("…")), re.DOTALL)
        assert any(pattern.search(text) for text in known), f"no error says: {key}"


def test_the_reference_has_every_public_name() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)}
    control = {"Dense", "Params", "Unstructured", "methods", "__version__"}  # nothing to set; the guide has them
    assert set(spartan.__all__) - control <= shown


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="`make docs` installs mkdocs")
def test_it_builds_without_a_warning_and_no_link_is_dead(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    links = [sys.executable, "docs/site_links.py", str(tmp_path)]
    done = subprocess.run(links, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_tutorials_are_notebooks_with_the_pages_programs() -> None:
    pytest.importorskip("nbformat", reason="`make docs` installs it")
    pytest.importorskip("nbclient", reason="`make docs` installs it")
    spec = importlib.util.spec_from_file_location("site_notebooks", DOCS / "site_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for page in [*(DOCS / "tutorials").glob("*.md"), DOCS / "add-a-method.md"]:
        text = page.read_text(encoding="utf-8")
        cells = made.notebook_of(text).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        assert len(code) == text.count("```python") >= 3, page.name
        assert all("```python" not in cell.source for cell in cells)
        assert "\n".join(cell.source for cell in cells).count("\n# ") <= text.count("\n# ")


def test_all_messages_are_listed() -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    found = made.errors_list()
    assert found.count("<li>") > 400
    for told in (
        "no layer to sparsify: include=…",
        "is outside [0, 1&#93;".replace("1&#93;", "1)"),
        "calibration is empty",
    ):
        assert told in found, told
