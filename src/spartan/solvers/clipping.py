"""Brings probabilities within a budget."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spartan.solvers.units import Units, send

PASSES = 16


def within_budget(units: Units, s: Tensor, budgets: Sequence[float]) -> Tensor:
    """The nearest probabilities in [0, 1] whose expected cost fits the budgets.

        min(max(s − v·c, 0), 1) with the smallest v ≥ 0 for which Σ c·s ≤ k

    v, one per segment, is found by bracketed Newton on the piecewise linear Σ c·s(v) = k, with costs in multiples of
    the dearest. The number of passes is fixed, so that nothing waits for the device; of all passes the best counts.
    """
    prices, k = units.problem.unit_costs, send(budgets, units.device)
    costs, unit = units.constant([float(x) for x in prices]), max(prices)
    c = units.of_targets(costs / unit).to(s.dtype)
    low = best = v = torch.zeros_like(k)
    high = units.max_by_segment(s / c).double().clamp(min=0.0)
    last = least = torch.full_like(v, math.inf)
    for _ in range(PASSES):
        x = s - units.at_units(v).to(s.dtype) * c
        # To the right: a whole unit gives way too. Costs are counted target by target: exact where all of it is kept.
        sums, slopes = units.sum_by_target(x.clamp(0.0, 1.0), (x > 0) & (x <= 1))
        excess, slope = units.segments_of(sums * costs) - k, units.segments_of(slopes * costs * costs / unit)
        off = excess.abs()
        best, least = torch.where(off < least, v, best), torch.minimum(off, least)
        low, high = torch.where(excess > 0, v, low), torch.where(excess > 0, high, v)
        step = v + excess / slope
        fast = (step > low) & (step < high) & (off < 0.5 * last)
        v, last = torch.where(fast, step, 0.5 * (low + high)), off
    return (s - units.at_units(best).to(s.dtype) * c).clamp(0.0, 1.0)
