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
from spartan.app.report.words import NONE, Cell, count, duration, escape, percent, size, table
from spartan.app.runs import RunFolder, number


def comparison_page(folder: Path, runs: Sequence[RunFolder], out: Path) -> tuple[str, list[Chart]]:
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
    body += f'<section><h2>Runs</h2><div class="card">{_run_table(runs, out)}</div></section>'
    return body, charts


# ---------------------------------------------------------------------- tables


def _row_table(rows: Sequence[Row]) -> str:
    several = len(panels_of(rows)) > 1
    words = ["data", "model", "method"] if several else ["method"]
    words += ["setting"] if any(row.extra for row in rows) else []
    figures = ["sparsity", "runs", "top-1", "top-5", "achieved sparsity", "nonzero", "FLOPs"]
    figures += ["file", "dense file", "time"]
    cells: list[list[Cell]] = []
    for row in rows:
        texts = {"data": row.data, "model": row.model, "method": row.method, "setting": row.setting or NONE}
        cells.append(
            [
                *((texts[w], texts[w]) for w in words),
                (f"{100 * row.sparsity:g}%", row.sparsity),
                (str(len(row.runs)), len(row.runs)),
                _plus_minus(row, "top1"),
                _plus_minus(row, "top5"),
                _figure(row.mean("achieved_sparsity"), percent),
                _figure(row.mean("nonzero"), count),
                _figure(row.flops, lambda v: percent(v, 1)),
                _figure(row.mean("model_bytes"), size),
                _figure(row.mean("dense_bytes"), size),
                _figure(row.mean("seconds"), duration),
            ]
        )
    note = '<p class="note">FLOPs are a fraction of the dense model’s. A click on a heading sorts.</p>'
    return table([*words, *figures], cells, "Means over seeds, by method and sparsity", text=len(words)) + note


def _plus_minus(row: Row, key: str) -> Cell:
    mean, std = number(row.mean(key)), number(row.std(key))
    return percent(mean) + ("" if std is None else f" ± {100 * std:.2f}"), mean


def _figure(value: float, show: Callable[[Any], str]) -> Cell:
    return show(value), number(value)


def _run_table(runs: Sequence[RunFolder], out: Path) -> str:
    columns = ["run", "method", "state", "sparsity", "seed", "top-1", "achieved sparsity", "time"]
    cells: list[list[Cell]] = []
    for run in runs:
        summary = run.summary or {}
        top1 = summary.get("top1") if run.finished else run.epochs[-1].get("top1") if run.epochs else None
        cells.append(
            [
                (run.name, run.name, f'<a href="{escape(_address(run.folder, out))}">{escape(run.name)}</a>'),
                (run.method, run.method),
                (run.status, run.status),
                (f"{100 * run.sparsity:g}%", run.sparsity),
                (str(run.seed), run.seed),
                (percent(top1), number(top1)),
                (percent(summary.get("achieved_sparsity")), number(summary.get("achieved_sparsity"))),
                (duration(summary.get("seconds")), number(summary.get("seconds"))),
            ]
        )
    return table(columns, cells, "Every run", text=3)


def _address(folder: Path, out: Path) -> str:
    """The run's page where it has one, else its folder, relative to the page that links to it."""
    page = folder / "report.html"
    return quote(os.path.relpath(page if page.is_file() else folder, out.parent).replace(os.sep, "/"))


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
