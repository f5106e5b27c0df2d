"""Exact selection over units that lie on several processes: digit by digit, one small histogram a round."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spartan.ops.parts import Spread, check_budget, numel, slack, total_cost
from spartan.ops.select import Boundary, Threshold, key_of, value_of

# Bits of a digit: eight rounds of 2 KiB find a float64, four a float32. Wider digits save rounds, narrower ones bytes:
# where every layer has a budget of its own, 16 rounds of 128 bytes each find a float64.
DIGIT, NARROW = 8, 4


def boundary(parts: Spread, k: float, digit: int = DIGIT) -> Boundary:
    """Where the budget runs out, as `select.boundary` finds it, the same on every process.

    The threshold's bits are found from the highest down. In each round all processes add up what their units cost by
    the next digit; the digit at which the budget runs out is the threshold's. Ties are cut by position the same way.
    """
    total = total_cost(parts)
    k = check_budget(k, total)
    k += slack(k, total / numel(parts))
    if k >= total:
        return Boundary(Threshold(-math.inf, cost=total), 0.0, math.inf, math.inf)
    costs = [float(part.c) for part in parts]
    keys = [key_of(part.u) for part in parts]
    bits = 64 if keys[0].dtype == torch.int64 else 32
    # Downwards: the digits of the complement of the key go up.
    edge, above, ties = _walk(parts, [~key for key in keys], costs, bits, k, digit, signed=True)
    key = ~edge
    value = value_of(key, parts[0].u.dtype)
    over, below, cheapest = _around(parts, keys, key, costs)
    room = k - above
    cut, left = 0, room
    if room >= cheapest:
        cut, left = _cut(parts, keys, key, costs, room, ties, digit)
    return Boundary(
        Threshold(value, cut, cost=k - left),
        fraction=min(max(room / ties, 0.0), 1.0),
        gap_above=over - value if over < math.inf else math.inf,
        gap_below=value - below if below > -math.inf else math.inf,
    )


def _walk(
    parts: Spread, keys: Sequence[Tensor], costs: Sequence[float], bits: int, room: float, digit_bits: int, signed: bool
) -> tuple[int, float, float]:
    """The key, going up, at which the cost of the units passes the room; the cost before it; and that at it."""
    found, before, at = 0, 0.0, 0.0
    rest = list(keys)
    device, top = keys[0].device, bits
    price = costs[0] if len(set(costs)) == 1 else None  # sums of one cost are counts: exact
    while top > 0:
        width = min(digit_bits, top)
        top -= width
        lowest = -(1 << (width - 1)) if signed and top + width == bits else 0
        histogram = torch.zeros(1 << width, dtype=torch.float64, device=device)
        digits = []
        for key, cost in zip(rest, costs, strict=True):
            digit = (key >> top) - lowest if lowest else (key >> top) & ((1 << width) - 1)
            digits.append(digit)
            histogram += torch.bincount(digit, minlength=1 << width).double() * (cost if price is None else 1.0)
        amounts = [(price or 1.0) * n for n in parts.ranks.sum(histogram).tolist()]
        sums, running = [], 0.0
        for amount in amounts:
            running += amount
            sums.append(running)
        # The first that passes the room; by rounding there may be none, and then it is the last one that has units.
        passes = [d for d, s in enumerate(sums) if amounts[d] and before + s > room]
        d = passes[0] if passes else max(i for i, amount in enumerate(amounts) if amount)
        before, at = before + sums[d] - amounts[d], amounts[d]
        found = (found << width) + d + lowest
        rest = [key[digit == d] for key, digit in zip(rest, digits, strict=True)]
    return found, before, at


def _around(parts: Spread, keys: Sequence[Tensor], key: int, costs: Sequence[float]) -> tuple[float, float, float]:
    """The next larger and the next smaller value, and the cost of the cheapest unit at the threshold."""
    found = torch.full((3,), -math.inf, dtype=torch.float64, device=keys[0].device)
    for part, mine, cost in zip(parts, keys, costs, strict=True):
        if mine.numel():
            over = torch.where(mine > key, part.u, math.inf).min().double()
            below = torch.where(mine < key, part.u, -math.inf).max().double()
            cheapest = torch.where((mine == key).any(), cost, math.inf).double()
            found = torch.maximum(found, torch.stack((-over, below, -cheapest)))
    over, below, cheapest = parts.ranks.largest(found).tolist()
    return -over, below, -cheapest


def _cut(
    parts: Spread, keys: Sequence[Tensor], key: int, costs: Sequence[float], room: float, ties: float, digit: int
) -> tuple[int, float]:
    """Up to which position the units equal to the threshold still fit, and the room that is left then."""
    end = numel(parts)
    if ties <= room:
        return end, room - ties
    positions = [
        where((mine == key).nonzero().flatten()) for mine, where in zip(keys, parts.positions, strict=True)
    ]  # fmt: skip
    cut, before, _ = _walk(parts, positions, costs, max(1, (end - 1).bit_length()), room, digit, signed=False)
    return cut, room - before
