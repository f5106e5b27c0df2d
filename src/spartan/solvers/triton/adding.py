"""Adds up what a pass of a top-k found of a segment: in the pieces of one process, or as all processes have told it.

What was told has a row for each price: how many units of that price lie above all bins, and in each of N bins.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.state import BINS


@triton.jit
def counted(counts, prices, fine_prices, first_kind, last_kind, SPLIT: tl.constexpr):
    """What the units of every bin cost, coarsely and finely, and how many there are; the bins are emptied."""
    bins = tl.arange(0, BINS)
    cost_of = tl.zeros((BINS,), tl.float64)
    fine_of = tl.zeros((BINS,), tl.float64)
    number_in = tl.zeros((BINS,), tl.int32)
    for kind in range(first_kind, last_kind):
        number = tl.load(counts + kind * BINS + bins)
        tl.debug_barrier()  # a thread may write where another reads: all have read, then
        tl.store(counts + kind * BINS + bins, 0)  # for the next pass
        price = tl.load(prices + kind)
        if SPLIT:
            fine_price = tl.load(fine_prices + kind)
            fine_of += number.to(tl.float64) * fine_price
            price -= fine_price
        cost_of += number.to(tl.float64) * price
        number_in += number
    return cost_of, fine_of, number_in


@triton.jit
def told_above(told, prices, fine_prices, first_kind, last_kind, N: tl.constexpr):
    """What the units above the highest bin cost on all processes, coarsely and finely."""
    cost = tl.full((), 0.0, tl.float64)
    fine = tl.full((), 0.0, tl.float64)
    for kind in range(first_kind, last_kind):
        number = tl.load(told + kind * (N + 1))
        price = tl.load(prices + kind)
        if fine_prices is not None:
            fine_price = tl.load(fine_prices + kind)
            fine += number * fine_price
            price -= fine_price
        cost += number * price
    return cost, fine


@triton.jit
def told_within(told, prices, fine_prices, first_kind, last_kind, N: tl.constexpr):
    """What the units of every bin cost on all processes, coarsely and finely, and how many there are."""
    bins = tl.arange(0, N)
    cost_of = tl.zeros((N,), tl.float64)
    fine_of = tl.zeros((N,), tl.float64)
    number_in = tl.zeros((N,), tl.int64)
    for kind in range(first_kind, last_kind):
        number = tl.load(told + kind * (N + 1) + 1 + bins)
        price = tl.load(prices + kind)
        if fine_prices is not None:
            fine_price = tl.load(fine_prices + kind)
            fine_of += number * fine_price
            price -= fine_price
        cost_of += number * price
        number_in += number.to(tl.int64)
    return cost_of, fine_of, number_in


@triton.jit
def told_moments(moments, ends):
    """Σ c m and Σ c m(1−m) of a segment, and its smallest and largest u."""
    return tl.load(moments), tl.load(moments + 1), -tl.load(ends), tl.load(ends + 1)


@triton.jit
def added_up(first, last, above, sums, costs, fine_costs, SOFT: tl.constexpr, ROWS: tl.constexpr):
    """What pieces of a segment found, in ROWS parts: the cost above, coarsely and finely, Σ c m, Σ c m(1−m), both ends."""
    SPLIT: tl.constexpr = fine_costs is not None
    over = tl.zeros((ROWS,), tl.float64)
    fine_over = tl.zeros((ROWS,), tl.float64)
    f = tl.zeros((ROWS,), tl.float64)
    d = tl.zeros((ROWS,), tl.float64)
    least_u = tl.full((ROWS,), float("inf"), tl.float64)
    most_u = tl.full((ROWS,), -float("inf"), tl.float64)
    for i in range(0, last - first, ROWS):
        row = first + i + tl.arange(0, ROWS)
        there = row < last
        cost = tl.load(costs + row, mask=there, other=0.0)
        number = tl.load(above + row, mask=there, other=0).to(tl.float64)
        if SPLIT:
            fine = tl.load(fine_costs + row, mask=there, other=0.0)
            fine_over += number * fine
            over += number * (cost - fine)
        else:
            over += number * cost
        if SOFT:
            m = tl.load(sums + 4 * row, mask=there, other=0.0)
            m2 = tl.load(sums + 4 * row + 1, mask=there, other=0.0)
            f += m * cost
            d += (m - m2) * cost
            least_u = tl.minimum(least_u, tl.load(sums + 4 * row + 2, mask=there, other=float("inf")))
            most_u = tl.maximum(most_u, tl.load(sums + 4 * row + 3, mask=there, other=-float("inf")))
    return over, fine_over, f, d, least_u, most_u
