"""Decides between the passes of a top-k: a program a segment adds up what its pieces found, and says where to look next."""

import triton
import triton.language as tl

from spartan.solvers.triton.adding import added_up, counted, told_above, told_moments, told_within
from spartan.solvers.triton.state import (
    BETA,
    BINS,
    CENTER,
    COARSE,
    COST,
    CUT,
    FRESH,
    FROM,
    FURTHER,
    GOAL,
    GUESSED,
    HARD_DONE,
    HIGH,
    HIGHEST,
    JUMPED,
    K_FINE,
    LAST_BETA,
    LEAST,
    LOW,
    LOWEST,
    MOST,
    MOVED,
    NEAR,
    NEAREST,
    OFFSET,
    ORIGIN,
    PASSES,
    RESIDUAL,
    ROOM,
    ROOM_FINE,
    SAMPLES,
    SHIFT,
    SOFT_DONE,
    SOFT_K,
    SOLVED,
    TIES,
    TOTAL,
    VALUE,
    WAITS,
    K,
    S,
    float_of,
    key_of,
    look_around,
    look_at,
)


@triton.jit
def start(floats, ints, SOFT: tl.constexpr, COLD: tl.constexpr, SAMPLED: tl.constexpr, N: tl.constexpr = BINS):
    """One segment, from its last solution, or else from samples."""
    everything = tl.load(floats + K) == float("inf")
    beta = tl.load(floats + BETA)
    all_of_it = tl.load(floats + TOTAL)
    moved = tl.load(ints + MOVED)
    tl.store(ints + PASSES, 0)
    tl.store(ints + TIES, 0)
    tl.store(ints + CUT, 0)
    tl.store(ints + JUMPED, 0)
    tl.store(ints + FRESH, 1)
    tl.store(ints + SAMPLES, 0)
    solved = (tl.load(ints + SOLVED) != 0) & (not COLD)
    zero = tl.full((), 0, tl.int64)
    if everything:
        tl.store(floats + VALUE, -float("inf"))
        tl.store(floats + COST, all_of_it)
        tl.store(ints + HARD_DONE, 1)
    else:
        tl.store(ints + HARD_DONE, 0)
        value = tl.load(floats + VALUE)
        if solved & (value > -float("inf")):
            key = key_of(value.to(tl.float32)).to(tl.int64)
            look_around(ints, key, tl.where(2 * moved <= NEAREST, NEAREST, tl.minimum(4 * moved, NEAR)), N)
            tl.store(ints + FROM, key)
        else:
            tl.store(ints + FROM, -1)
            look_at(ints, zero, zero + HIGHEST, N)
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
        tl.store(ints + WAITS, tl.where(warm | flat | everything, 0, 1))
    else:
        tl.store(ints + SOFT_DONE, 1)
        tl.store(ints + WAITS, 0)
    tl.store(ints + SOLVED, 1)


@triton.jit
def narrow(
    floats, ints, higher, cost_of, fine_higher, fine_of, number_in, k, k_fine, total, room, origin, low, high, shift,
    sampled, hard_done, value, known, SPLIT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Which bin holds the threshold: the highest one at which what lies above it, and it, no longer fit."""
    bins = tl.arange(0, N)
    all_within = tl.sum(cost_of)
    down_to = higher + all_within - tl.cumsum(cost_of) + cost_of
    all_seen = higher + all_within
    if SPLIT:
        fine_within = tl.sum(fine_of)
        fine_down = fine_higher + fine_within - tl.cumsum(fine_of) + fine_of
        all_seen += fine_higher + fine_within
    if sampled:  # the same share of what was looked at; the first look, at all keys, tells how much that is
        seen = tl.where(high - low == HIGHEST, all_seen, room)
        tl.store(floats + ROOM, seen)
        k = (k + k_fine) * (seen / total)
        k_fine = tl.full((), 0.0, tl.float64)
    if SPLIT:  # the coarse parts are exact, and so is their difference where it matters
        too_much = (down_to - k) + (fine_down - k_fine) > 0.0
        already = (higher - k) + (fine_higher - k_fine) > 0.0
    else:
        too_much = down_to > k
        already = higher > k
    bin = tl.max(tl.where(too_much, bins, -1)).to(tl.int64)
    further = (high - low + 1) * FURTHER
    if already:
        look_at(ints, high + 1, tl.minimum(high + further, HIGHEST), N)
    elif bin < 0:
        look_at(ints, tl.maximum(low - further, 0), low - 1, N)
    elif shift > tl.where(sampled, COARSE, 0):
        first_key = low + (bin << shift)
        width = tl.full((), 1, tl.int64) << shift
        look_at(ints, first_key, tl.minimum(first_key + width - 1, high), N)
    elif sampled:
        guess = tl.maximum(low + (bin << shift), LOWEST)
        value = float_of(guess).to(tl.float64)
        known = known | (bin >= 0)
        tl.store(floats + VALUE, value)
        tl.store(ints + SAMPLES, 2)
        look_around(ints, guess, GUESSED, N)
    else:
        kept = higher + tl.sum(tl.where(bins > bin, cost_of, 0.0))
        ties = tl.sum(tl.where(bins == bin, number_in, 0))
        value = float_of(low + bin).to(tl.float64)
        known = known | (bin >= 0)
        hard_done = hard_done | (bin >= 0)
        left = k - kept
        tl.store(floats + VALUE, value)
        tl.store(floats + ROOM, left)
        if SPLIT:
            fine_kept = fine_higher + tl.sum(tl.where(bins > bin, fine_of, 0.0))
            tl.store(floats + ROOM_FINE, k_fine - fine_kept)
            left += k_fine - fine_kept
            kept += fine_kept
        tl.store(floats + COST, kept)
        tl.store(ints + TIES, tl.where((left > 0.0) & (ties > 1), 1, 0))
        tl.store(ints + HARD_DONE, 1)
        tl.store(ints + MOVED, tl.where(origin < 0, NEAR, tl.abs(low + bin - origin)))
    return hard_done, value, known


@triton.jit
def start_from(floats, ints, value):
    """The soft mask is sought from the threshold on."""
    tl.store(floats + ORIGIN, value)
    tl.store(floats + CENTER, value)
    tl.store(floats + OFFSET, 0.0)
    tl.store(floats + S, 0.0)
    tl.store(ints + WAITS, 0)


@triton.jit
def newton(
    floats, ints, f, d, u_low, u_high, k, total, goal, beta, origin, s, least, most, fresh, jumped, hard_done, value, tol
):  # fmt: skip
    """One step towards the root of logit(F/C) = logit(k/C), kept inside its bracket."""
    if u_low == u_high:  # all alike: the mask is flat
        tl.store(floats + CENTER, u_low)
        tl.store(floats + OFFSET, goal)
        tl.store(floats + RESIDUAL, 0.0)
        tl.store(ints + SOFT_DONE, 1)
    else:
        least = tl.where(fresh, goal - beta * (u_high - origin), least)
        most = tl.where(fresh, goal - beta * (u_low - origin), most)
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
            slope = tl.where(steep, tl.minimum(total * d / tl.where(steep, f * (total - f), 1.0), 1.0), 1.0)
            step = h / slope
            good = steep & (s - step > least) & (s - step < most)
            following = tl.where(good, s - step, 0.5 * (least + most))
            # What it leaves is at most this (`ops.soft_topk.rest_of_step`), for short steps.
            size = tl.abs(step)
            rest = slope * (1.0 - slope) * size * size * (0.5 + size * (0.17 + 0.05 * size))
            tl.store(floats + LEAST, least)
            tl.store(floats + MOST, most)
            tl.store(ints + FRESH, 0)
            inside = (following > least) & (following < most)
            if ((good == 0) | (inside == 0)) & (jumped == 0):
                # A mask that is flat here says nothing, nor does a bracket of neighbouring numbers, whose origin may be
                # far away: start again where the hard mask ends, when that is known.
                tl.store(ints + JUMPED, 1)
                tl.store(ints + FRESH, 1)
                if hard_done:
                    start_from(floats, ints, value)
                else:
                    tl.store(ints + WAITS, 1)
            elif inside:
                tl.store(floats + S, following)
                near = tl.abs(following) <= 4.0
                center = tl.where(near, origin, tl.minimum(tl.maximum(origin - following / beta, u_low), u_high))
                center = center.to(tl.float32).to(tl.float64)
                tl.store(floats + CENTER, center)
                tl.store(floats + OFFSET, following + beta * (center - origin))
                if good & (size < 0.1) & (rest <= 0.2 * tol):  # the other part is for rounding
                    tl.store(floats + RESIDUAL, rest)
                    tl.store(ints + SOFT_DONE, 1)
            else:
                tl.store(ints + SOFT_DONE, 1)


@triton.jit
def decide(
    floats, ints, limits, counts, above, sums, costs, prices, fine_costs, fine_prices, tol,
    SOFT: tl.constexpr, ROWS: tl.constexpr, told=None, moments=None, ends=None, N: tl.constexpr = BINS,
):  # fmt: skip
    """What a pass found of a segment, and where the next one looks. There are fine prices only where coarse ones round.

    Where weights lie in shards, `told`, `moments` and `ends` have what was found by all processes (`rounds`), and not
    the pieces.
    """
    SPLIT: tl.constexpr = fine_prices is not None
    # All that may be needed is read at once: one way to the memory and back, not twenty one after the other.
    first = tl.load(limits)
    last = tl.load(limits + 1)
    first_kind = tl.load(limits + 2)
    last_kind = tl.load(limits + 3)
    hard = tl.load(ints + HARD_DONE) == 0
    samples = tl.load(ints + SAMPLES)
    passes = tl.load(ints + PASSES)
    from_key = tl.load(ints + FROM)
    low = tl.load(ints + LOW)
    high = tl.load(ints + HIGH)
    shift = tl.load(ints + SHIFT)
    k = tl.load(floats + K)
    k_fine = tl.load(floats + K_FINE) if SPLIT else tl.full((), 0.0, tl.float64)
    total = tl.load(floats + TOTAL)
    room = tl.load(floats + ROOM)
    value = tl.load(floats + VALUE)
    waits = tl.load(ints + WAITS) != 0
    soft = (tl.load(ints + SOFT_DONE) == 0) & (tl.load(ints + WAITS) == 0)
    if SOFT:
        fresh = tl.load(ints + FRESH) != 0
        jumped = tl.load(ints + JUMPED)
        soft_k = tl.load(floats + SOFT_K)
        goal = tl.load(floats + GOAL)
        beta = tl.load(floats + BETA)
        origin = tl.load(floats + ORIGIN)
        s = tl.load(floats + S)
        least = tl.load(floats + LEAST)
        most = tl.load(floats + MOST)
    if hard | soft:
        if told is None:
            over, fine_over, f, d, lows, highs = added_up(first, last, above, sums, costs, fine_costs, SOFT, ROWS)
        hard_done = hard == 0
        known = hard_done | (samples == 2)
        if samples != 1:
            tl.store(ints + PASSES, passes + 1)
        if hard:
            if told is None:
                cost_of, fine_of, number_in = counted(counts, prices, fine_prices, first_kind, last_kind, SPLIT)
                higher = tl.sum(over)
                fine_higher = tl.sum(fine_over) if SPLIT else tl.full((), 0.0, tl.float64)
            else:
                higher, fine_higher = told_above(told, prices, fine_prices, first_kind, last_kind, N)
                cost_of, fine_of, number_in = told_within(told, prices, fine_prices, first_kind, last_kind, N)
            hard_done, value, known = narrow(
                floats, ints, higher, cost_of, fine_higher, fine_of, number_in, k, k_fine, total, room,
                from_key, low, high, shift, samples == 1, hard_done, value, known, SPLIT, N,
            )  # fmt: skip
        if SOFT:
            if soft:
                if told is None:
                    all_f, all_d, u_low, u_high = tl.sum(f), tl.sum(d), tl.min(lows), tl.max(highs)
                else:
                    all_f, all_d, u_low, u_high = told_moments(moments, ends)
                newton(
                    floats, ints, all_f, all_d, u_low, u_high, soft_k, total, goal, beta, origin,
                    s, least, most, fresh, jumped, hard_done, value, tol,
                )  # fmt: skip
            elif waits & known:
                start_from(floats, ints, value)
