"""Moves θ and w in and out of the parameters: all targets in one launch, masks made on the way and never stored.

An address of 0 stands for a tensor that is left alone.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.moves import narrow_at, read, write
from spartan.solvers.triton.powers import value_of
from spartan.solvers.triton.ptx import LOG2E, log_of_one_plus, logistic
from spartan.solvers.triton.state import (
    BETA,
    CENTER,
    CUT,
    FLOATS,
    INTS,
    OFFSET,
    VALUE,
    row_of,
    segment_of,
)

# What is kept, and what w is there.
EVERYTHING = tl.constexpr(0)
ABOVE = tl.constexpr(1)
STORED = tl.constexpr(2)
ONE = tl.constexpr(0)
SOFT = tl.constexpr(1)
SHRUNK = tl.constexpr(2)
NUMBERS = tl.constexpr(3)
SHIFTED = tl.constexpr(4)


@triton.jit
def line_of(floats):
    """The present dual: sigmoid(β(u − center) + offset) = 1/(1 + 2^(slope·(u − center) + shift))."""
    slope = tl.load(floats + BETA) * -LOG2E
    shift = tl.load(floats + OFFSET) * -LOG2E
    return slope.to(tl.float32), tl.load(floats + CENTER).to(tl.float32), shift.to(tl.float32)


@triton.jit
def mask_of(u, slope, center, shift):
    """The soft mask."""
    return logistic((u - center) * slope + shift)


@triton.jit
def cut_within(cut, position):
    """Where a cut lies, counted from a position on: in 32 bits, as places within a piece are."""
    return tl.minimum(tl.maximum(cut - position, 0), 2147483647).to(tl.int32)


@triton.jit
def kept_of(u, here, value, cut):
    """What a threshold keeps: what is above it, and of what is equal to it the first."""
    return (u > value) | ((u == value) & (here < cut))


@triton.jit
def shrunk_of(u, tau, P: tl.constexpr):
    """(1 − (τ/u)ᵖ)^(1/p) for u > τ, by x = 1 − τ/u, so that nothing cancels where x is small; 1 for other u."""
    above = u > tau
    x = tl.where(above, (u - tau) / tl.where(above, u, 1.0), 1.0)
    if P == 1.0:
        return x
    else:
        # 1 − (1 − x)ᵖ = −expm1(p·log1p(−x))
        z = P * log_of_one_plus(-tl.minimum(x, 0.9999999))
        near = -z * (1.0 + z / 2.0 * (1.0 + z / 3.0 * (1.0 + z / 4.0 * (1.0 + z / 5.0))))
        y = tl.where(z > -0.1, near, 1.0 - tl.exp(z))
        return tl.where(x < 1.0, tl.exp2(tl.log2(y) / P), 1.0)


@triton.jit
def project(
    parameters, thetas, ranks, masks, taus, scales, rows, table, segments, factors, all_floats, all_ints,
    KEPT: tl.constexpr, MASK: tl.constexpr, P: tl.constexpr,
    POWER: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w = [kept] ⊙ mask ⊙ ψ into the parameters; exactly +0.0 where not kept.

    KEPT is EVERYTHING, what is ABOVE the threshold of |ψ| or of given ranks, or STORED in `masks`, a byte an entry. MASK
    is ONE, SOFT, SHRUNK, NUMBERS, which `masks` holds then, or SHIFTED, min(rank − τ, u)/u. `scales` has a number for
    each row of a weight, `rows` the first row of each target and the length of its rows; None for none.
    """
    piece = tl.program_id(0)
    which, start, length, position = row_of(table, piece)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        segment = segment_of(segments, piece)
        floats = all_floats + segment * FLOATS
        factor = tl.load(factors + piece)
        theta = tl.load(thetas + which)
        if ranks is not None:
            rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
        if masks is not None:
            kind: tl.constexpr = tl.float32 if MASK == NUMBERS else tl.int8
            mask_at = tl.load(masks + which).to(tl.pointer_type(kind)) + start
        value = tl.load(floats + VALUE).to(tl.float32)
        cut = cut_within(tl.load(all_ints + segment * INTS + CUT), position)
        if MASK == SOFT:
            slope, center, shift = line_of(floats)
        if MASK == SHRUNK:
            tau = tl.maximum(tl.load(taus + segment).to(tl.float32), 0.0)
        if MASK == SHIFTED:
            tau = tl.load(taus + segment).to(tl.float32)
        if scales is not None:
            first_row = tl.load(rows + 2 * which)
            long = tl.load(rows + 2 * which + 1)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            psi = value_of(read(theta, start, i, length, DTYPE, BLOCK), POWER)
            u = tl.abs(psi) * factor
            if ranks is not None:
                u = tl.load(rank_at + here, mask=inside, other=0.0)
            w = psi
            if MASK == SOFT:
                w = psi * mask_of(u, slope, center, shift).to(DTYPE).to(tl.float32)
            elif MASK == SHRUNK:
                m = shrunk_of(u, tau, P)
                if scales is not None:
                    m *= tl.load(scales + first_row + (start + here) // long, mask=inside, other=0.0)
                w = psi * m.to(DTYPE).to(tl.float32)
            elif MASK == SHIFTED:
                size = tl.abs(psi) * factor
                m = tl.where(size > 0.0, tl.minimum(u - tau, size) / tl.where(size > 0.0, size, 1.0), 1.0)
                w = psi * m.to(DTYPE).to(tl.float32)
            elif MASK == NUMBERS:
                w = psi * tl.load(mask_at + here, mask=inside, other=0.0).to(DTYPE).to(tl.float32)
            if KEPT == ABOVE:
                w = tl.where(kept_of(u, here, value, cut), w, 0.0)
            elif KEPT == STORED:
                w = tl.where(tl.load(mask_at + here, mask=inside, other=0) != 0, w, 0.0)
            write(parameter, start, i, length, w, DTYPE, BLOCK)


@triton.jit
def keep(ranks, masks, starts, table, segments, all_floats, all_ints, BLOCK: tl.constexpr):
    """What the thresholds of ranks keep, a byte an entry; `starts` tells where those of each target begin."""
    piece = tl.program_id(0)
    which, start, length, position = row_of(table, piece)
    segment = segment_of(segments, piece)
    rank_at = ranks + tl.load(starts + which) + start
    mask_at = masks + tl.load(starts + which) + start
    value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
    cut = cut_within(tl.load(all_ints + segment * INTS + CUT), position)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        u = tl.load(rank_at + here, mask=inside, other=0.0)
        tl.store(mask_at + here, kept_of(u, here, value, cut).to(tl.int8), mask=inside)


@triton.jit
def restart(thetas, masks, table, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """θ ← 0 where a mask says so."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
    mask_at = tl.load(masks + which).to(tl.pointer_type(tl.int8)) + start
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        there = tl.load(mask_at + here, mask=here < length, other=0) != 0
        tl.store(theta_at + here, tl.zeros((BLOCK,), DTYPE), mask=there)


@triton.jit
def largest_below(
    thetas, ranks, table, segments, factors, all_floats, all_ints, found,
    POWER: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The largest u, or rank, of each piece below the threshold, where units equal to it are kept; else nothing is read.

    CUT is where a state says so: of all units, wherever they lie.
    """
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    segment = segment_of(segments, piece)
    if tl.load(all_ints + segment * INTS + CUT) > 0:
        factor = tl.load(factors + piece)
        theta = tl.load(thetas + which)
        value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
        if ranks is not None:
            rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
        most = tl.full((BLOCK,), -float("inf"), tl.float32)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            if ranks is None:
                u = tl.abs(value_of(read(theta, start, i, length, DTYPE, BLOCK), POWER)) * factor
            else:
                u = tl.load(rank_at + here, mask=inside, other=0.0)
            most = tl.maximum(most, tl.where(inside & (u < value), u, -float("inf")))
        tl.store(found + piece, tl.max(most))


@triton.jit
def below(limits, found, all_floats, all_ints, taus, ROWS: tl.constexpr, CUT: tl.constexpr):
    """τ of every segment: the largest value strictly below every kept one."""
    segment = tl.program_id(0)
    tau = tl.load(all_floats + segment * FLOATS + VALUE)
    if tl.load(all_ints + segment * INTS + CUT) > 0:
        first = tl.load(limits + 6 * segment)
        last = tl.load(limits + 6 * segment + 1)
        most = tl.full((ROWS,), -float("inf"), tl.float32)
        for i in range(0, last - first, ROWS):
            row = first + i + tl.arange(0, ROWS)
            most = tl.maximum(most, tl.load(found + row, mask=row < last, other=-float("inf")))
        tau = tl.max(most).to(tl.float64)
    tl.store(taus + segment, tau)


@triton.jit
def place_of(row, owners, rows, targets, all_ints):
    """Of a row: its target, where it starts there, how long it is, its segment, and where in it that one's cut lies."""
    which = tl.load(owners + row)
    long = tl.load(rows + 2 * which + 1)
    start = (row - tl.load(rows + 2 * which)) * long
    segment = tl.load(targets + 2 * which)
    cut = cut_within(tl.load(all_ints + segment * INTS + CUT), tl.load(targets + 2 * which + 1) + start)
    return which, start, long, segment, cut


@triton.jit
def row_scales(
    thetas, owners, rows, targets, factors, all_floats, all_ints, scales,
    POWER: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1.01/(r + 0.01) of every row, r the share of its magnitude that is kept.

    `owners` has the target of each row; `targets` of each target its segment and its first position there.
    """
    row = tl.program_id(0)
    which, start, long, segment, cut = place_of(row, owners, rows, targets, all_ints)
    value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
    factor = tl.load(factors + which)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
    whole = tl.zeros((BLOCK,), tl.float32)
    left = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, long, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < long
        x = tl.abs(value_of(tl.load(theta_at + here, mask=inside, other=0.0), POWER))
        whole += x
        left += tl.where(kept_of(x * factor, here, value, cut) & inside, x, 0.0)
    r = (tl.sum(left) / long + 1e-6) / (tl.sum(whole) / long + 1e-6)
    tl.store(scales + row, 1.01 / (r + 0.01))


@triton.jit
def take(
    parameters, thetas, table, bad, numbers,
    FINE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """θ from the parameters, unless `bad` names a gradient. An entry that is not finite stays as it was."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        good = tl.load(bad) == FINE
        theta = tl.load(thetas + which)
        wrong = tl.zeros((BLOCK,), tl.int32)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            x = read(parameter, start, i, length, DTYPE, BLOCK)
            finite = tl.abs(x.to(tl.float32)) < float("inf")
            wrong += (inside & (finite == 0)).to(tl.int32)
            if good:  # whole runs are stored: what stays as it was is read, and stored again
                was = tl.load(narrow_at(theta, start, DTYPE) + here, mask=inside & (finite == 0), other=0.0)
                write(theta, start, i, length, tl.where(finite, x, was), DTYPE, BLOCK)
        if tl.sum(wrong) > 0:
            tl.atomic_min(bad + 1, tl.load(numbers + which))


@triton.jit
def put(parameters, thetas, table, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """θ into the parameters."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        theta = tl.load(thetas + which)
        for i in range(0, length, BLOCK):
            write(parameter, start, i, length, read(theta, start, i, length, DTYPE, BLOCK), DTYPE, BLOCK)
