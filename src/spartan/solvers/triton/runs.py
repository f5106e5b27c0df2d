"""Moves between weights and vectors of units where n of every m are kept: scores, products, masks, restarts, scales.

Tables are those of `nm.py`.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.nm import address_of, kept_of, numbers_of, places_of, runs_at, units_of
from spartan.solvers.triton.state import row_of


@triton.jit
def scores(
    thetas, found, table, segments, strides, orders, factors, numbers,
    DTYPE: tl.constexpr, TURNED: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """u of every unit."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    s = tl.load(strides + which)
    factor = tl.load(factors + piece)
    theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
    found_at = tl.load(found + which).to(tl.pointer_type(tl.float32))
    for i in range(0, length, R):
        _at, inside, _theta, u = runs_at(theta_at, start, i, length, s, factor, M, R, LANES, WIDE)
        unit = units_of(start + i + tl.arange(0, R), orders + 8 * which, M, LANES, TURNED)
        tl.store(found_at + unit, u, mask=inside)


@triton.jit
def products(
    grads, thetas, found, table, segments, strides, orders, factors, numbers,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, TURNED: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """g·θ of every unit; a missing g counts as zero."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    s = tl.load(strides + which)
    factor = tl.load(factors + piece)
    grad = tl.load(grads + which)
    theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
    grad_at = address_of(grad, GRAD, WIDE)
    found_at = tl.load(found + which).to(tl.pointer_type(tl.float32))
    for i in range(0, length, R):
        at, inside, theta, _u = runs_at(theta_at, start, i, length, s, factor, M, R, LANES, WIDE)
        pull = tl.zeros((R, LANES), tl.float32)
        if grad != 0:
            pull = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32) * theta
        unit = units_of(start + i + tl.arange(0, R), orders + 8 * which, M, LANES, TURNED)
        tl.store(found_at + unit, pull, mask=inside)


@triton.jit
def restart(
    thetas, masks, table, segments, strides, orders, factors, numbers,
    DTYPE: tl.constexpr, TURNED: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """θ ← 0 at the units of a mask."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    s = tl.load(strides + which)
    theta_at = address_of(tl.load(thetas + which), DTYPE, WIDE)
    mask_at = tl.load(masks + which).to(tl.pointer_type(tl.int8))
    for i in range(0, length, R):
        run = i + tl.arange(0, R)
        inside = (run < length)[:, None] & (tl.arange(0, LANES) < M)[None, :]
        unit = units_of(start + run, orders + 8 * which, M, LANES, TURNED)
        gone = tl.load(mask_at + unit, mask=inside, other=0) != 0
        at = places_of(start + run, s, M, LANES, WIDE)
        tl.store(theta_at + at, tl.zeros((R, LANES), DTYPE), mask=gone)


@triton.jit
def keep(ranks, masks, n, runs, M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr):
    """The n largest of each run of a vector, a byte an entry; of equal ones, the first."""
    run = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    lane = tl.arange(0, LANES)[None, :]
    at = (run * M)[:, None] + lane
    inside = (run < runs)[:, None] & (lane < M)
    u = tl.load(ranks + at, mask=inside, other=-float("inf"))
    tl.store(masks + at, kept_of(u, n, M, LANES).to(tl.int8), mask=inside)


@triton.jit
def row_scales(
    thetas, owners, rows, lines, stretches, segments, strides, factors, numbers, scales,
    DTYPE: tl.constexpr, M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """1.01/(r + 0.01) of every output, r the share of its magnitude that is kept.

    `owners` has the target of each output; `rows` the first output of each target, `stretches` its first piece, each
    with another number beside. `lines` has, per target, the outputs of one matrix, the way in memory from matrix to
    matrix and from output to output, how many runs an output has, and of these the sizes of up to three axes, the slowest
    first, and the way along each.
    """
    row = tl.program_id(0)
    which = tl.load(owners + row)
    line = lines + 10 * which
    piece = tl.load(stretches + 2 * which)
    factor = tl.load(factors + piece)
    _beta, n, _more = numbers_of(numbers, segments, piece)
    s = tl.load(strides + which)
    mine = (row - tl.load(rows + 2 * which)).to(tl.int32)
    matrix = mine // tl.load(line)
    first = matrix * tl.load(line + 1) + (mine - matrix * tl.load(line)) * tl.load(line + 2)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + first
    count = tl.load(line + 3)
    lane = tl.arange(0, LANES)[None, :]
    whole = tl.zeros((R, LANES), tl.float32)
    left = tl.zeros((R, LANES), tl.float32)
    for i in range(0, count, R):
        run = i + tl.arange(0, R)
        inside = (run < count)[:, None] & (lane < M)
        rest = run // tl.load(line + 6)
        at = (run % tl.load(line + 6)) * tl.load(line + 9) + (rest % tl.load(line + 5)) * tl.load(line + 8)
        at += (rest // tl.load(line + 5)) * tl.load(line + 7)
        x = tl.abs(tl.load(theta_at + at[:, None] + lane * s, mask=inside, other=0.0).to(tl.float32))
        kept = kept_of(tl.where(lane < M, x * factor, -1.0), n, M, LANES)
        whole += x
        left += tl.where(kept & inside, x, 0.0)
    entries = count * M
    r = (tl.sum(left) / entries + 1e-6) / (tl.sum(whole) / entries + 1e-6)
    tl.store(scales + row, 1.01 / (r + 0.01))
