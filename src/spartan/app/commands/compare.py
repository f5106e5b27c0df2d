"""`spartan compare` puts runs side by side: a table, a CSV file, a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spartan.app.report import compare as tables
from spartan.app.runs import find_runs


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that contain runs.")],
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="One line a run, unrounded.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="The table as Markdown.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Accuracy against sparsity.")] = None,
) -> None:
    """Compare runs, with means over seeds.

    Runs that differ in their seed only make one line: last-epoch top-1 as mean ± sample standard deviation, and every
    seed's own. Unfinished runs are named and not averaged.

    \b
    spartan compare runs
    spartan compare runs/sweep --markdown table.md --csv runs.csv --plot curve.png
    """
    found = find_runs(runs)
    rows = tables.rows_of(found)
    for path in (csv, markdown, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
    if (csv or markdown or plot) and not rows:
        raise ValueError(f"none of the {len(found)} runs is finished; there is nothing to write")
    if csv is not None:
        csv.write_text(tables.to_csv(rows), "utf-8")
    if markdown is not None:
        markdown.write_text(tables.to_markdown(rows), "utf-8")
    if plot is not None:
        tables.plot(rows, plot)
    tables.print_comparison(found)
