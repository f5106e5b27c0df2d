"""Draws docs/paced/paces.png from benchmarks/explore_moves.csv: what a pace does, and which one the method finds.

pip install 'spartan-sparsity[app]'
python benchmarks/plot_paced.py
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

from spartan.app.paper.figures import MARKERS, new_figure, write_figure

HERE = Path(__file__).parent
WRN, GPT, VIT = "cifar10-wrn22 sparsity=0.98", "bytes-gpt sparsity=0.9", "cifar10-vit epochs=30"
CONTROL = "method_args.p=3 method_args.control=0.22"
LEAK = f"{CONTROL} method_args.leak=1 method_args.cooling=true"
BLOCKS = "optimizer.warmup_epochs=3 sparsity=0.9 pattern=[16,16] method_args.control=0.22"
FIXED = {
    "WRN, SGD, f = 2: 89.9%": f"{WRN} method_args.p=3 method_args.pace=2",
    "WRN, SGD, f = ½: 90.6%": f"{WRN} method_args.p=3 method_args.pace=0.5",
    "GPT, AdamW, f = 2: 0.857": f"{GPT} method_args.pace=2",
}
FOUND = {
    "WRN, SGD, 98%": f"{WRN} {LEAK}",
    "WRN, SGD, 99%": f"cifar10-wrn22 sparsity=0.99 {CONTROL} method_args.leak=1",
    "GPT, AdamW, 90%": f"{GPT} {LEAK}",
    "ViT, AdamW, 16×16, 90%": f"{VIT} {BLOCKS}",
}


def read() -> dict[str, list[dict[str, float]]]:
    """What was seen of every run, by recipe and settings, in order."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with (HERE / "explore_moves.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = {key: float(row[key]) for key in ("step", "pace", "exchanged") if row[key]}
            found[f"{row['recipe']} {row['settings']}"].append(numbers)
    return found


def draw() -> Any:
    """Two panels: what is exchanged with a pace that is given, and paces that are found."""
    runs, figure = read(), new_figure(3.6)
    left, right = figure.subplots(1, 2)
    for marker, (label, name) in zip(MARKERS, FIXED.items(), strict=False):
        rows = runs[name]
        left.plot(
            [r["step"] / rows[-1]["step"] for r in rows[1:]],
            [100 * r["exchanged"] for r in rows[1:]],
            label=label,
            marker=marker,
            markevery=3,
        )
    steps = [x / 50 for x in range(51)]
    wanted = [22 * 0.9 * (1 - (1 - min(1.0, 2 * x)) ** 3) * min(1.0, 2 * (1 - x)) for x in steps]
    left.plot(steps, wanted, label="what Paced asks for, at 90%", linestyle="--")
    left.set(
        xlabel="part of the run",
        ylabel="exchanged in a twentieth of the run, %",
        title="The pace f is given",
        ylim=(-2, 65),
    )
    for marker, (label, name) in zip(MARKERS, FOUND.items(), strict=False):
        rows = [r for r in runs[name] if "pace" in r]
        right.plot(
            [r["step"] / rows[-1]["step"] for r in rows],
            [r["pace"] for r in rows],
            label=label,
            marker=marker,
            markevery=3,
        )
    right.set(xlabel="part of the run", ylabel="f", title="The pace f is found", yscale="log")
    for axes in (left, right):
        axes.legend()
    return figure


if __name__ == "__main__":
    folder = HERE.parent / "docs" / "paced"
    folder.mkdir(exist_ok=True)
    for path in write_figure(draw, folder / "paces"):
        if path.suffix == ".svg":
            path.unlink()  # pages show the PNG
        else:
            print(path.name)
