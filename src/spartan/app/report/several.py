"""Writes the page that compares the runs of a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spartan.app.report.charts import Chart, line
from spartan.app.report.compare import Row, panels_of, rows_of
from spartan.app.report.single import LAST_EPOCH, chart_grid
from spartan.app.report.words import NONE, Cell, count, duration, escape, figure, percent, size, table
from spartan.app.runs import RunFolder, number


def comparison_page(folder: Path, runs: Sequence[RunFolder]) -> tuple[str, list[Chart]]:
    """The page's body, and its charts."""
    rows = rows_of(runs)
    charts = _charts(rows)
    finished = sum(run.finished for run in runs)
    unfinished = len(runs) - finished
    facts = f"{finished} finished {'run' if finished == 1 else 'runs'}"
    facts += f", {unfinished} unfinished (listed, not in the means)" if unfinished else ""
    spread = "± is the sample standard deviation over seeds (n − 1)."
    nothing = "" if rows else '<p class="notice" role="note">No run has finished yet.</p>'
    body = (
        f'<header><div><p class="label">Spartan comparison</p><h1>{escape(folder.resolve().name)}</h1>'
        f'<p class="facts">{escape(facts)}</p></div></header>{nothing}'
        f'<p class="note lead">{escape(LAST_EPOCH)} {spread}</p>'
    )
    if charts:
        body += f"<section><h2>Accuracy</h2>{chart_grid(charts)}</section>"
    if rows:
        body += f'<section><h2>Methods</h2><div class="card">{_row_table(rows)}</div></section>'
    runs_table = table([_run_cells(run, folder) for run in runs], "Every run", text=3)
    body += f'<section><h2>Runs</h2><div class="card">{runs_table}</div></section>'
    return body, charts


# ---------------------------------------------------------------------- tables


def _row_table(rows: Sequence[Row]) -> str:
    hidden = set() if len(panels_of(rows)) > 1 else {"data", "model"}
    hidden |= set() if any(row.extra for row in rows) else {"setting"}
    cells = [{key: cell for key, cell in _row_cells(row).items() if key not in hidden} for row in rows]
    note = '<p class="note">FLOPs are a fraction of the dense model’s. A click on a heading sorts.</p>'
    return table(cells, "Means over seeds, by method and sparsity", text=4 - len(hidden)) + note


def _row_cells(row: Row) -> dict[str, Cell]:
    return {
        "data": row.data,
        "model": row.model,
        "method": row.method,
        "setting": row.setting or NONE,
        "sparsity": (f"{100 * row.sparsity:g}%", row.sparsity),
        "runs": (str(len(row.runs)), len(row.runs)),
        "top-1": _plus_minus(row, "top1"),
        "top-5": _plus_minus(row, "top5"),
        "achieved sparsity": figure(row.mean("achieved_sparsity"), percent),
        "nonzero": figure(row.mean("nonzero"), count),
        "FLOPs": figure(row.flops, percent, 1),
        "file": figure(row.mean("model_bytes"), size),
        "dense file": figure(row.mean("dense_bytes"), size),
        "time": figure(row.mean("seconds"), duration),
    }


def _plus_minus(row: Row, key: str) -> Cell:
    mean, std = number(row.mean(key)), number(row.std(key))
    return percent(mean) + ("" if std is None else f" ± {100 * std:.2f}"), mean


def _run_cells(run: RunFolder, folder: Path) -> dict[str, Cell]:
    scores = run.summary or {"top1": run.epochs[-1].get("top1") if run.epochs else None}
    # The run's page where it has one, else its folder, relative to the page that links to it.
    page = run.folder / "report.html"
    address = os.path.relpath(page if page.is_file() else run.folder, folder).replace(os.sep, "/")
    return {
        "run": (run.name, run.name, f'<a href="{escape(quote(address))}">{escape(run.name)}</a>'),
        "method": run.method,
        "state": run.status,
        "sparsity": (f"{100 * run.sparsity:g}%", run.sparsity),
        "seed": (str(run.seed), run.seed),
        "top-1": figure(scores.get("top1"), percent),
        "achieved sparsity": figure(scores.get("achieved_sparsity"), percent),
        "time": figure(scores.get("seconds"), duration),
    }


# ---------------------------------------------------------------------- charts


def _charts(rows: Sequence[Row]) -> list[Chart]:
    """Accuracy against sparsity and, where FLOPs are known, against FLOPs; for every data set and model."""
    panels = panels_of(rows)
    axes: list[tuple[str, str, dict[str, Any], Callable[[Row], float]]] = [
        ("sparsity", "sparsity", {"label": "sparsity (%)", "scale": "sparsity"}, lambda row: row.sparsity),
        ("flops", "FLOPs", {"label": "FLOPs (% of dense)", "scale": "log"}, lambda row: row.flops),
    ]
    charts = []
    for i, ((data, model), members) in enumerate(panels.items()):
        where = f": {model} on {data}" if len(panels) > 1 else ""
        for key, word, x, at in axes:
            chart = _accuracy_chart(members, {**x, "unit": "%"}, at)
            if chart is not None:
                charts.append({"id": f"{key}-{i}", "title": f"Accuracy against {word}{where}", **chart})
    return charts


def _accuracy_chart(rows: Sequence[Row], x: dict[str, Any], at: Callable[[Row], float]) -> Chart | None:
    """One line per method, one point per row; dense runs are a level across."""
    levels: list[dict[str, Any]] = []
    found: dict[str, list[tuple[float, float, float | None]]] = {}
    for row in rows:
        place, mean, std = number(at(row)), number(row.mean("top1")), number(row.std("top1"))
        error = None if std is None else 100 * std
        if mean is None:
            continue
        if row.sparsity == 0:
            levels.append({"y": 100 * mean, "name": row.label, "error": error})
        elif place is not None and place > 0:
            found.setdefault(row.label, []).append((100 * place, 100 * mean, error))
    series = []
    for i, (label, points) in enumerate(sorted(found.items())):
        xs, ys, errors = zip(*sorted(points, key=lambda p: p[0]), strict=True)
        # Six colours; then the dashes change.
        dash = ("", "6 3", "2 3")[i // 6 % 3]
        series.append(line(label, xs, ys, error=errors, dots=True, marker=i, dash=dash))
    if not series:
        return None
    return {
        "note": "Last-epoch top-1, mean over seeds; bars show ± one standard deviation.",
        "x": x,
        "y": {"label": "top-1 (%)", "unit": "%", "limits": [0, 100]},
        "series": series,
        "lines": levels,
    }
