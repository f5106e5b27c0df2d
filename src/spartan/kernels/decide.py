"""Between the passes of a top-k: one program a group adds up what its pieces found and says where the next pass looks."""

from __future__ import annotations

import triton
import triton.language as tl

from spartan.kernels.state import (
    BETA,
    BINS,
    CENTER,
    COST,
    CUT,
    FLOATS,
    FRESH,
    GOAL,
    HARD_DONE,
    HIGH,
    INTS,
    JUMPED,
    LAST_BETA,
    LEAST,
    LOW,
    MOST,
    OFFSET,
    ORIGIN,
    PASSES,
    RESIDUAL,
    ROOM,
    SAMPLES,
    SHIFT,
    SOFT_DONE,
    SOFT_K,
    SOLVED,
    TIES,
    TOTAL,
    VALUE,
    WAITS,
    WINDOW,
    K,
    S,
    float_of,
    key_of,
    look_at,
)


@triton.jit
def begin(floats, ints, limits, SOFT: tl.constexpr, COLD: tl.constexpr, SAMPLED: tl.constexpr):
    """Every group starts from its last solution, with the budget and β that its state holds now."""
    group = tl.program_id(0)
    if tl.load(limits + 6 * group) < tl.load(limits + 6 * group + 1):
        start(floats + group * FLOATS, ints + group * INTS, SOFT, COLD, SAMPLED)


@triton.jit
def start(floats, ints, SOFT: tl.constexpr, COLD: tl.constexpr, SAMPLED: tl.constexpr):
    """One group, from its last solution, or else from samples."""
    k = tl.load(floats + K)
    beta = tl.load(floats + BETA)
    all_of_it = tl.load(floats + TOTAL)
    tl.store(ints + PASSES, 0)
    tl.store(ints + TIES, 0)
    tl.store(ints + CUT, 0)
    tl.store(ints + JUMPED, 0)
    tl.store(ints + FRESH, 1)
    tl.store(ints + SAMPLES, 0)
    solved = (tl.load(ints + SOLVED) != 0) & (not COLD)
    zero = tl.full((), 0, tl.int64)
    if k >= all_of_it:
        tl.store(floats + VALUE, -float("inf"))
        tl.store(floats + COST, all_of_it)
        tl.store(ints + HARD_DONE, 1)
    else:
        tl.store(ints + HARD_DONE, 0)
        value = tl.load(floats + VALUE)
        if solved & (value > -float("inf")):
            key = key_of(value.to(tl.float32)).to(tl.int64)
            look_at(ints, tl.maximum(key - WINDOW, 0), tl.minimum(key + WINDOW - 1, 4294967295))
        else:
            look_at(ints, zero, zero + 4294967295)
            if SAMPLED:
                tl.store(ints + SAMPLES, 1)
    if SOFT:
        share = tl.load(floats + SOFT_K) / all_of_it
        flat = (beta == 0.0) | (share <= 0.0) | (share >= 1.0)
        target = tl.where(
            share <= 0.0,
            -float("inf"),
            tl.where(share >= 1.0, float("inf"), tl.log(share) - tl.log(tl.maximum(1.0 - share, 1e-300))),
        )
        tl.store(floats + GOAL, target)
        last = tl.load(floats + LAST_BETA)
        center = tl.load(floats + CENTER)
        offset = tl.load(floats + OFFSET)
        tl.store(floats + LAST_BETA, beta)
        warm = solved & (last > 0.0) & (offset > -float("inf")) & (offset < float("inf"))
        # The same τ under the new β.
        tl.store(floats + ORIGIN, tl.where(warm, center, 0.0))
        moved = tl.where(warm, offset * beta / tl.where(last > 0.0, last, 1.0), 0.0)
        tl.store(floats + S, moved)
        tl.store(floats + CENTER, tl.where(flat, 0.0, tl.where(warm, center, 0.0)))
        tl.store(floats + OFFSET, tl.where(flat, target, moved))
        tl.store(floats + RESIDUAL, 0.0)
        tl.store(ints + SOFT_DONE, tl.where(flat, 1, 0))
        # Everything is kept: there is no threshold to wait for.
        tl.store(ints + WAITS, tl.where(warm | flat | (k >= all_of_it), 0, 1))
    else:
        tl.store(ints + SOFT_DONE, 1)
        tl.store(ints + WAITS, 0)
    tl.store(ints + SOLVED, 1)


@triton.jit
def narrow(floats, ints, limits, counts, above, costs, prices, ROWS: tl.constexpr):
    """Which bin holds the threshold: the highest one at which what lies above it, and it, no longer fit."""
    bins = tl.arange(0, BINS)
    cost_of = tl.zeros((BINS,), tl.float64)
    number_in = tl.zeros((BINS,), tl.int64)
    over = tl.zeros((ROWS,), tl.float64)
    first_kind = tl.load(limits + 2)
    for i in range(0, tl.load(limits + 3) - first_kind):
        kind = first_kind + i
        number = tl.load(counts + kind * BINS + bins)
        tl.store(counts + kind * BINS + bins, 0)  # for the next pass
        cost_of += number.to(tl.float64) * tl.load(prices + kind)
        number_in += number
    first = tl.load(limits)
    last = tl.load(limits + 1)
    for i in range(0, last - first, ROWS):
        row = first + i + tl.arange(0, ROWS)
        there = row < last
        cost = tl.load(costs + row, mask=there, other=0.0)
        over += tl.load(above + row, mask=there, other=0).to(tl.float64) * cost
    higher = tl.sum(over)
    down_to = higher + tl.sum(cost_of) - tl.cumsum(cost_of) + cost_of
    k = tl.load(floats + K)
    low = tl.load(ints + LOW)
    high = tl.load(ints + HIGH)
    shift = tl.load(ints + SHIFT)
    sampled = tl.load(ints + SAMPLES) == 1
    if sampled:  # the same share of what was looked at; the first look, at all keys, tells how much that is
        seen = tl.where(high - low == 4294967295, higher + tl.sum(cost_of), tl.load(floats + ROOM))
        tl.store(floats + ROOM, seen)
        k = k * (seen / tl.load(floats + TOTAL))
    bin = tl.max(tl.where(down_to > k, bins, -1)).to(tl.int64)
    if higher > k:
        look_at(ints, high + 1, tl.full((), 4294967295, tl.int64))
    elif bin < 0:
        look_at(ints, tl.full((), 0, tl.int64), low - 1)
    elif shift > 0:
        first_key = low + (bin << shift)
        width = tl.full((), 1, tl.int64) << shift
        look_at(ints, first_key, tl.minimum(first_key + width - 1, high))
    elif sampled:
        tl.store(floats + VALUE, float_of(low + bin).to(tl.float64))
        tl.store(ints + SAMPLES, 2)
        look_at(ints, tl.maximum(low + bin - WINDOW, 0), tl.minimum(low + bin + WINDOW - 1, 4294967295))
    else:
        kept = higher + tl.sum(tl.where(bins > bin, cost_of, 0.0))
        ties = tl.sum(tl.where(bins == bin, number_in, 0))
        value = float_of(low + bin)
        tl.store(floats + VALUE, value.to(tl.float64))
        tl.store(floats + COST, kept)
        tl.store(floats + ROOM, k - kept)
        tl.store(ints + TIES, tl.where((k - kept > 0.0) & (ties > 1), 1, 0))
        tl.store(ints + HARD_DONE, 1)


@triton.jit
def newton(floats, ints, limits, sums, costs, tol, ROWS: tl.constexpr):
    """One step towards the root of logit(F/C) = logit(k/C), kept inside its bracket."""
    f_rows = tl.zeros((ROWS,), tl.float64)
    d_rows = tl.zeros((ROWS,), tl.float64)
    least_u = tl.full((ROWS,), float("inf"), tl.float64)
    most_u = tl.full((ROWS,), -float("inf"), tl.float64)
    first = tl.load(limits)
    last = tl.load(limits + 1)
    for i in range(0, last - first, ROWS):
        row = first + i + tl.arange(0, ROWS)
        there = row < last
        cost = tl.load(costs + row, mask=there, other=0.0)
        m = tl.load(sums + 4 * row, mask=there, other=0.0)
        m2 = tl.load(sums + 4 * row + 1, mask=there, other=0.0)
        f_rows += m * cost
        d_rows += (m - m2) * cost
        least_u = tl.minimum(least_u, tl.load(sums + 4 * row + 2, mask=there, other=float("inf")))
        most_u = tl.maximum(most_u, tl.load(sums + 4 * row + 3, mask=there, other=-float("inf")))
    f = tl.sum(f_rows)
    d = tl.sum(d_rows)
    u_low = tl.min(least_u)
    u_high = tl.max(most_u)
    k = tl.load(floats + SOFT_K)
    total = tl.load(floats + TOTAL)
    goal = tl.load(floats + GOAL)
    beta = tl.load(floats + BETA)
    origin = tl.load(floats + ORIGIN)
    s = tl.load(floats + S)
    if u_low == u_high:  # all alike: the mask is flat
        tl.store(floats + CENTER, u_low)
        tl.store(floats + OFFSET, goal)
        tl.store(floats + RESIDUAL, 0.0)
        tl.store(ints + SOFT_DONE, 1)
    else:
        fresh = tl.load(ints + FRESH) != 0
        least = tl.where(fresh, goal - beta * (u_high - origin), tl.load(floats + LEAST))
        most = tl.where(fresh, goal - beta * (u_low - origin), tl.load(floats + MOST))
        residual = tl.abs(f - k) / k
        tl.store(floats + RESIDUAL, residual)
        if residual <= tol:
            tl.store(ints + SOFT_DONE, 1)
        else:
            # Rounding may put the start a little outside.
            least = tl.where(f > k, least, tl.maximum(least, s))
            most = tl.where(f > k, tl.minimum(most, s), most)
            share = f / total
            steep = (share > 0.0) & (share < 1.0) & (d > 0.0)
            safe = tl.where(steep, share, 0.5)
            h = tl.log(safe) - tl.log(1.0 - safe) - goal
            step = h * f * (total - f) / (total * tl.where(steep, d, 1.0))
            following = s - step
            good = steep & (following > least) & (following < most)
            # A mask that is flat here says nothing: look where the hard mask ends, then halve the bracket.
            edge = beta * (origin - tl.load(floats + VALUE))
            jump = (tl.load(ints + HARD_DONE) != 0) & (tl.load(ints + JUMPED) == 0) & (edge > least) & (edge < most)
            jump = jump & (good == 0)
            following = tl.where(good, following, tl.where(jump, edge, 0.5 * (least + most)))
            if jump:
                tl.store(ints + JUMPED, 1)
            tl.store(floats + LEAST, least)
            tl.store(floats + MOST, most)
            tl.store(ints + FRESH, 0)
            if (following > least) & (following < most):
                tl.store(floats + S, following)
                near = tl.abs(following) <= 4.0
                center = tl.where(near, origin, tl.minimum(tl.maximum(origin - following / beta, u_low), u_high))
                center = center.to(tl.float32).to(tl.float64)
                tl.store(floats + CENTER, center)
                tl.store(floats + OFFSET, following + beta * (center - origin))
                # So short a step leaves an error of its square.
                if good & (tl.abs(step) < 2e-4):
                    tl.store(floats + RESIDUAL, step * step)
                    tl.store(ints + SOFT_DONE, 1)
            else:  # the bracket is down to neighbouring numbers
                tl.store(ints + SOFT_DONE, 1)


@triton.jit
def control(
    floats, ints, limits, counts, above, sums, costs, prices, tol, SOFT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """After a pass: what it found of every group, and where the next one looks."""
    group = tl.program_id(0)
    if tl.load(limits + 6 * group) < tl.load(limits + 6 * group + 1):
        own = limits + 6 * group
        decide(floats + group * FLOATS, ints + group * INTS, own, counts, above, sums, costs, prices, tol, SOFT, ROWS)


@triton.jit
def decide(
    floats, ints, limits, counts, above, sums, costs, prices, tol, SOFT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The same of one group."""
    hard = tl.load(ints + HARD_DONE) == 0
    soft = False
    if SOFT:
        soft = (tl.load(ints + SOFT_DONE) == 0) & (tl.load(ints + WAITS) == 0)
    if (hard | soft) & (tl.load(ints + SAMPLES) != 1):
        tl.store(ints + PASSES, tl.load(ints + PASSES) + 1)
    if hard:
        narrow(floats, ints, limits, counts, above, costs, prices, ROWS)
    tl.debug_barrier()  # what one thread wrote, all read
    if soft:
        newton(floats, ints, limits, sums, costs, tol, ROWS)
    if SOFT:
        tl.debug_barrier()
        known = (tl.load(ints + HARD_DONE) != 0) | (tl.load(ints + SAMPLES) == 2)
        if (tl.load(ints + WAITS) != 0) & known:
            value = tl.load(floats + VALUE)
            tl.store(floats + ORIGIN, value)
            tl.store(floats + CENTER, value)
            tl.store(floats + OFFSET, 0.0)
            tl.store(floats + S, 0.0)
            tl.store(ints + WAITS, 0)
