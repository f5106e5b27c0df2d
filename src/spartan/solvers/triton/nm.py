"""Keeps n of every run of m weights, hard and soft, chosen anew wherever a mask is needed, for all targets at once.

A target without gaps in its memory is an array of blocks × m × s, s being the stride of the inputs: run q has its entry
j at ((q // s)·m + j)·s + q % s, whatever the order of the other axes. A program takes R runs at a time, a lane per
entry; nothing is kept of a run but its weights. `strides` has s per target; `numbers` β, n and the n of B per segment.
Places are 32 bits wide: a target has fewer than 2³¹ entries.

Vectors of units have the runs of a target in an order of their own: `orders` has, per target, the sizes of up to four
axes as memory has them, the slowest first, and how many runs of the vector a step along each of them goes. Without
TURNED the two are the same. `ranks` and `masks` have the address of each target's part of such a vector.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.gradient import DECAY, PACE, paced
from spartan.solvers.triton.ptx import log_of_one_plus
from spartan.solvers.triton.state import row_of, segment_of
from spartan.solvers.triton.weights import ABOVE, ONE, SHRUNK, SOFT, STORED, shrunk_of

BETA = tl.constexpr(0)
N = tl.constexpr(1)
MORE_N = tl.constexpr(2)


@triton.jit
def address_of(address, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """A tensor by its address, which is a multiple of 16 where WIDE."""
    at = address.to(tl.pointer_type(DTYPE))
    if WIDE:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def places_of(run, s, M: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr):
    """Where the entries of some runs lie: where WIDE, side by side, so that a thread reads them as one word."""
    q = run.to(tl.int32)  # a division in 64 bits takes many times as long
    lane = tl.arange(0, LANES)[None, :]
    if WIDE:
        return (q * M)[:, None] + lane
    else:
        block = q // s
        return (block * (M * s) + (q - block * s))[:, None] + lane * s


@triton.jit
def value_of(theta, factor, M: tl.constexpr, LANES: tl.constexpr):
    """u = factor · |θ|; lanes beyond the run are below all others."""
    return tl.where((tl.arange(0, LANES) < M)[None, :], tl.abs(theta) * factor, -1.0)


@triton.jit
def kept_of(u, n, M: tl.constexpr, LANES: tl.constexpr):
    """The n largest of each run; of equal ones, the first."""
    lane = tl.arange(0, LANES)[None, :]
    ahead = tl.zeros_like(u).to(tl.int32)  # how many of the run stand before each entry
    for i in range(0, M):
        other = tl.sum(tl.where(lane == i, u, 0.0), 1)[:, None]
        ahead += ((other > u) | ((other == u) & (i < lane))).to(tl.int32)
    return ahead < n


@triton.jit
def soft_of(u, kept, n, beta, M: tl.constexpr, LANES: tl.constexpr, PASSES: tl.constexpr):
    """The soft top-n mask of each run, by Newton's method in registers; `ops.rows.solve` says how and why."""
    there = (tl.arange(0, LANES) < M)[None, :]
    # Where all or nothing is kept, or β = 0, the mask is flat, and what follows only has to be harmless.
    flat = (n <= 0) | (n >= M) | (beta <= 0.0)
    count = tl.where(flat, 1, n).to(tl.float32)
    last = tl.where(flat, 0.0, tl.min(tl.where(kept, u, float("inf")), 1))
    after = tl.where(flat, 0.0, tl.max(tl.where(kept, -float("inf"), u), 1))
    center = after + 0.5 * (last - after)
    s = -0.5 * beta * ((last - center) + (after - center))
    reach = tl.log(tl.zeros_like(s) + M)
    least = s - reach
    most = s + reach
    sign = tl.where(flat, 0.0, tl.where(kept, -1.0, 1.0))
    x = u - center[:, None]
    z = x * beta * sign
    for _ in range(0, PASSES):
        # How far each entry is from the hard mask: 1 − m of the n largest, m of the others.
        tail = tl.where(there, tl.sigmoid(z + sign * s[:, None]), 0.0)
        excess = tl.sum(tail * sign, 1)  # Σ m − n
        slope = tl.sum(tail - tail * tail, 1)
        high = excess > 0.0
        least = tl.where(high, least, s)
        most = tl.where(high, s, most)
        # logit(F/M) − logit(n/M) as one logarithm.
        room = tl.maximum(M - count - excess, 1e-30)
        h = log_of_one_plus(excess * M / (count * room))
        moved = s - h * (count + excess) * room / (M * tl.where(slope > 0.0, slope, 1.0))
        moved = tl.where(slope > 0.0, moved, s)
        s = tl.where((moved >= least) & (moved <= most), moved, 0.5 * (least + most))
    m = tl.sigmoid(x * beta + s[:, None])
    return tl.where(flat, n.to(tl.float32) / M, m)


@triton.jit
def runs_at(
    theta_at, start, i, length, s, factor, M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr
):
    """R runs of a piece from its i-th on: where they lie, what of that is there, θ and u."""
    run = i + tl.arange(0, R)
    at = places_of(start + run, s, M, LANES, WIDE)
    inside = (run < length)[:, None] & (tl.arange(0, LANES) < M)[None, :]
    theta = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
    return at, inside, theta, value_of(theta, factor, M, LANES)


@triton.jit
def numbers_of(numbers, segments, piece):
    """β, n and the n of B of a piece."""
    mine = numbers + 3 * segment_of(segments, piece)
    return tl.load(mine + BETA), tl.load(mine + N).to(tl.int32), tl.load(mine + MORE_N).to(tl.int32)


@triton.jit
def units_of(run, order, M: tl.constexpr, LANES: tl.constexpr, TURNED: tl.constexpr):
    """Where the entries of some runs stand in vectors of units."""
    found = run.to(tl.int32)
    if TURNED:
        rest = found
        found = rest * 0
        for i in tl.static_range(0, 4):
            size = tl.load(order + 3 - i)
            found += (rest % size) * tl.load(order + 7 - i)
            rest = rest // size
    return (found * M)[:, None] + tl.arange(0, LANES)[None, :]


@triton.jit
def ranks_at(rank_at, unit, inside, M: tl.constexpr, LANES: tl.constexpr):
    """The ranks of some runs; lanes beyond the run are below all others."""
    rank = tl.load(rank_at + unit, mask=inside, other=0.0)
    if M < LANES:
        there = (tl.arange(0, LANES) < M)[None, :]
        least = tl.min(tl.where(there, rank, float("inf")), 1)
        rank = tl.where(there, rank, least[:, None] - 1.0)
    return rank


@triton.jit
def below_of(u, kept):
    """τ of each run: its largest strictly below the kept ones, and at least 0."""
    least = tl.min(tl.where(kept, u, float("inf")), 1)
    return tl.max(tl.where(u < least[:, None], u, 0.0), 1)


@triton.jit
def project(
    parameters, thetas, ranks, masks, scales, rows, table, segments, strides, orders, factors, numbers,
    KEPT: tl.constexpr, MASK: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr, PASSES: tl.constexpr,
    TURNED: tl.constexpr, M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """w = [kept] ⊙ mask ⊙ θ into the parameters; exactly +0.0 where not kept.

    KEPT is EVERYTHING, the n largest of |θ| or of given ranks (ABOVE), or STORED in `masks`, a byte an entry; MASK is
    ONE, SOFT or SHRUNK. `scales` has a number for each output, `rows` the first output of each target and how many runs
    one has; None for none.
    """
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    s = tl.load(strides + which)
    factor = tl.load(factors + piece)
    beta, n, _more = numbers_of(numbers, segments, piece)
    theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
    parameter_at = address_of(tl.load(parameters + which), DTYPE, WIDE)
    for i in range(0, length, R):
        at, inside, theta, u = runs_at(theta_at, start, i, length, s, factor, M, R, LANES, WIDE)
        w = theta
        if ranks is not None or KEPT == STORED or scales is not None:
            unit = units_of(start + i + tl.arange(0, R), orders + 8 * which, M, LANES, TURNED)
        if ranks is not None:
            u = ranks_at(tl.load(ranks + which).to(tl.pointer_type(tl.float32)), unit, inside, M, LANES)
        if KEPT == ABOVE or MASK != ONE:
            kept = kept_of(u, n, M, LANES)
        if MASK == SOFT:
            w = theta * soft_of(u, kept, n, beta, M, LANES, PASSES).to(DTYPE).to(tl.float32)
        elif MASK == SHRUNK:
            m = shrunk_of(u, below_of(u, kept)[:, None], P)
            if scales is not None:
                row = tl.load(rows + 2 * which) + unit // (tl.load(rows + 2 * which + 1) * M)
                m *= tl.load(scales + row, mask=inside, other=0.0)
            w = theta * m.to(DTYPE).to(tl.float32)
        if KEPT == ABOVE:
            w = tl.where(kept, w, 0.0)
        elif KEPT == STORED:
            mask_at = tl.load(masks + which).to(tl.pointer_type(tl.int8))
            w = tl.where(tl.load(mask_at + unit, mask=inside, other=0) != 0, w, 0.0)
        tl.store(parameter_at + at, w.to(DTYPE), mask=inside)


@triton.jit
def through_mask(
    grads, thetas, ranks, learned, table, segments, strides, orders, factors, numbers,
    ADD: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr, PASSES: tl.constexpr,
    TURNED: tl.constexpr, M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """∂L/∂θ = m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − a₁/a₂), the sums over each run.

    With given ranks, which are learned, the second term is theirs, without the sign, into their gradient or added to it;
    a missing g counts as zero.
    """
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0 or ranks is not None:
        s = tl.load(strides + which)
        factor = tl.load(factors + piece)
        beta, n, _more = numbers_of(numbers, segments, piece)
        theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
        grad_at = address_of(grad, GRAD, WIDE)
        for i in range(0, length, R):
            at, inside, theta, u = runs_at(theta_at, start, i, length, s, factor, M, R, LANES, WIDE)
            g = tl.zeros((R, LANES), GRAD)
            if grad != 0:
                g = tl.load(grad_at + at, mask=inside, other=0.0)
            if ranks is not None:
                unit = units_of(start + i + tl.arange(0, R), orders + 8 * which, M, LANES, TURNED)
                u = ranks_at(tl.load(ranks + which).to(tl.pointer_type(tl.float32)), unit, inside, M, LANES)
            m = soft_of(u, kept_of(u, n, M, LANES), n, beta, M, LANES, PASSES)
            slope = tl.where(inside, m - m * m, 0.0)
            pull = g.to(tl.float32) * theta
            a1 = tl.sum(pull * slope, 1)
            a2 = tl.sum(slope, 1)
            back = tl.where(a2 != 0.0, a1 / tl.where(a2 != 0.0, a2, 1.0), 0.0)
            moved = beta * slope * (pull - back[:, None])
            if ranks is None:
                sign = tl.where(theta > 0.0, 1.0, tl.where(theta < 0.0, -1.0, 0.0))
                tl.store(grad_at + at, (m * g.to(tl.float32) + sign * factor * moved).to(GRAD), mask=inside)
            else:
                if grad != 0:
                    tl.store(grad_at + at, (g.to(tl.float32) * m.to(GRAD).to(tl.float32)).to(GRAD), mask=inside)
                learned_at = tl.load(learned + which).to(tl.pointer_type(tl.float32))
                if ADD:
                    moved += tl.load(learned_at + unit, mask=inside, other=0.0)
                tl.store(learned_at + unit, moved, mask=inside)


@triton.jit
def where(
    grads, thetas, ranks, masks, more_masks, by, scale, table, segments, strides, orders, factors, numbers,
    KEPT: tl.constexpr, MORE: tl.constexpr, DO: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr,
    TURNED: tl.constexpr, M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """g TIMES a factor on A, on B∖A and on the rest, `by` segment; for DECAY that factor times θ is added to g; or PACE.

    As `gradient.where`.
    """
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        s = tl.load(strides + which)
        factor = tl.load(factors + piece)
        _beta, n, more_n = numbers_of(numbers, segments, piece)
        mine = by + 3 * segment_of(segments, piece)
        theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
        grad_at = address_of(grad, GRAD, WIDE)
        for i in range(0, length, R):
            at, inside, theta, u = runs_at(theta_at, start, i, length, s, factor, M, R, LANES, WIDE)
            if ranks is not None or KEPT == STORED or MORE == STORED:
                unit = units_of(start + i + tl.arange(0, R), orders + 8 * which, M, LANES, TURNED)
            if ranks is not None:
                u = ranks_at(tl.load(ranks + which).to(tl.pointer_type(tl.float32)), unit, inside, M, LANES)
            a = inside
            b = inside
            if KEPT == ABOVE:
                a = kept_of(u, n, M, LANES)
            elif KEPT == STORED:
                a = tl.load(tl.load(masks + which).to(tl.pointer_type(tl.int8)) + unit, mask=inside, other=0) != 0
            if MORE == ABOVE:
                b = kept_of(u, more_n, M, LANES)
            elif MORE == STORED:
                more_at = tl.load(more_masks + which).to(tl.pointer_type(tl.int8))
                b = tl.load(more_at + unit, mask=inside, other=0) != 0
            times = tl.where(a, tl.load(mine), tl.where(b, tl.load(mine + 1), tl.load(mine + 2)))
            if scale is not None:
                times *= tl.load(scale).to(tl.float32)
            g = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
            if DO == DECAY:
                g += (times * theta).to(DTYPE).to(tl.float32)
            elif DO == PACE:
                g = paced(theta.to(tl.float32), g, times)
            else:
                g = tl.where(times == 0.0, 0.0, g * times)  # a NaN where nothing is to come is none
            tl.store(grad_at + at, g.to(GRAD), mask=inside)
