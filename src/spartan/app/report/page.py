"""Writes reports, each one self-contained HTML page (styles, code and data are inside it): of a run, or of several."""

import json
import math
import os
import shlex
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from spartan.app.report.charts import Chart, exploration_charts, layer_charts, line, sparsity_charts, training_charts
from spartan.app.report.compare import Row, curves_of, panels_of, rows_of
from spartan.app.report.words import NONE, Cell, count, duration, escape, figure, percent, ratio, short, size, table
from spartan.app.runs import BITS, TOP1, RunFolder, find_runs, is_run, measure_of_run, number
from spartan.disk import replace_file

LAST_EPOCH = (
    "Accuracy is that of the last epoch on the test data, not the best one seen on the way: "
    "picking the best epoch would be picking on the test data."
)


def write_report(folder: Path) -> Path:
    """Write the page of a run, or of a folder that holds several, as report.html inside; returns where it is."""
    body, charts = run_page(RunFolder(folder)) if is_run(folder) else comparison_page(folder, find_runs([folder]))
    assets = resources.files("spartan.app.report") / "assets"
    names = ("page.html", "report.css", "scales.js", "charts.js", "report.js")
    html, styles, *code = ((assets / name).read_text("utf-8") for name in names)
    inside = {"title": escape(folder.resolve().name), "body": body, "data": to_script({"charts": charts})}
    page = Template(html).substitute(inside, styles=styles, code="\n".join(code))
    replace_file(folder / "report.html", page.encode())
    return folder / "report.html"


def to_script(data: Any) -> str:
    """JSON that can stand inside a <script> element, whatever texts it holds."""
    text = json.dumps(_plain(data), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(value: Any) -> Any:
    """The value with NaN and infinity as null and numbers at six digits, which is finer than any screen."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def run_page(run: RunFolder) -> tuple[str, list[Chart]]:
    """The page's body, and its charts."""
    nothing = "A dense run: every weight is kept." if run.dense else "Nothing was logged yet."
    sections = [  # with what stands below the charts, and why there are none
        ("Training", training_charts(run), "", "Nothing was logged yet."),
        ("Sparsity", sparsity_charts(run), "", nothing),
        ("Exploration", exploration_charts(run), "", "Needs the masks of two epochs or more (masks.npz)."),
        ("Layers", layer_charts(run), _layer_table(run), "The layer table is written when the run finishes."),
    ]
    if measure_of_run(run) is BITS:
        sections.append(("Samples", [], _samples(run), "Samples are written when the run finishes."))
    if run.dense:
        del sections[2]
    parts = [_header(run), _notices(run), _cards(run), f'<p class="note lead">{escape(LAST_EPOCH)}</p>']
    for title, charts, extra, why in sections:
        below = extra or ("" if charts else f'<p class="note">{why}</p>')
        parts.append(f"<section><h2>{title}</h2>{chart_grid(charts)}{below}</section>")
    parts.append(_reproduce(run))
    return "\n".join(parts), [chart for _, charts, *_ in sections for chart in charts]


def chart_grid(charts: list[Chart]) -> str:
    """The places where the charts will be drawn."""
    figures = []
    for chart in charts:
        kind = "card chart wide" if chart.get("wide") else "card chart"
        note = f'<p class="note">{escape(chart["note"])}</p>' if chart.get("note") else ""
        figures.append(
            f'<figure class="{kind}" id="chart-{escape(chart["id"])}" data-chart="{escape(chart["id"])}">'
            f"<figcaption><h3>{escape(chart['title'])}</h3>{note}</figcaption></figure>"
        )
    return f'<div class="grid">{"".join(figures)}</div>' if figures else ""


def _header(run: RunFolder) -> str:
    recipe = run.recipe
    data = recipe.get("data")
    source = data.get("source", "?") if isinstance(data, dict) else "?"
    what = "dense" if run.dense else f"{run.method} at {100 * run.sparsity:g}% sparsity"
    facts = f"{what} · {recipe.get('model', '?')} on {source} · {run.planned_epochs} epochs · seed {run.seed}"
    state = "good" if run.finished else "warn"
    description = f"<p>{escape(recipe['description'])}</p>" if recipe.get("description") else ""
    return (
        f'<header><div><p class="label">Spartan run</p><h1>{escape(run.name)}</h1><p class="facts">{escape(facts)}</p>'
        f'{description}</div><p class="pill {state}">{escape(run.status)}</p></header>'
    )


def _notices(run: RunFolder) -> str:
    texts = []
    if not run.finished:
        texts.append(f"This run is {run.status}; figures are those of the last epoch it reached.")
    for lost in [r["step"] for r in run.steps if "loss" in r and number(r["loss"]) is None][:1]:
        texts.append(f"The training loss was no longer a number at step {count(lost)}.")
    if run.damaged_lines:
        lines = "1 line {} and is" if run.damaged_lines == 1 else f"{run.damaged_lines} lines {{}} and are"
        texts.append(lines.format("of metrics.jsonl could not be read") + " left out.")
    if run.damage:
        texts.append(f"summary.json is damaged: {run.damage}.")
    if not run.recipe:
        texts.append("recipe.yaml could not be read.")
    return "".join(f'<p class="notice" role="note">{escape(t)}</p>' for t in texts)


def _cards(run: RunFolder) -> str:
    last = run.epochs[-1] if run.epochs else {}
    s: dict[str, Any] = run.summary or {}
    by, (top1, top5, loss) = measure_of_run(run), (s.get(key, last.get(key)) for key in ("top1", "top5", "test_loss"))
    more = f"top-5 {percent(top5)}"
    if by is BITS:
        more = f"loss {NONE if number(loss) is None else format(loss, '.4f')}; next byte right {percent(top1)}"
    density = number(last.get("density"))
    sparsity = s.get("achieved_sparsity", None if density is None else 1 - density)
    seconds = s.get("seconds", last.get("seconds"))
    flops = ratio(s.get("flops_sparse"), s.get("flops_dense"))
    smaller = ratio(s.get("dense_bytes"), s.get("model_bytes"))
    below = ""
    if smaller is not None and smaller >= 1.05:
        below = f"packed; dense {size(s['dense_bytes'])}, {smaller:.1f}× as large"
    speed = s.get("images_per_s", last.get("images_per_s"))
    nonzero = f"{count(s['nonzero'])} of {count(s.get('parameters'))}" if "nonzero" in s else "when it finishes"
    work = "of dense" if flops is None else f"of dense; {short(s['flops_sparse'])} of {short(s['flops_dense'])}"
    epoch = f"epoch {last['epoch']}" if last else "no epoch yet"
    cards = [
        (f"{by.name.capitalize()}, last epoch", by.text(s.get(by.key, last.get(by.key))), f"{epoch}; {more}"),
        ("Achieved sparsity", percent(sparsity), f"asked: {100 * run.sparsity:g}%"),
        ("Nonzero weights", short(s.get("nonzero")), nonzero),
        ("FLOPs", percent(flops, 1), work if s else "when it finishes"),
        ("File size", size(s.get("model_bytes")), below if s else "when it finishes"),
        ("Time", duration(seconds), f"{short(speed)} {by.unit}/s"),
    ]
    html = ""
    for i, (label, value, note) in enumerate(cards):
        small = f'<p class="note">{escape(note)}</p>' if note else ""
        html += f'<div class="card figure{"" if i else " main"}"><p class="label">{escape(label)}</p>'
        html += f'<p class="value">{escape(value)}</p>{small}</div>'
    return f'<div class="figures">{html}</div>'


def _layer_table(run: RunFolder) -> str:
    layers = (run.summary or {}).get("layers") or []
    if not layers:
        return ""
    with_flops = any(number(layer.get("flops")) is not None for layer in layers)
    rows: list[dict[str, Cell]] = []
    for i, layer in enumerate(layers, 1):
        name, density = str(layer.get("name", "?")), number(layer.get("density"))
        width = 0 if density is None else min(max(100 * density, 0), 100)
        bar = f'<span class="meter"><i style="width:{width:.2f}%"></i></span><b>{percent(density)}</b>'
        row: dict[str, Cell] = {
            "#": (str(i), i),
            "layer": (name, name, f"<code>{escape(name)}</code>"),
            "shape": ("×".join(map(str, layer.get("shape") or [])), layer.get("parameters")),
            "parameters": figure(layer.get("parameters"), count),
            "kept": figure(layer.get("kept"), count),
            "density": (percent(density), density, bar),
        }
        if with_flops:
            row["FLOPs, dense"] = figure(layer.get("flops"), short)
            row["FLOPs, sparse"] = figure(layer.get("sparse_flops"), short)
        rows.append(row)
    one = measure_of_run(run).unit.removesuffix("s")
    note = f'<p class="note">FLOPs are per {one}. A click on a heading sorts.</p>' if with_flops else ""
    return f'<div class="card">{table(rows, "Layers", text=3)}{note}</div>'


def _samples(run: RunFolder) -> str:
    """What the trained model wrote after some prompts."""
    written = (run.summary or {}).get("samples")
    cards = ""
    for sample in written if isinstance(written, list) else ():
        if isinstance(sample, dict):
            prompt, text = (escape(sample.get(key, "")) for key in ("prompt", "text"))
            cards += f'<div class="card"><pre class="sample" tabindex="0"><b>{prompt}</b>{text}</pre></div>'
    note = '<p class="note">Bold is the prompt, from the test data; the rest was drawn at temperature 0.8.</p>'
    return f'{note}<div class="grid">{cards}</div>' if cards else ""


def _reproduce(run: RunFolder) -> str:
    again = shlex.join(["spartan", "train", f"{run.name}/recipe.yaml", "--out", f"{run.name}-again"])
    resume = shlex.join(["spartan", "train", "--resume", run.name])
    ask = "Continue it (a finished run is left as it is)" if run.finished else "Continue it where it stopped"
    environment, versions = run.environment, run.environment.get("versions")
    keys = {
        "started": "started",
        "commit": "commit",
        "device": "device",
        "CPU cores": "host_cores",
        "command": "command",
    }
    facts = {label: environment.get(key) for label, key in keys.items()}
    if isinstance(facts["command"], list):
        facts["command"] = shlex.join(map(str, facts["command"]))
    facts |= versions if isinstance(versions, dict) else {}
    data = environment.get("data")
    if isinstance(data, dict):
        facts |= {f"data: {key}": value for key, value in data.items()}
    rows = "".join(
        f"<dt>{escape(k)}</dt><dd><code>{escape(v)}</code></dd>" for k, v in facts.items() if v is not None and v != ""
    )
    known = f"<dl>{rows}</dl>" if rows else '<p class="note">environment.json is missing.</p>'
    return (
        "<section><h2>Reproduce</h2>"
        '<p class="note">From the folder that holds this run:</p><div class="grid">'
        f'<div class="card"><h3>Run it again</h3>{_copyable(again)}<h3>{ask}</h3>{_copyable(resume)}</div>'
        f'<div class="card"><h3>Where it ran</h3>{known}</div></div>'
        f'<div class="card"><h3>recipe.yaml</h3>{_copyable(run.recipe_text)}</div></section>'
    )


def _copyable(text: str) -> str:
    return f'<div class="copy"><button type="button">Copy</button><pre tabindex="0">{escape(text.rstrip())}</pre></div>'


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
        title = "Accuracy" if all(row.measure is TOP1 for row in rows) else "Scores"
        body += f"<section><h2>{title}</h2>{chart_grid(charts)}</section>"
    if rows:
        body += f'<section><h2>Methods</h2><div class="card">{_row_table(rows)}</div></section>'
    runs_table = table([_run_cells(run, folder) for run in runs], "Every run", text=3)
    body += f'<section><h2>Runs</h2><div class="card">{runs_table}</div></section>'
    return body, charts


def _row_table(rows: Sequence[Row]) -> str:
    hidden = set() if len(panels_of(rows)) > 1 else {"data", "model"}
    hidden |= set() if any(row.extra for row in rows) else {"setting"}
    words = 4 - len(hidden)
    hidden |= set() if any(row.measure is TOP1 for row in rows) else {"top-1", "top-5"}
    hidden |= set() if any(row.measure is BITS for row in rows) else {BITS.name}
    cells = [{key: cell for key, cell in _row_cells(row).items() if key not in hidden} for row in rows]
    note = '<p class="note">FLOPs are a fraction of the dense model’s. A click on a heading sorts.</p>'
    return table(cells, "Means over seeds, by method and sparsity", text=words) + note


def _row_cells(row: Row) -> dict[str, Cell]:
    return {
        "data": row.data,
        "model": row.model,
        "method": row.method,
        "setting": row.setting or NONE,
        "sparsity": (f"{100 * row.sparsity:g}%", row.sparsity),
        "runs": (str(len(row.runs)), len(row.runs)),
        BITS.name: _score(row) if row.measure is BITS else (NONE, None),
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
    mean, std = row.percent(key)
    return (NONE if mean is None else f"{mean:.2f}%") + ("" if std is None else f" ± {std:.2f}"), number(row.mean(key))


def _score(row: Row) -> Cell:
    mean, std = row.score
    digits = row.measure.digits
    return (NONE if mean is None else f"{mean:.{digits}f}") + ("" if std is None else f" ± {std:.{digits}f}"), mean


def _run_cells(run: RunFolder, folder: Path) -> dict[str, Cell]:
    by = measure_of_run(run)
    scores = run.summary or {by.key: run.epochs[-1].get(by.key) if run.epochs else None}
    # The run's page where it has one, else its folder, relative to the page that links to it.
    page = run.folder / "report.html"
    address = os.path.relpath(page if page.is_file() else run.folder, folder).replace(os.sep, "/")
    return {
        "run": (run.name, run.name, f'<a href="{escape(quote(address))}">{escape(run.name)}</a>'),
        "method": run.method,
        "state": run.status,
        "sparsity": (f"{100 * run.sparsity:g}%", run.sparsity),
        "seed": (str(run.seed), run.seed),
        "score": (by.text(scores.get(by.key)), number(scores.get(by.key))),
        "achieved sparsity": figure(scores.get("achieved_sparsity"), percent),
        "time": figure(scores.get("seconds"), duration),
    }


def _charts(rows: Sequence[Row]) -> list[Chart]:
    """Scores against sparsity and, where FLOPs are known, against FLOPs; for every data set and model."""
    panels = panels_of(rows)
    axes: list[tuple[str, str, dict[str, Any], Callable[[Row], float]]] = [
        ("sparsity", "sparsity", {"label": "sparsity (%)", "scale": "sparsity"}, lambda row: row.sparsity),
        ("flops", "FLOPs", {"label": "FLOPs (% of dense)", "scale": "log"}, lambda row: row.flops),
    ]
    charts: list[Chart] = []
    for i, ((data, model), members) in enumerate(panels.items()):
        where = f": {model} on {data}" if len(panels) > 1 else ""
        by = members[0].measure
        y: dict[str, Any] = {"label": by.label, **({"unit": "%", "limits": [0, 100]} if by.percent else {})}
        dense, lines = curves_of([row for row in members if row.score[0] is not None])
        means = [(row.label, *row.score) for row in dense]
        levels = [{"y": mean, "name": label, "error": std} for label, mean, std in means]
        for key, word, x, at in axes:
            series: list[Chart] = []
            for label, found in lines.items():
                points = [(100 * at(row), *row.score) for row in found if (number(at(row)) or 0) > 0]
                if points:
                    xs, ys, errors = zip(*sorted(points, key=lambda p: p[0]), strict=True)
                    # Six colours; then the dashes change.
                    dash = ("", "6 3", "2 3")[len(series) // 6 % 3]
                    series.append(line(label, xs, ys, error=errors, dots=True, marker=len(series), dash=dash))
            what = "Accuracy" if by.percent else by.name.capitalize()
            chart = {"id": f"{key}-{i}", "title": f"{what} against {word}{where}", "x": {**x, "unit": "%"}, "y": y}
            note = f"Last-epoch {by.name}, mean over seeds; bars show ± one standard deviation."
            charts += [{**chart, "note": note, "series": series, "lines": levels}] if series else []
    return charts
