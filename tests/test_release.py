"""What a release consists of: one version, builds that are listed, benchmarks that leave tracked files alone."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import spartan

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_in_one_place() -> None:
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "spartan.__version__"}
    assert "version" in PROJECT["project"]["dynamic"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == spartan.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\]", changes, re.MULTILINE)
    assert newest is not None
    assert newest[1] == spartan.__version__


def test_the_entry_point_is_where_another_spartan_cannot_be() -> None:
    name, _, function = PROJECT["project"]["scripts"]["spartan"].partition(":")
    assert name == PROJECT["project"]["name"].replace("-", "_")
    assert callable(getattr(importlib.import_module(name), function))


def test_the_workflow_builds_what_is_configured_and_requires_kernels() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    assert set(flow["jobs"]["publish"]["needs"]) == {"sdist", "wheels"}
    archs = {case["arch"] for case in flow["jobs"]["wheels"]["strategy"]["matrix"]["include"]}
    wheels = PROJECT["tool"]["cibuildwheel"]
    assert wheels["environment"]["SPARTAN_REQUIRE_KERNELS"] == "1"
    assert {build.split("_", 1)[1] for build in wheels["build"]} == archs == {"x86_64", "aarch64", "arm64"}
    told = (ROOT / "docs/releases.md").read_text(encoding="utf-8")
    assert all(build in told for build in wheels["build"])


@pytest.mark.parametrize("name", ["bench_soft_topk.py", "bench_file_size.py", "bench_step.py", "bench_shrink.py"])
def test_benchmarks_append_only_when_asked(name: str) -> None:
    """Every call that appends to a tracked table stands under `if args.append`."""
    text = (ROOT / "benchmarks" / name).read_text(encoding="utf-8")
    assert '"--append", action="store_true"' in text
    main = text.split("def append(")[0] if "def append(" in text else text
    for line in re.finditer(r"^( *)(append\(|with \w+\.open\(\"a\")", main, re.MULTILINE):
        before = main[: line.start()].splitlines()
        outer = next(b for b in reversed(before) if b.strip() and len(b) - len(b.lstrip()) < len(line[1]))
        assert outer.strip() == "if args.append:", (name, outer, line[0])


def test_a_benchmark_leaves_its_table_as_it_was() -> None:
    tables = {path: path.read_bytes() for path in (ROOT / "benchmarks").glob("*.csv")}
    command = [sys.executable, "benchmarks/bench_soft_topk.py", "--d", "20000", "--betas", "10", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout
    assert {path: path.read_bytes() for path in (ROOT / "benchmarks").glob("*.csv")} == tables
