"""Prepares numbers for the charts: thins out long series, correlates masks, makes all of it safe to write as JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
