"""Keeps n of every run of m weights, hard and soft, chosen anew from θ wherever a mask is needed, for all targets at once.

A target without gaps in its memory is an array of blocks × m × s, s being the stride of the inputs: run q has its entry
j at ((q // s)·m + j)·s + q % s, whatever the order of the other axes. A program takes R runs at a time, a lane per
entry; nothing is kept of a run but its weights. `strides` has s per target; `numbers` β and n. Places are 32 bits wide:
a target has fewer than 2³¹ entries.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.ptx import log_of_one_plus
from spartan.solvers.triton.state import row_of

BETA = tl.constexpr(0)
N = tl.constexpr(1)


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
def project(
    parameters, thetas, table, strides, factors, numbers,
    SOFT: tl.constexpr, DTYPE: tl.constexpr, PASSES: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """w = [kept] ⊙ θ, with SOFT [kept] ⊙ m ⊙ θ, into the parameters; exactly +0.0 where not kept."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    s = tl.load(strides + which)
    factor = tl.load(factors + piece)
    beta = tl.load(numbers + BETA).to(tl.float32)
    n = tl.load(numbers + N).to(tl.int32)
    theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
    parameter_at = address_of(tl.load(parameters + which), DTYPE, WIDE)
    for i in range(0, length, R):
        at, inside, theta, u = runs_at(theta_at, start, i, length, s, factor, M, R, LANES, WIDE)
        kept = kept_of(u, n, M, LANES)
        w = theta
        if SOFT:
            w = theta * soft_of(u, kept, n, beta, M, LANES, PASSES).to(DTYPE).to(tl.float32)
        tl.store(parameter_at + at, tl.where(kept, w, 0.0).to(DTYPE), mask=inside)


@triton.jit
def through_mask(
    grads, thetas, table, strides, factors, numbers,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, PASSES: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """∂L/∂θ = m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − a₁/a₂), the sums over each run."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        s = tl.load(strides + which)
        factor = tl.load(factors + piece)
        beta = tl.load(numbers + BETA).to(tl.float32)
        n = tl.load(numbers + N).to(tl.int32)
        theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
        grad_at = address_of(grad, GRAD, WIDE)
        for i in range(0, length, R):
            at, inside, theta, u = runs_at(theta_at, start, i, length, s, factor, M, R, LANES, WIDE)
            g = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
            m = soft_of(u, kept_of(u, n, M, LANES), n, beta, M, LANES, PASSES)
            slope = tl.where(inside, m - m * m, 0.0)
            pull = g * theta
            a1 = tl.sum(pull * slope, 1)
            a2 = tl.sum(slope, 1)
            back = tl.where(a2 != 0.0, a1 / tl.where(a2 != 0.0, a2, 1.0), 0.0)
            sign = tl.where(theta > 0.0, 1.0, tl.where(theta < 0.0, -1.0, 0.0))
            moved = sign * (beta * factor) * slope * (pull - back[:, None])
            tl.store(grad_at + at, (m * g + moved).to(GRAD), mask=inside)


@triton.jit
def where_kept(
    grads, thetas, table, strides, factors, numbers,
    GRAD: tl.constexpr, DTYPE: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """∂L/∂θ = [kept] ⊙ g."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        s = tl.load(strides + which)
        factor = tl.load(factors + piece)
        n = tl.load(numbers + N).to(tl.int32)
        theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
        grad_at = address_of(grad, GRAD, WIDE)
        for i in range(0, length, R):
            at, inside, _theta, u = runs_at(theta_at, start, i, length, s, factor, M, R, LANES, WIDE)
            kept = kept_of(u, n, M, LANES)
            g = tl.load(grad_at + at, mask=inside, other=0.0)
            tl.store(grad_at + at, tl.where(kept, g, 0.0), mask=inside)
