"""Makes the charts of one run. A chart is a dict that assets/charts.js draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spartan.app.report.series import downsample, mask_correlations
from spartan.app.runs import RunFolder, number

Chart = dict[str, Any]
# Axes across.
_EPOCHS = {"label": "epoch", "whole": True, "start": 0}
_STEPS = {"label": "step", "whole": True, "start": 0}


def training_charts(run: RunFolder) -> list[Chart]:
    """Accuracy, loss and learning rate."""
    return _present([_accuracy(run), _loss(run), _learning_rate(run)])


def sparsity_charts(run: RunFolder) -> list[Chart]:
    """Density, β, and how the soft mask is distributed."""
    return _present([_density(run), _beta(run), _histogram(run)])


def exploration_charts(run: RunFolder) -> list[Chart]:
    """How the mask moves: the paper's exploration figure."""
    masks = run.masks()
    if masks is None or len(masks) < 2:
        return []
    with_last, with_previous = mask_correlations(masks)
    epochs = list(range(1, len(masks) + 1))
    last = "with the final mask" if run.finished else "with the latest mask"
    per_epoch = _per_epoch(run)
    chart = {
        "id": "correlation",
        "title": "Mask correlation",
        "note": f"Pearson correlation of the kept weights, on {masks.shape[1]:,} of them. "
        "Low while the mask explores, 1 once it is fixed.",
        "x": _EPOCHS,
        "y": {"label": "correlation", "limits": [None, 1.0]},
        "series": [
            line(last, epochs, with_last, dots=True),
            line("with the epoch before", epochs[1:], with_previous, dots=True, dash="5 3"),
        ],
        "bands": [{**b, "from": b["from"] / per_epoch, "to": b["to"] / per_epoch} for b in run.phases()]
        if per_epoch
        else [],
    }
    return _present([chart])


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
    return [
        {
            "id": "layers",
            "kind": "bars",
            "bar": 1,
            "wide": True,
            "title": "Layers",
            "note": "From input to output; numbers are those of the table below.",
            "x": {"label": "layer", "whole": True},
            "names": [str(layer.get("name", i)) for i, layer in zip(at, layers, strict=True)],
            "views": [
                {
                    "name": "sparsity",
                    "y": {"label": "sparsity (%)", "unit": "%", "limits": [0, 100]},
                    "series": [line("sparsity", at, sparsities)],
                    "lines": mean,
                },
                {
                    "name": "density, log",
                    "y": {"label": "weights kept (%)", "unit": "%", "scale": "log", "limits": [None, 100]},
                    "series": [line("kept", at, [None if d is None else 100 * d for d in densities], color=1)],
                    "lines": kept,
                },
            ],
        }
    ]


def line(
    name: str, x: Sequence[float], y: Sequence[float | None], *, percent: bool = False, **style: Any
) -> dict[str, Any]:
    """One series, thinned out where it is long."""
    xs, ys = downsample(x, [None if v is None else 100 * v for v in y] if percent else y)
    return {"name": name, "x": xs, "y": ys, **style}


def _present(charts: Sequence[Chart]) -> list[Chart]:
    """Without the series, and then the charts, that have no value at all."""
    for chart in charts:
        chart["series"] = [s for s in chart["series"] if any(v is not None for v in s["y"])]
    return [chart for chart in charts if chart["series"]]


def _column(records: Sequence[dict[str, Any]], key: str) -> list[float | None]:
    return [number(r.get(key)) for r in records]


def _whole(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [int(r[key]) for r in records]


def _per_epoch(run: RunFolder) -> float | None:
    """Steps per epoch."""
    total = run.total_steps
    return total / run.planned_epochs if total and run.planned_epochs else None


def _accuracy(run: RunFolder) -> Chart:
    at = _whole(run.epochs, "epoch")
    return {
        "id": "accuracy",
        "title": "Accuracy",
        "note": "On the test data, after every epoch.",
        "x": _EPOCHS,
        "y": {"label": "accuracy (%)", "unit": "%", "limits": [0, 100]},
        "series": [
            line("top-1", at, _column(run.epochs, "top1"), percent=True, dots=True),
            line("top-5", at, _column(run.epochs, "top5"), percent=True, dots=True, dash="5 3"),
        ],
    }


def _loss(run: RunFolder) -> Chart:
    at, per_epoch = _whole(run.epochs, "epoch"), _per_epoch(run)
    # Before the first epoch ends nobody knows how long one is: then the axis counts steps.
    steps = [s / (per_epoch or 1) for s in _whole(run.steps, "step")]
    return {
        "id": "loss",
        "title": "Loss",
        "note": "Training loss includes label smoothing and mixing, so the two need not meet.",
        "x": _EPOCHS if per_epoch else _STEPS,
        "y": {"label": "loss", "toggle": True},
        "series": [
            line("training, every step", steps, _column(run.steps, "loss"), faint=True, color=0),
            line("test", at, _column(run.epochs, "test_loss"), dots=True, color=1),
            line("training", at, _column(run.epochs, "train_loss"), dots=True, color=0),
        ],
    }


def _over_steps(run: RunFolder, key: str) -> tuple[list[float], list[float | None]]:
    """A column of the steps, without those that do not have it."""
    pairs = [(int(r["step"]), number(r.get(key))) for r in run.steps]
    known = [(s, v) for s, v in pairs if v is not None]
    return [s for s, _ in known], [v for _, v in known]


def _learning_rate(run: RunFolder) -> Chart:
    return {"id": "lr", "title": "Learning rate", **_step_chart(run, "lr", "learning rate")}


def _beta(run: RunFolder) -> Chart:
    note = "Small β gives a soft mask that explores; large β a hard one. It stays put in the finetune phase."
    return {"id": "beta", "title": "Sharpness β", "note": note, **_step_chart(run, "beta", "β")}


def _step_chart(run: RunFolder, key: str, name: str) -> Chart:
    """One figure of every step, and the phases."""
    series = [line(name, *_over_steps(run, key))]
    return {"x": _STEPS, "y": {"label": name, "toggle": True}, "series": series, "bands": run.phases()}


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
    return {
        "id": "density",
        "title": "Density",
        "note": "The fraction of weights that is kept: what the schedule asks for and what the model has.",
        "x": _STEPS,
        "y": {"label": "density (%)", "unit": "%", "scale": "log", "toggle": True, "limits": [0, 100]},
        "series": [
            line("achieved", at, [found[s] for s in at], percent=True, color=0, dots=True, points=points),
            line("target", asked_at, asked, percent=True, color=1, dash="4 6"),
        ],
        "bands": run.phases(),
    }


def _histogram(run: RunFolder) -> Chart:
    frames = [(int(e["epoch"]), e["mask_histogram"]) for e in run.epochs if _is_histogram(e.get("mask_histogram"))]
    if not frames:
        return {"series": []}
    bins = len(frames[-1][1])
    frames = [f for f in frames if len(f[1]) == bins]
    centres = [(i + 0.5) / bins for i in range(bins)]
    return {
        "id": "histogram",
        "kind": "bars",
        "bar": 1 / bins,
        "title": "Soft mask",
        "note": "How many weights have which mask value. A mask that has made up its mind has all of them at 0 and 1.",
        "x": {"label": "mask value m"},
        "y": {"label": "weights", "scale": "log", "toggle": True, "limits": [0, None]},
        "names": [f"m from {i / bins:.2f} to {(i + 1) / bins:.2f}" for i in range(bins)],
        "series": [line("weights", centres, frames[-1][1])],
        "frames": {"label": "epoch", "at": [e for e, _ in frames], "y": [h for _, h in frames]},
    }


def _is_histogram(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(number(v) is not None for v in value) and sum(value) > 0
