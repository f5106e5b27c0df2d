"""Makes the charts of one run from its files. A chart is a dict that assets/charts.js draws."""

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spartan.app.runs import BITS, RunFolder, measure_of_run, number
from spartan.app.train.setup import build_method
from spartan.methods import as_method
from spartan.problem.schedules import Moment

Chart = dict[str, Any]
# What a chart gets of a line at most; a screen has no more columns.
LIMIT = 2000
# Axes across.
_EPOCHS = {"label": "epoch", "whole": True, "start": 0}
_STEPS = {"label": "step", "whole": True, "start": 0}


def training_charts(run: RunFolder) -> list[Chart]:
    """Accuracy, loss and learning rate."""
    at, per_epoch = _integers(run.epochs, "epoch"), _steps_per_epoch(run)
    accuracy = [
        line("top-1", at, _column(run.epochs, "top1"), percent=True, dots=True),
        line("top-5", at, _column(run.epochs, "top5"), percent=True, dots=True, dash="5 3"),
    ]
    # Before the first epoch ends nobody knows how long one is: then the axis counts steps.
    steps = [s / (per_epoch or 1) for s in _integers(run.steps, "step")]
    loss = [
        line("training, every step", steps, _column(run.steps, "loss"), faint=True, color=0),
        line("test", at, _column(run.epochs, "test_loss"), dots=True, color=1),
        line("training", at, _column(run.epochs, "train_loss"), dots=True, color=0),
    ]
    y = {"label": "accuracy (%)", "unit": "%", "limits": [0, 100]}
    note = "Training loss includes label smoothing and mixing, so the two need not meet."
    bits = [line(BITS.name, at, _column(run.epochs, BITS.key), dots=True)]
    told = "On the test data, after every epoch."
    if measure_of_run(run) is BITS:
        note, told = (
            "In nats per byte.",
            "How often the next byte of the test data was the likeliest, or among the first five.",
        )
    return _without_empty(
        _chart(
            "bits", "Bits per byte", _EPOCHS, {"label": BITS.label}, bits, note="On the test data, after every epoch."
        ),
        _chart("accuracy", "Accuracy", _EPOCHS, y, accuracy, note=told),
        _chart("loss", "Loss", _EPOCHS if per_epoch else _STEPS, {"label": "loss", "toggle": True}, loss, note=note),
        _chart_of_steps(run, "lr", "Learning rate", "learning rate", "lr"),
    )


def sparsity_charts(run: RunFolder) -> list[Chart]:
    """Density, β, and how the soft mask is distributed."""
    note = "Small β gives a soft mask that explores; large β a hard one. It stays put in the finetune phase."
    beta = _chart_of_steps(run, "beta", "Sharpness β", "β", "beta", note=note)
    return _without_empty(_density(run), beta, _histogram(run))


def exploration_charts(run: RunFolder) -> list[Chart]:
    """How the mask moves: the paper's exploration figure."""
    masks = kept_bits(run)
    if masks is None or len(masks) < 2:
        return []
    with_last, with_previous = mask_correlations(masks)
    epochs = list(range(1, len(masks) + 1))
    last = "with the final mask" if run.finished else "with the latest mask"
    note = f"Pearson correlation of the kept weights, on {masks.shape[1]:,} of them. "
    note += "Low while the mask explores, 1 once it is fixed."
    series = [
        line(last, epochs, with_last, dots=True),
        line("with the epoch before", epochs[1:], with_previous, dots=True, dash="5 3"),
    ]
    n = _steps_per_epoch(run)
    bands = [{**phase, "from": phase["from"] / n, "to": phase["to"] / n} for phase in phases(run)] if n else []
    y = {"label": "correlation", "limits": [None, 1.0]}
    return _without_empty(_chart("correlation", "Mask correlation", _EPOCHS, y, series, note=note, bands=bands))


def layer_charts(run: RunFolder) -> list[Chart]:
    """Sparsity of every layer."""
    layers = (run.summary or {}).get("layers") or []
    densities = [number(layer.get("density")) for layer in layers]
    if not any(d is not None and d < 1 for d in densities):
        return []
    at = list(range(1, len(layers) + 1))
    sparsities = [None if d is None else 100 * (1 - d) for d in densities]
    whole = number((run.summary or {}).get("achieved_sparsity"))
    mean = [] if whole is None else [{"y": 100 * whole, "name": "whole model"}]
    kept = [] if whole is None or whole >= 1 else [{"y": 100 * (1 - whole), "name": "whole model"}]
    sparsity = {
        "name": "sparsity",
        "y": {"label": "sparsity (%)", "unit": "%", "limits": [0, 100]},
        "series": [line("sparsity", at, sparsities)],
        "lines": mean,
    }
    density = {
        "name": "density, log",
        "y": {"label": "weights kept (%)", "unit": "%", "scale": "log", "limits": [None, 100]},
        "series": [line("kept", at, densities, percent=True, color=1)],
        "lines": kept,
    }
    chart = {
        **{"id": "layers", "title": "Layers", "kind": "bars", "bar": 1, "wide": True},
        "note": "From input to output; numbers are those of the table below.",
        "x": {"label": "layer", "whole": True},
        "names": [str(layer.get("name", i)) for i, layer in zip(at, layers, strict=True)],
        "views": [sparsity, density],
    }
    return [chart]


def _chart(key: str, title: str, x: Chart, y: Chart, series: list[Chart], **more: Any) -> Chart:
    return {"id": key, "title": title, "x": x, "y": y, "series": series, **more}


def _chart_of_steps(run: RunFolder, key: str, title: str, label: str, column: str, **more: Any) -> Chart:
    """One column of the steps, before the run's phases."""
    series = [line(label, *_over_steps(run, column))]
    return _chart(key, title, _STEPS, {"label": label, "toggle": True}, series, bands=phases(run), **more)


def line(name: str, x: Sequence[float], y: Sequence[float | None], *, percent: bool = False, **style: Any) -> Chart:
    """One series, thinned out where it is long."""
    xs, ys = downsample(x, [None if v is None else 100 * v for v in y] if percent else y)
    return {"name": name, "x": xs, "y": ys, **style}


def _without_empty(*charts: Chart) -> list[Chart]:
    """Without the series, and then the charts, that have no value at all."""
    for chart in charts:
        chart["series"] = [s for s in chart["series"] if any(v is not None for v in s["y"])]
    return [chart for chart in charts if chart["series"]]


def _column(records: Sequence[dict[str, Any]], key: str) -> list[float | None]:
    return [number(r.get(key)) for r in records]


def _integers(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [int(r[key]) for r in records]


def _over_steps(run: RunFolder, key: str) -> tuple[list[float], list[float | None]]:
    """A column of the steps, without those that do not have it."""
    known = [record for record in run.steps if number(record.get(key)) is not None]
    return _integers(known, "step"), _column(known, key)


def _density(run: RunFolder) -> Chart:
    asked_at, asked = _over_steps(run, "target_density")
    # The density of a step is known only where the host looked; every epoch's end is one such moment.
    found = dict(zip(*_over_steps(run, "density"), strict=True))
    found |= {int(e["step"]): number(e.get("density")) for e in run.epochs if number(e.get("step")) is not None}
    if all(v == 1 for v in [*asked, *found.values()] if v is not None):
        return {"series": []}  # a dense run: nothing to see
    at = sorted(found)
    # A line between far-apart moments would show a density the model never had.
    points = 4 * len(at) < len(asked_at)
    series = [
        line("achieved", at, [found[s] for s in at], percent=True, color=0, dots=True, points=points),
        line("target", asked_at, asked, percent=True, color=1, dash="4 6"),
    ]
    note = "The fraction of weights that is kept: what the schedule asks for and what the model has."
    y = {"label": "density (%)", "unit": "%", "scale": "log", "toggle": True, "limits": [0, 100]}
    return _chart("density", "Density", _STEPS, y, series, note=note, bands=phases(run))


def _histogram(run: RunFolder) -> Chart:
    found = [(int(e["epoch"]), e.get("mask_histogram")) for e in run.epochs]
    frames = [(e, h) for e, h in found if isinstance(h, list) and None not in map(number, h) and sum(h) > 0]
    if not frames:
        return {"series": []}
    bins = len(frames[-1][1])
    frames = [f for f in frames if len(f[1]) == bins]
    series = [line("weights", [(i + 0.5) / bins for i in range(bins)], frames[-1][1])]
    y = {"label": "weights", "scale": "log", "toggle": True, "limits": [0, None]}
    more = {
        "note": "How many weights have which mask value. A mask that has made up its mind has all of them at 0 and 1.",
        "names": [f"m from {i / bins:.2f} to {(i + 1) / bins:.2f}" for i in range(bins)],
        "frames": {"label": "epoch", "at": [e for e, _ in frames], "y": [h for _, h in frames]},
    }
    return _chart("histogram", "Soft mask", {"label": "mask value m"}, y, series, kind="bars", bar=1 / bins, **more)


def _steps_per_epoch(run: RunFolder) -> float | None:
    total = total_steps(run)
    return total / run.planned_epochs if total and run.planned_epochs else None


def total_steps(run: RunFolder) -> int | None:
    """Optimizer steps of the whole run, as far as the files tell."""
    if run.summary and (steps := number(run.summary.get("steps"))):
        return int(steps)
    if run.epochs and (step := number(run.epochs[-1].get("step"))):
        return round(step / run.epochs[-1]["epoch"] * run.planned_epochs)
    return None


def phases(run: RunFolder) -> list[dict[str, Any]]:
    """Where warm-up, intermediate and finetune phases begin and end, in steps; empty where that is unknown."""
    total, method = total_steps(run), None
    with contextlib.suppress(ValueError):
        method = as_method(run.method)  # the recipe may be another version's
        method = build_method(run.config)  # whose settings may decide how long its phases are
    given = {key: number(run.recipe.get(key)) for key in ("warmup", "finetune")}
    warmup, finetune = (getattr(method, key, None) if value is None else value for key, value in given.items())
    if not total or warmup is None or finetune is None or run.dense:
        return []
    try:
        at = Moment.start(total, warmup, finetune, 0)
    except ValueError:
        return []
    edges = [0, at.warmup_steps, at.freeze_step, total]
    names = ["warm-up", "intermediate", "finetune"]
    return [{"from": a, "to": b, "name": n} for a, b, n in zip(edges[:-1], edges[1:], names, strict=True) if b > a]


def kept_bits(run: RunFolder) -> npt.NDArray[np.bool_] | None:
    """The kept bits of the sampled weights, [epochs, n]; None where there are none to read."""
    try:
        # Opened here: numpy forgets to close a file that it cannot read.
        with (run.folder / "masks.npz").open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            bits, n = file["bits"], int(file["n"])
        if bits.ndim != 2 or bits.dtype != np.uint8 or n < 1 or bits.shape[1] * 8 < n:
            return None
        return np.unpackbits(bits, axis=1, count=n).astype(bool)
    except Exception:  # a damaged zip surfaces as almost any exception
        return None


def downsample(
    x: Sequence[float], y: Sequence[float | None], limit: int = LIMIT
) -> tuple[list[float], list[float | None]]:
    """At most `limit` points: both ends, and of every stretch between them the lowest, the highest and a gap if any."""
    n = len(x)
    if n <= limit:
        return list(x), list(y)
    values = np.array([math.nan if v is None else v for v in y], dtype=float)
    gaps = np.isnan(values)
    stretches = (limit - 2) // (3 if gaps.any() else 2)
    chosen = {0, n - 1}
    for part in np.array_split(np.arange(n), stretches):
        gap = gaps[part]
        if gap.any():
            chosen.add(int(part[int(np.argmax(gap))]))
        if not gap.all():
            chosen.add(int(part[int(np.nanargmin(values[part]))]))
            chosen.add(int(part[int(np.nanargmax(values[part]))]))
    order = sorted(chosen)
    return [x[i] for i in order], [y[i] for i in order]


def correlation(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> float | None:
    """Pearson correlation of two masks; None where one of them keeps all or nothing."""
    p, q = float(a.mean()), float(b.mean())
    spread = math.sqrt(p * (1 - p) * q * (1 - q))
    return None if spread == 0 else (float((a & b).mean()) - p * q) / spread


def mask_correlations(masks: npt.NDArray[np.bool_]) -> tuple[list[float | None], list[float | None]]:
    """Of every epoch's mask with the last one, and with the one before it (from the second epoch on)."""
    with_last = [correlation(mask, masks[-1]) for mask in masks]
    with_previous = [correlation(a, b) for a, b in itertools.pairwise(masks)]
    return with_last, with_previous
