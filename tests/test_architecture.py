"""The folder listing is the architecture: imports go one way, as CONTRIBUTING.md says, and importing us is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import spartan

ROOT = Path(spartan.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAP = Path(__file__).parent.parent / "CONTRIBUTING.md"


def allowed() -> dict[str, list[str]]:
    """What each package may import, from the table of the map; packages in the order of its rows."""
    rows = re.findall(r"^\| `(\w+)` \| .+? \|(.*)\|$", MAP.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", others) for name, others in rows}


def package_of(path: Path) -> str:
    """The row of the table that a file belongs to."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "spartan" if first == "__init__" else first


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, without the first `spartan.`; "" is the package itself.

    What is named in annotations only does not count, but for the package's own file: what stands there for type checkers are
    the public names, which it imports when they are asked for.
    """
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [] if path == ROOT / "__init__.py" else for_type_checkers(tree)
    skipped = {id(inner) for node in types for inner in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in skipped):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            # `from spartan import files` names a module; `from spartan import save` a public name of the package.
            inside = [alias.name for alias in node.names if module == "spartan" and is_module(alias.name)]
            found |= {f"spartan.{name}" for name in inside} if len(inside) == len(node.names) else {module}
    return {name.removeprefix("spartan").removeprefix(".") for name in found if name.split(".")[0] == "spartan"}


def for_type_checkers(tree: ast.Module) -> list[ast.If]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]


def is_module(name: str) -> bool:
    return (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()


def test_the_map_has_every_package_and_goes_one_way() -> None:
    table = allowed()
    assert set(table) == {package_of(path) for path in FILES}
    rows = list(table)
    for number, (name, others) in enumerate(table.items()):
        assert set(others) <= set(rows[:number]), f"{name} may import only from rows above its own"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_on_the_map(path: Path) -> None:
    me = package_of(path)
    found = {name.partition(".")[0] or "spartan" for name in imports(path)} - {me}
    assert found <= set(allowed()[me]), (
        f"{path.relative_to(ROOT)} imports what the map of CONTRIBUTING.md does not allow"
    )


def test_the_map_allows_nothing_that_is_not_needed() -> None:
    for name, others in allowed().items():
        used = {module.partition(".")[0] or "spartan" for p in FILES if package_of(p) == name for module in imports(p)}
        assert set(others) == used - {name}, f"the map's row of {name}"


def test_files_that_the_map_names_are_there() -> None:
    step = MAP.read_text(encoding="utf-8").split("in ten files")[1].split("\n## ")[0]
    named = re.findall(r"^\d+\. `([\w/]+\.py)`", step, re.MULTILINE)
    assert len(named) == 10
    assert all((ROOT / name).exists() for name in named)


def test_no_module_of_ours_is_imported_by_a_string() -> None:
    for path in FILES:
        for call in (
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
        ):
            if ast.unparse(call.func).endswith("import_module"):
                # Packages that find their own files do so by their own name.
                own = ast.unparse(call.args[0]).startswith("f'{__name__}.")
                assert own or "spartan" not in ast.unparse(call), f"{path} imports past the map"


def test_nothing_but_the_package_knows_single_methods() -> None:
    known = {"methods", "methods.base", "methods.registry"}
    for path in FILES:
        if package_of(path) not in ("spartan", "methods", "app"):
            single = {name for name in imports(path) if name.startswith("methods.")} - known
            assert not single, f"{path} imports {single}; a method is one file that nothing else needs to know"


def test_kinds_are_known_to_their_own_files_only() -> None:
    """No `isinstance` on a single pattern, cost or kind of rows elsewhere: what it can do, it says itself."""
    kinds = r"isinstance\([^()]*\b(Unstructured|Block|Channel|NM|Heads|Params|Flops|CostTable|Row\w+|Selection|Duals)\b"
    for path in FILES:
        found = re.search(kinds, path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}"


def test_importing_is_light() -> None:
    heavy = [
        "torch",
        "numpy",
        "triton",
        "matplotlib",
        "timm",
        "transformers",
        "lightning",
        "accelerate",
        "wandb",
        "mlflow",
        "torchvision",
        "sklearn",
        "rich",
        "typer",
    ]
    code = f"import sys, spartan; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_bring_only_what_they_need() -> None:
    heavy = ["triton", "rich", "typer", "sklearn", "torch._inductor", "torch.distributed.checkpoint"]
    code = f"import sys, spartan; spartan.Sparsifier, spartan.save; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_type_checkers_see_the_public_names_where_they_are() -> None:
    (block,) = for_type_checkers(ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8")))
    shown: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom), "public names are imported one by one"
        assert node.module is not None
        shown |= {alias.asname or alias.name: node.module.removeprefix("spartan.") for alias in node.names}
    assert shown == spartan._HOMES
    assert sorted(spartan.__all__) == sorted({*shown, "__version__"})


def test_files_and_classes_are_small() -> None:
    names: Counter[str] = Counter()
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                # A user has one framework, and in each the callback has the same name.
                names[f"{path.stem}.{node.name}" if node.name == "SpartanCallback" else node.name] += 1
                methods = [x for x in node.body if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef))]
                assert len(methods) <= 18, f"{path}: {node.name} has {len(methods)} methods"
    assert [name for name, n in names.items() if n > 1] == []


def test_the_core_has_no_threads_and_no_queues() -> None:
    """A question is asked and answered in one call; nothing is left for later, or for somebody else."""
    core = {"distributed", "ops", "problem", "solvers", "methods", "step", "state", "sparsifier", "prune"}
    for path in (path for path in FILES if package_of(path) in core):
        found = re.search(r"^\s*(?:import|from) (threading|queue|asyncio|concurrent)\b", path.read_text(), re.MULTILINE)
        assert found is None, f"{path}: {found}"
