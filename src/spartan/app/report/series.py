"""Prepares numbers for the charts: a run's phases and masks, long series thinned out, all of it safe to write as JSON."""

from __future__ import annotations

import contextlib
import itertools
import math
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spartan.app.runs import RunFolder, number
from spartan.app.train.setup import build_method
from spartan.methods import Method, as_method
from spartan.problem.schedules import Moment

# What a chart gets at most; a screen has no more columns.
LIMIT = 2000

Points = tuple[list[float], list[float | None]]


def downsample(x: Sequence[float], y: Sequence[float | None], limit: int = LIMIT) -> Points:
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


def plain(value: Any) -> Any:
    """The value with NaN and infinity as null and numbers at six digits, which is finer than any screen."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# ---------------------------------------------------------------------- of a run


def total_steps(run: RunFolder) -> int | None:
    """Optimizer steps of the whole run, as far as the files tell."""
    if run.summary and (steps := number(run.summary.get("steps"))):
        return int(steps)
    if run.epochs and (step := number(run.epochs[-1].get("step"))):
        return round(step / run.epochs[-1]["epoch"] * run.planned_epochs)
    return None


def phases(run: RunFolder) -> list[dict[str, Any]]:
    """Where warm-up, intermediate and finetune phases begin and end, in steps; empty where that is unknown."""
    total, method = total_steps(run), _built_method(run)
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


def _built_method(run: RunFolder) -> Method | None:
    """The method with its settings, which may decide how long its phases are; None where it cannot be built."""
    with contextlib.suppress(ValueError):
        return build_method(run.config)
    with contextlib.suppress(ValueError):  # the recipe is another version's
        return as_method(run.method)
    return None


def kept_bits(run: RunFolder) -> npt.NDArray[np.bool_] | None:
    """The kept bits of the sampled weights, [epochs, n]; None where there are none to read."""
    try:
        # Opened here: numpy forgets to close a file that it cannot read.
        with (run.folder / "masks.npz").open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            bits, n = file["bits"], int(file["n"])
        if bits.ndim != 2 or bits.dtype != np.uint8 or n < 1 or bits.shape[1] * 8 < n:
            return None
        return np.unpackbits(bits, axis=1, count=n).astype(bool)
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        return None
