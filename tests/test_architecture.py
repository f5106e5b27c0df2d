"""The folder listing is the architecture: imports go one way, and importing the library is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import spartan

ROOT = Path(spartan.__file__).parent

# From the bottom up; a module may import from layers below its own, and from its own.
LAYERS = [
    {"wording", "disk"},
    {"ops.parts", "ops.select", "ops.soft_topk", "ops.rows", "ops.collective", "ops.spread", "ops"},
    {"kernels"},
    {"targets", "patterns", "heads", "schedules", "flop_count", "sharding"},
    {"costs"},
    {"budgets"},
    {"groups"},
    {"fast", "watch"},
    {"methods.base", "methods.registry", "methods"},
    {"masters", "checks", "run", "ledger", "stats", "checkpoint", "portable", "oneshot"},
    {"wrap"},
    {"sparsifier"},
    {"sharded_checkpoint"},
    {"inference"},
    {"zoo"},
    {"files"},
    {""},
    {"app"},
    {"__main__"},
]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix("__init__").removesuffix(".")


def layer(name: str) -> int:
    parts = name.partition(".")
    # A module named above has a place of its own, others that of their package.
    if parts[0] in {"methods", "kernels", "app", "inference", "files"} and not any(name in ns for ns in LAYERS):
        name = parts[0]
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "spartan":
            base = node.module.removeprefix("spartan").removeprefix(".")
            # `from spartan import x` names modules; `from spartan.x import y` names x.
            # A public name is not a module of its own; it stands for the package.
            names = {
                alias.name if (ROOT / alias.name).exists() or (ROOT / f"{alias.name}.py").exists() else ""
                for alias in node.names
            }
            found |= names if not base else {base}
    return found


def test_imports_go_one_way() -> None:
    seen = 0
    for path in ROOT.rglob("*.py"):
        me = module_name(path)
        for other in imports(path):
            assert layer(other) <= layer(me), f"{me or 'spartan'} imports {other or 'spartan'}, which lies above it"
            seen += 1
    assert seen > 50


def test_no_module_of_ours_is_imported_by_a_string() -> None:
    for path in ROOT.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func).endswith("import_module"):
                assert "spartan" not in ast.unparse(call), f"{path} imports past the table above"


def test_nothing_but_the_package_knows_single_methods() -> None:
    known = {"methods", "methods.base", "methods.registry"}
    for path in ROOT.rglob("*.py"):
        me = module_name(path)
        if me and not me.startswith(("methods", "app")):
            single = {name for name in imports(path) if name.startswith("methods.")} - known
            assert not single, f"{me} imports {single}; a method is one file that nothing else needs to know"


def test_importing_is_light() -> None:
    heavy = [
        "triton",
        "matplotlib",
        "timm",
        "transformers",
        "torchvision",
        "sklearn",
        "rich",
        "typer",
        "torch._inductor",
    ]
    code = f"import sys, spartan; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_no_file_is_long() -> None:
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
