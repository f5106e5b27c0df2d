"""Writes the page of one run."""

from __future__ import annotations

import shlex
from typing import Any

from spartan.app.report.charts import Chart, exploration_charts, layer_charts, sparsity_charts, training_charts
from spartan.app.report.words import Cell, card, count, duration, escape, figure, percent, ratio, short, size, table
from spartan.app.runs import RunFolder, number

LAST_EPOCH = (
    "Accuracy is that of the last epoch on the test data, not the best one seen on the way: "
    "picking the best epoch would be picking on the test data."
)


def run_page(run: RunFolder) -> tuple[str, list[Chart]]:
    """The page's body, and its charts."""
    sections = [
        ("Training", "", training_charts(run)),
        ("Sparsity", "", sparsity_charts(run)),
        ("Exploration", "", exploration_charts(run)),
        ("Layers", _layer_table(run), layer_charts(run)),
    ]
    if run.dense:
        del sections[2]
    parts = [_header(run), _notices(run), _cards(run), f'<p class="note lead">{escape(LAST_EPOCH)}</p>']
    for title, extra, charts in sections:
        extra = extra or _why_empty(run, title, charts)
        parts.append(f"<section><h2>{title}</h2>{chart_grid(charts)}{extra}</section>")
    parts.append(_reproduce(run))
    return "\n".join(parts), [chart for _, _, charts in sections for chart in charts]


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
    lost = next((r for r in run.steps if "loss" in r and number(r["loss"]) is None), None)
    if lost is not None:
        texts.append(f"The training loss was no longer a number at step {count(lost['step'])}.")
    if run.damaged_lines:
        lines = "1 line" if run.damaged_lines == 1 else f"{run.damaged_lines} lines"
        texts.append(f"{lines} of metrics.jsonl could not be read and {'is' if lines[0] == '1' else 'are'} left out.")
    if not run.recipe:
        texts.append("recipe.yaml could not be read.")
    return "".join(f'<p class="notice" role="note">{escape(t)}</p>' for t in texts)


def _cards(run: RunFolder) -> str:
    last = run.epochs[-1] if run.epochs else {}
    s: dict[str, Any] = run.summary or {}
    top1, top5 = s.get("top1", last.get("top1")), s.get("top5", last.get("top5"))
    density = number(last.get("density"))
    sparsity = s.get("achieved_sparsity", None if density is None else 1 - density)
    seconds = s.get("seconds", sum(number(e.get("seconds")) or 0 for e in run.epochs) or None)
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
        card("Top-1, last epoch", percent(top1), f"{epoch}; top-5 {percent(top5)}", main=True),
        card("Achieved sparsity", percent(sparsity), f"asked: {100 * run.sparsity:g}%"),
        card("Nonzero weights", short(s.get("nonzero")), nonzero),
        card("FLOPs", percent(flops, 1), work if s else "when it finishes"),
        card("File size", size(s.get("model_bytes")), below if s else "when it finishes"),
        card("Time", duration(seconds), f"{short(speed)} images/s"),
    ]
    return f'<div class="figures">{"".join(cards)}</div>'


def _why_empty(run: RunFolder, title: str, charts: list[Chart]) -> str:
    """Why a section is empty."""
    if charts:
        return ""
    reasons = {
        "Layers": "The layer table is written when the run finishes.",
        "Exploration": "Needs the masks of two epochs or more (masks.npz).",
    }
    text = reasons.get(title, "Nothing was logged yet.")
    if title == "Sparsity" and run.dense:
        text = "A dense run: every weight is kept."
    return f'<p class="note">{text}</p>'


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
    note = '<p class="note">FLOPs are per image. A click on a heading sorts.</p>' if with_flops else ""
    return f'<div class="card">{table(rows, "Layers", text=3)}{note}</div>'


def _reproduce(run: RunFolder) -> str:
    again = shlex.join(["spartan", "train", f"{run.name}/recipe.yaml", "--out", f"{run.name}-again"])
    resume = shlex.join(["spartan", "train", "--resume", run.name])
    ask = "Continue it (a finished run is left as it is)" if run.finished else "Continue it where it stopped"
    environment = run.environment
    command = environment.get("command")
    facts: list[tuple[str, Any]] = [
        ("started", environment.get("started")),
        ("commit", environment.get("commit")),
        ("device", environment.get("device")),
        ("CPU cores", environment.get("host_cores")),
        ("command", shlex.join(map(str, command)) if isinstance(command, list) else command),
    ]
    versions = environment.get("versions")
    facts += list(versions.items()) if isinstance(versions, dict) else []
    rows = "".join(
        f"<dt>{escape(k)}</dt><dd><code>{escape(v)}</code></dd>" for k, v in facts if v is not None and v != ""
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
