"""What mkdocs.yml cannot say: files from outside docs/, the figure, and the table of tests, made when the site is built.

Pages link to files of the repository as they lie (`../benchmarks/cifar10.csv`); in the site these are copies under project/.
"""

import ast
import csv
import html
import posixpath
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = [
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "LICENSE",
    "benchmarks/*.csv",
    "examples/*.*",
]
# Measured before the method followed its authors' code (docs/comparison.md).
STALE = {"probmask", "rigl", "set", "svite"}
TESTS = {
    "Loops and libraries": "loops",
    "Integrations": "integrations",
    "Trained models": "prune",
    "Many processes": "distributed",
    "Methods": "methods",
    "Solvers": "solvers",
    "Files": "files",
    "Inference": "inference",
    "Shrink": "shrink",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the files that lie outside docs/."""
    from mkdocs.structure.files import File

    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            content = path.read_text("utf-8") if path.suffix == ".md" else path.read_bytes()
            files.append(File.generated(config, f"project/{path.relative_to(ROOT)}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts in what is made from the repository, and leads links that leave docs/ to the copies."""
    markdown = markdown.replace("<!-- figure: accuracy and speed -->", figure())
    markdown = markdown.replace("<!-- table: tests -->", tests_table())
    if "<!-- list: errors -->" in markdown:
        markdown = markdown.replace("<!-- list: errors -->", errors_list())
    return relink(markdown, page.file.src_uri)


def relink(markdown: str, page: str) -> str:
    """The page's links, as seen from its place in the site.

    Example:
        >>> relink("[a](../benchmarks/a.csv) [b](b.md#c) [d](https://d.org)", "files.md")
        '[a](project/benchmarks/a.csv) [b](b.md#c) [d](https://d.org)'
    """
    folder = posixpath.join("docs", posixpath.dirname(page))
    if page.startswith("project/"):
        folder = posixpath.dirname(page.removeprefix("project/")) or "."

    def moved(link: re.Match[str]) -> str:
        target, hash_, anchor = link[1].partition("#")
        if not target or ":" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        inside = path.startswith("docs/")
        site = path.removeprefix("docs/") if inside else f"project/{path}"
        if path == "README.md":
            site = "index.md"
        if path == "examples":
            site = "project/examples/digits.py"
        return f"]({posixpath.relpath(site, posixpath.dirname(page) or '.')}{hash_}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, markdown)


def points() -> list[tuple[str, float, float]]:
    """Method, milliseconds a training step, accuracy in percent: CIFAR-10, WRN-22-2, 95% zeros, from the tables."""
    seeds: dict[str, dict[str, float]] = defaultdict(dict)
    with (ROOT / "benchmarks/cifar10.csv").open() as file:
        for row in csv.DictReader(file):
            if row["recipe"] == "cifar10-wrn22" and (row["sparsity"] == "0.95" or row["method"] == "dense"):
                seeds[row["method"]][row["seed"]] = float(row["top1"])
    with (ROOT / "benchmarks/method_steps.csv").open() as file:
        steps = {row["method"]: float(row["ms"]) for row in csv.DictReader(file) if row["commit"] == "37c005b"}
    return [(name, steps[name], sum(v.values()) / len(v)) for name, v in sorted(seeds.items()) if name in steps]


def figure() -> str:
    """The figure of the first page, as SVG in the page's own colours."""
    found = points()
    width, height, left, bottom = 760, 380, 52, 44
    x0, x1, y0, y1 = 3.3, 5.1, 87.0, 93.8

    def x(ms: float) -> float:
        return left + (ms - x0) / (x1 - x0) * (width - left - 20)

    def y(top1: float) -> float:
        return height - bottom - (top1 - y0) / (y1 - y0) * (height - bottom - 16)

    parts = []
    for value in range(88, 94):
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}" opacity=".15"/>')
        parts.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for tenth in range(34, 51, 2):
        parts.append(
            f'<text x="{x(tenth / 10):.1f}" y="{height - bottom + 18}" text-anchor="middle">{tenth / 10}</text>'
        )
    # A label stands right of its point, or wherever it covers neither a point nor another label.
    taken = [(x(ms) - 5, y(top1) - 5, x(ms) + 5, y(top1) + 5) for _, ms, top1 in found]
    for name, ms, top1 in sorted(found, key=lambda point: (point[0] != "spartan", -point[2])):
        px, py, long = x(ms), y(top1), 6.6 * len(name)
        places = [(9, 4), (-9 - long, 4), (6, -9), (6, 17), (-6 - long, -9), (-6 - long, 17)]
        boxes = [(px + dx, py + dy - 10, px + dx + long, py + dy + 2) for dx, dy in places]
        box = min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken))
        taken.append(box)
        fill = "none" if name in STALE else "var(--md-primary-fg-color)" if name == "spartan" else "currentColor"
        bold = ' font-weight="bold"' if name == "spartan" else ""
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="{fill}"/>')
        parts.append(f'<text x="{box[0]:.1f}" y="{box[3] - 2:.1f}"{bold}>{name}</text>')
    return (
        f'<div class="figure"><svg viewBox="0 0 {width} {height}" role="img" stroke="currentColor" stroke-width="1" '
        'aria-label="Accuracy against milliseconds a training step, one point a method">'
        "<style>.figure text{fill:currentColor;stroke:none;font-size:12px}</style>"
        f"{''.join(parts)}"
        f'<text x="{left}" y="{height - 6}">ms a training step on an H200</text>'
        f'<text x="4" y="12">top-1, %</text></svg></div>'
    )


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """The area that two boxes (left, top, right, bottom) share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def tests_table() -> str:
    """What is tested, from the first lines of the tests' files and the number of their tests."""
    lines = ["| | what holds | tests |", "|---|---|---:|"]
    for title, folder in TESTS.items():
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            count = sum(isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for n in tree.body)
            said = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split()).replace("|", r"\|")
            said = said.replace("<", "&lt;")
            lines.append(f"| {title} | {said} `{path.relative_to(ROOT / 'tests')}` | {count} |")
            title = ""
    return "\n".join(lines)


def errors_list() -> str:
    """Every message that the sources raise as an error, by package, with … where names and numbers stand."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "src/spartan").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                said = " ".join(_said(node.exc.args[0]).split())
                if len(said.replace("…", "")) > 20:
                    found[path.relative_to(ROOT / "src/spartan").parts[0].removesuffix(".py")].add(said)
    parts = []
    for package, messages in sorted(found.items()):
        items = [f"<li><code>{html.escape(said).replace(']', '&#93;')}</code></li>" for said in sorted(messages)]
        parts.append(f"<p><b>{package}</b></p><ul>{''.join(items)}</ul>")
    return "".join(parts)


def _said(node: ast.AST) -> str:
    """The text of an expression, with … for what is put into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_said(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return _said(node.left) + _said(node.right) if isinstance(node, ast.BinOp) else "…"
