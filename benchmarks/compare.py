"""Makes the tables and the figure of docs/comparison.md, and the README's table, from the CSVs of runs.

    pip install 'spartan-sparsity[app]'
    python benchmarks/compare.py            # writes them; with --check it only says whether they are up to date
    python benchmarks/compare.py --missing  # lists the runs that the tables lack, as lines for explore.py

A run counts if it is of a recipe with nothing set but the method, the sparsity and, in blocks, the pattern. Where the same
run was made again, after a rule had changed, the last row of its file counts. Files are read in the order below; before
explore.csv come such runs of `spartan paper` at scale small. Rows of commits at which a method's rule was another (`BEFORE`)
are shown with a mark, and listed as missing.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import spartan
from spartan.app.paper.figures import new_figure, write_figure
from spartan.app.paper.results import Results

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
BLOCKS = "pattern=[16,16]"


@dataclass(frozen=True)
class Cell:
    """A recipe at a sparsity, and what is read of its runs."""

    recipe: str
    sparsity: float
    title: str
    setting: str = ""
    loss: bool = False  # the less the better, with three decimals

    @property
    def digits(self) -> int:
        """Decimals that are shown."""
        return 3 if self.loss else 2


CIFAR = [Cell("cifar10-wrn22", s, f"CIFAR-10, {100 * s:.0f}%") for s in (0.95, 0.98, 0.99)]
GPT = Cell("bytes-gpt", 0.9, "bytes-gpt, 90%", loss=True)
VIT = Cell("cifar10-vit", 0.9, "cifar10-vit, 90%, 16×16", BLOCKS)
CELLS = [*CIFAR, GPT, VIT]
# Three seeds of these, one of every other method.
THRICE = ("dense", "paced", "spartan", "topkast", "feather", "imp", "st3", "acdc", "optg", "rigl", "probmask")
NOT_FROM_SCRATCH = ("fixed", "gradual")  # they begin with a trained model
# Commits of runs whose rule has changed since.
BEFORE = {"paced": ("bb3a46a", "c14dda9", "3beaea3")}
# What `spartan paper` calls a run with nothing else set.
PLAIN = re.compile(
    r"(?P<recipe>\S+) method=(?P<method>\S+)( sparsity=(?P<sparsity>\S+))?"
    r"( (?P<pattern>pattern=\[\d+, \d+\]))? seed=(?P<seed>\d+)"
)
README = ("dense", "paced", "feather", "topkast", "spartan", "imp")
Scores = dict[tuple[str, float, str], dict[str, dict[int, tuple[float, str]]]]


def _read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((HERE / name).read_text("utf-8").splitlines()))


def rows() -> Iterator[tuple[str, float, str, str, int, float, str]]:
    """Recipe, sparsity, other settings, method, seed, result and commit of every run that ended."""
    for name, result in (("cifar10.csv", "top1"), ("bytes_gpt.csv", "loss")):
        for row in _read(name):
            recipe, _, more = row["recipe"].partition(" ")
            yield (
                recipe,
                float(row["sparsity"]),
                more,
                row["method"],
                int(row["seed"]),
                float(row[result]),
                row["commit"],
            )
    for record in Results("small").records.values():
        run = PLAIN.fullmatch(record["run"])
        if run and "source" not in record:  # else it is a row of cifar10.csv
            sparsity = 0.0 if run["method"] == "dense" else float(run["sparsity"] or 0.9)
            more = (run["pattern"] or "").replace(" ", "")
            yield run["recipe"], sparsity, more, run["method"], int(run["seed"]), 100 * record["top1"], record["commit"]
    for row in _read("explore.csv"):
        given = row["settings"].split()
        own = dict(setting.split("=", 1) for setting in given if setting.startswith(("method=", "sparsity=")))
        if row["result"] and "method" in own:
            more = " ".join(setting for setting in given if not setting.startswith(("method=", "sparsity=")))
            sparsity = 0.0 if own["method"] == "dense" else float(own.get("sparsity", 0.9))
            yield row["recipe"], sparsity, more, own["method"], int(row["seed"]), float(row["result"]), row["commit"]


def read() -> Scores:
    """Results by recipe, sparsity and settings, then by method and seed."""
    found: Scores = defaultdict(lambda: defaultdict(dict))
    for recipe, sparsity, more, method, seed, result, commit in rows():
        found[recipe, sparsity, more][method][seed] = result, commit
    return found


def of(scores: Scores, cell: Cell, method: str) -> list[float]:
    """Results of a method in a cell, by seed; a dense one has no pattern."""
    key = (cell.recipe, 0.0, "") if method == "dense" else (cell.recipe, cell.sparsity, cell.setting)
    each = scores[key].get(method, {}) if key in scores else {}
    return [each[seed][0] for seed in sorted(each)]


def named(scores: Scores, cells: Sequence[Cell], method: str) -> str:
    """Its name, with a mark where a result is of a rule that has changed since."""
    runs = (run for c in cells for run in scores[c.recipe, c.sparsity, c.setting].get(method, {}).values())
    return f"`{method}`" + (" ¹" if any(commit in BEFORE.get(method, ()) for _, commit in runs) else "")


def mean(cell: Cell, results: Sequence[float], spread: bool = True) -> str:
    """The mean; with the sample standard deviation where there are several."""
    if not results:
        return ""
    text = f"{statistics.fmean(results):.{cell.digits}f}"
    return f"{text} ± {statistics.stdev(results):.{cell.digits}f}" if spread and len(results) > 1 else text


def by_seed(cell: Cell, results: Sequence[float]) -> str:
    """Every one."""
    return ", ".join(f"{x:.{cell.digits}f}" for x in results)


def methods(scores: Scores, cells: Sequence[Cell]) -> list[str]:
    """Those that have a result, best first, by what they have in the first of the cells; dense before all."""

    def rank(method: str) -> tuple[int, float]:
        for place, cell in enumerate(cells):
            if results := of(scores, cell, method):
                return place, statistics.fmean(results) * (1 if cell.loss else -1)
        return len(cells), 0.0

    names = {m for c in cells for m in scores[c.recipe, c.sparsity, c.setting]} | {"dense"}
    names = {m for m in names if any(of(scores, c, m) for c in cells)}
    return sorted(names, key=lambda m: (m != "dense", rank(m), m))


def times() -> dict[str, tuple[str, str]]:
    """Milliseconds of a step by method, in the last sitting that measured most of them, and MiB over dense."""
    sittings: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for row in _read("method_steps.csv"):
        sittings[row["commit"]][row["method"]] = row
    last = [sitting for sitting in sittings.values() if len(sitting) > 12 and "dense" in sitting][-1]
    found, dense = {}, last["dense"]["peak_mib"]
    for method, row in last.items():
        over = float(row["peak_mib"]) - float(dense) if row["peak_mib"] and dense else 0.0
        found[method] = f"{float(row['ms']):.2f}", f"+{over:.0f}" if over else ""
    return found


def table(scores: Scores, cells: Sequence[Cell], timed: bool = False) -> list[str]:
    """One row a method: all seeds and their mean, cell by cell."""
    heads = [f"{cell.title}, by seed | mean" for cell in cells] + (["ms a step | MiB over dense"] if timed else [])
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---|---:|" * len(cells) + ("---:|---:|" if timed else "")]
    clock = times() if timed else {}
    for method in methods(scores, cells):
        fields = []
        for cell in cells:
            results = of(scores, cell, method)
            fields += [by_seed(cell, results), mean(cell, results)]
            if method == "dense" and len(cells) > 1:  # one result for all sparsities: shown once
                fields += [""] * 2 * (len(cells) - 1)
                break
        lines.append(
            f"| {named(scores, cells, method)} | {' | '.join([*fields, *(clock.get(method, ('', '')) if timed else ())])} |"
        )
    return lines


def front(scores: Scores) -> list[str]:
    """The README's: means alone, and how many seeds where it is fewer than three."""
    lines = ["| | " + " | ".join(cell.title for cell in CELLS) + " |", "|---|" + "---:|" * len(CELLS)]
    for method in README:
        fields = []
        for cell in CELLS:
            results = of(scores, cell, method)
            fields.append(mean(cell, results, spread=False) + (f" ({len(results)})" if 0 < len(results) < 3 else ""))
        lines.append(f"| {named(scores, CELLS, method)} | {' | '.join(fields)} |")
    return lines


def draw(scores: Scores) -> Any:
    """A panel a cell, a line a method, a dot a seed; dense is a line down. What is far behind the rest is left out."""
    cells = [cell for cell in CELLS if len(methods(scores, [cell])) > 2]
    figure = new_figure(2.2 + 0.14 * max(len(methods(scores, [c])) for c in cells))
    for axes, cell in zip(figure.subplots(1, len(cells), squeeze=False)[0], cells, strict=True):
        names = [m for m in methods(scores, [cell]) if m != "dense"]
        best = statistics.fmean(of(scores, cell, names[0]))
        limit = 0.6 if cell.loss else 8.0
        shown = [m for m in names if abs(statistics.fmean(of(scores, cell, m)) - best) < limit][::-1]
        for place, method in enumerate(shown):
            results = of(scores, cell, method)
            axes.plot(results, [place] * len(results), "o", color=f"C{1 if method == 'paced' else 0}", alpha=0.8)
        for x in of(scores, cell, "dense"):
            axes.axvline(x, linestyle="--", linewidth=0.8, color="C2")
        axes.set_yticks(range(len(shown)), shown, fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(cell.title, fontsize=8)
        axes.set_xlabel("loss, nats a byte" if cell.loss else "accuracy, %", fontsize=7)
    return figure


def missing(scores: Scores) -> list[str]:
    """The runs that the tables lack, cell by cell, each a line for explore.py."""
    lines = []
    for cell in CELLS:
        for method in sorted((e.name for e in spartan.methods()), key=lambda m: (m not in THRICE, m)):
            dense = method == "dense"
            if method in NOT_FROM_SCRATCH or (dense and cell in CIFAR[1:]):
                continue
            key = (cell.recipe, 0.0, "") if dense else (cell.recipe, cell.sparsity, cell.setting)
            runs = scores[key].get(method, {}) if key in scores else {}
            there = [seed for seed, (_, commit) in runs.items() if commit not in BEFORE.get(method, ())]
            what = [cell.recipe, f"method={method}", *([] if dense else [f"sparsity={cell.sparsity:g}", cell.setting])]
            seeds = range(3 if method in THRICE else 1)
            lines += [" ".join([*filter(None, what), f"seed={seed}"]) for seed in seeds if seed not in there]
    return lines


def filled(text: str, parts: dict[str, list[str]]) -> str:
    """The page with its tables made anew, each between a line that names it and one that ends it."""
    for name, lines in parts.items():
        begin, end = f"<!-- compare.py: {name} -->", "<!-- compare.py: end -->"
        if begin not in text:
            continue
        before, _, rest = text.partition(begin)
        text = "\n".join([before + begin, "", *lines, "", end]) + rest.partition(end)[2]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is out of date")
    parser.add_argument("--missing", action="store_true", help="list the runs that the tables lack, and write nothing")
    args = parser.parse_args()
    scores = read()
    if args.missing:
        print("\n".join(missing(scores)))
        return
    parts = {
        "cifar10": table(scores, CIFAR, timed=True),
        "bytes-gpt": table(scores, [GPT]),
        "cifar10-vit": table(scores, [VIT]),
        "front": front(scores),
    }
    late = []
    for page in (DOCS / "comparison.md", HERE.parent / "README.md"):
        text = page.read_text(encoding="utf-8")
        made = filled(text, parts)
        late += [page.name] if made != text else []
        if not args.check:
            page.write_text(made, encoding="utf-8")
    if args.check:
        sys.exit(f"out of date: {', '.join(late)}; run benchmarks/compare.py" if late else 0)
    (DOCS / "comparison").mkdir(exist_ok=True)
    for path in write_figure(lambda: draw(scores), DOCS / "comparison" / "methods"):
        if path.suffix == ".svg":
            path.unlink()  # pages show the PNG


if __name__ == "__main__":
    main()
