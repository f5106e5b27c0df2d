"""Makes the charts of one run. A chart is a dict that assets/charts.js draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spartan.app.report.series import downsample, kept_bits, mask_correlations, phases, total_steps
from spartan.app.runs import RunFolder, number

Chart = dict[str, Any]
# Axes across.
_EPOCHS = {"label": "epoch", "whole": True, "start": 0}
_STEPS = {"label": "step", "whole": True, "start": 0}


def training_charts(run: RunFolder) -> list[Chart]:
    """Accuracy, loss and learning rate."""
    return _without_empty([_accuracy(run), _loss(run), _learning_rate(run)])


def sparsity_charts(run: RunFolder) -> list[Chart]:
    """Density, β, and how the soft mask is distributed."""
    return _without_empty([_density(run), _beta(run), _histogram(run)])


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
    per_epoch = _per_epoch(run)
    steps = phases(run) if per_epoch else []
    bands = [{**phase, "from": phase["from"] / per_epoch, "to": phase["to"] / per_epoch} for phase in steps]
    y = {"label": "correlation", "limits": [None, 1.0]}
    return _without_empty([_chart("correlation", "Mask correlation", _EPOCHS, y, series, note=note, bands=bands)])


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


def _chart(key: str, title: str, x: Chart, y: Chart, series: list[dict[str, Any]], **more: Any) -> Chart:
    return {"id": key, "title": title, "x": x, "y": y, "series": series, **more}


def line(
    name: str, x: Sequence[float], y: Sequence[float | None], *, percent: bool = False, **style: Any
) -> dict[str, Any]:
    """One series, thinned out where it is long."""
    xs, ys = downsample(x, [None if v is None else 100 * v for v in y] if percent else y)
    return {"name": name, "x": xs, "y": ys, **style}


def _without_empty(charts: Sequence[Chart]) -> list[Chart]:
    """Without the series, and then the charts, that have no value at all."""
    for chart in charts:
        chart["series"] = [s for s in chart["series"] if any(v is not None for v in s["y"])]
    return [chart for chart in charts if chart["series"]]


def _column(records: Sequence[dict[str, Any]], key: str) -> list[float | None]:
    return [number(r.get(key)) for r in records]


def _integers(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [int(r[key]) for r in records]


def _per_epoch(run: RunFolder) -> float | None:
    """Steps per epoch."""
    total = total_steps(run)
    return total / run.planned_epochs if total and run.planned_epochs else None


def _accuracy(run: RunFolder) -> Chart:
    at = _integers(run.epochs, "epoch")
    series = [
        line("top-1", at, _column(run.epochs, "top1"), percent=True, dots=True),
        line("top-5", at, _column(run.epochs, "top5"), percent=True, dots=True, dash="5 3"),
    ]
    y = {"label": "accuracy (%)", "unit": "%", "limits": [0, 100]}
    return _chart("accuracy", "Accuracy", _EPOCHS, y, series, note="On the test data, after every epoch.")


def _loss(run: RunFolder) -> Chart:
    at, per_epoch = _integers(run.epochs, "epoch"), _per_epoch(run)
    # Before the first epoch ends nobody knows how long one is: then the axis counts steps.
    steps = [s / (per_epoch or 1) for s in _integers(run.steps, "step")]
    series = [
        line("training, every step", steps, _column(run.steps, "loss"), faint=True, color=0),
        line("test", at, _column(run.epochs, "test_loss"), dots=True, color=1),
        line("training", at, _column(run.epochs, "train_loss"), dots=True, color=0),
    ]
    note = "Training loss includes label smoothing and mixing, so the two need not meet."
    x, y = _EPOCHS if per_epoch else _STEPS, {"label": "loss", "toggle": True}
    return _chart("loss", "Loss", x, y, series, note=note)


def _over_steps(run: RunFolder, key: str) -> tuple[list[float], list[float | None]]:
    """A column of the steps, without those that do not have it."""
    pairs = [(int(r["step"]), number(r.get(key))) for r in run.steps]
    known = [(s, v) for s, v in pairs if v is not None]
    return [s for s, _ in known], [v for _, v in known]


def _learning_rate(run: RunFolder) -> Chart:
    series = [line("learning rate", *_over_steps(run, "lr"))]
    y = {"label": "learning rate", "toggle": True}
    return _chart("lr", "Learning rate", _STEPS, y, series, bands=phases(run))


def _beta(run: RunFolder) -> Chart:
    note = "Small β gives a soft mask that explores; large β a hard one. It stays put in the finetune phase."
    series = [line("β", *_over_steps(run, "beta"))]
    y = {"label": "β", "toggle": True}
    return _chart("beta", "Sharpness β", _STEPS, y, series, note=note, bands=phases(run))


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
    frames = [(int(e["epoch"]), e["mask_histogram"]) for e in run.epochs if _is_histogram(e.get("mask_histogram"))]
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


def _is_histogram(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(number(v) is not None for v in value) and sum(value) > 0
