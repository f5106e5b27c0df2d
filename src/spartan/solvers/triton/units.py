"""Sums up what blocks, rows and columns are worth, and turns gradients through their soft masks: all targets in one launch.

A target is a matrix without gaps in its memory. A program takes a few units that follow one another, as a tile of U
units by W of their columns, and goes down their rows; what belongs to a unit is read once for all its entries. `shapes`
has a row per target: the rows of a unit, the units across, the columns of a unit, the step in memory from one row to
the next, and where its columns begin in `columns`, which tells where in a row each of them lies. With INLINE that is
not read: rows lie in order. All of these are 32 bits wide, and so are places: a target has fewer than 2³¹ entries.
`units` and `pulls` have an entry per unit of all targets; `bases` tells where those of a target begin. The widths of all
units and the steps from row to row are multiples of GRAIN, and tensors begin at multiples of 16 bytes if it is not 1: so
many entries are read as one word.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.gradient import RATIO
from spartan.solvers.triton.state import BETA, FLOATS, row_of, segment_of
from spartan.solvers.triton.weights import line_of, mask_of


@triton.jit
def sides_of(shape, GRAIN: tl.constexpr):
    """The rows and the columns of a unit, and the step from one row to the next."""
    w = tl.load(shape + 2)
    step = tl.load(shape + 3)
    if GRAIN > 1:  # what they are anyway: now the compiler knows
        w = w // GRAIN * GRAIN
        step = step // GRAIN * GRAIN
    return tl.load(shape), w, step


@triton.jit
def at_address(address, DTYPE: tl.constexpr, GRAIN: tl.constexpr):
    """A tensor by its address."""
    at = address.to(tl.pointer_type(DTYPE))
    if GRAIN > 1:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def corner_of(unit, shape, h, w, step):
    """Where the rows of a unit begin, and its first column."""
    across = tl.load(shape + 1)
    q = unit.to(tl.int32)  # a division in 64 bits takes many times as long
    down = q // across
    right = q - down * across
    return down * h * step, right * w


@triton.jit
def tile_of(corner, first, there, j, w, shape, columns, INLINE: tl.constexpr, W: tl.constexpr):
    """Places of the entries in the first row of some units, from column j on, and which of them there are."""
    column = j + tl.arange(0, W)
    inside = there[:, None] & (column < w)[None, :]
    at = first[:, None] + column[None, :]
    if not INLINE:
        at = tl.load(columns + tl.load(shape + 4) + at, mask=inside, other=0)
    return corner[:, None] + at, inside


@triton.jit
def sum_units(
    thetas, table, bases, shapes, columns, factors, units,
    DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """u = factor · Σ|θ| of every unit."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    base = tl.load(bases + which) + start
    factor = tl.load(factors + piece)
    theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
    shape = shapes + 5 * which
    h, w, step = sides_of(shape, GRAIN)
    for i in range(0, length, U):
        unit = i + tl.arange(0, U)
        there = unit < length
        corner, first = corner_of(start + unit, shape, h, w, step)
        found = tl.zeros((U, W), tl.float32)
        for j in range(0, w, W):
            top, inside = tile_of(corner, first, there, j, w, shape, columns, INLINE, W)
            for r in range(0, h):
                at = top + r * step
                found += tl.abs(tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32))
        tl.store(units + base + unit, tl.sum(found, 1) * factor, mask=there)


@triton.jit
def pull(
    grads, thetas, table, segments, bases, shapes, columns, units, pulls, all_floats, sums,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """G = Σ g·θ of every unit; and of each piece Σ G·m(1−m), Σ m(1−m) and Σ m."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    base = tl.load(bases + which) + start
    floats = all_floats + segment_of(segments, piece) * FLOATS
    theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
    grad = tl.load(grads + which)
    grad_at = at_address(grad, GRAD, GRAIN)
    shape = shapes + 5 * which
    h, w, step = sides_of(shape, GRAIN)
    slope, center, shift = line_of(floats)
    a1 = tl.zeros((U,), tl.float32)
    a2 = tl.zeros((U,), tl.float32)
    f = tl.zeros((U,), tl.float32)
    for i in range(0, length, U):
        unit = i + tl.arange(0, U)
        there = unit < length
        corner, first = corner_of(start + unit, shape, h, w, step)
        found = tl.zeros((U, W), tl.float32)
        if grad != 0:
            for j in range(0, w, W):
                top, inside = tile_of(corner, first, there, j, w, shape, columns, INLINE, W)
                for r in range(0, h):
                    at = top + r * step
                    theta = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
                    found += tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32) * theta
        pulled = tl.sum(found, 1)
        tl.store(pulls + base + unit, pulled, mask=there)
        m = mask_of(tl.load(units + base + unit, mask=there, other=0.0), slope, center, shift)
        steep = tl.where(there, m - m * m, 0.0)
        a1 += pulled * steep
        a2 += steep
        f += tl.where(there, m, 0.0)
    one = tl.sum(a1)
    # Its own gradient says that it is not finite; the others', which a loss scaler may have found good, stay so.
    one = tl.where(tl.abs(one) < float("inf"), one, 0.0)
    tl.store(sums + 4 * piece, one.to(tl.float64))
    tl.store(sums + 4 * piece + 1, tl.sum(a2).to(tl.float64))
    tl.store(sums + 4 * piece + 2, tl.sum(f).to(tl.float64))


@triton.jit
def through_mask(
    grads, thetas, table, segments, bases, shapes, columns, factors, costs, units, pulls, all_floats, out,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """∂L/∂θ = m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(G − c·a₁/a₂)."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        base = tl.load(bases + which) + start
        segment = segment_of(segments, piece)
        floats = all_floats + segment * FLOATS
        back = (tl.load(out + 2 * segment + RATIO) * tl.load(costs + piece)).to(tl.float32)
        scale = tl.load(floats + BETA).to(tl.float32) * tl.load(factors + piece)
        slope, center, shift = line_of(floats)
        theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
        grad_at = at_address(grad, GRAD, GRAIN)
        shape = shapes + 5 * which
        h, w, step = sides_of(shape, GRAIN)
        for i in range(0, length, U):
            unit = i + tl.arange(0, U)
            there = unit < length
            corner, first = corner_of(start + unit, shape, h, w, step)
            m = mask_of(tl.load(units + base + unit, mask=there, other=0.0), slope, center, shift)
            pulled = tl.load(pulls + base + unit, mask=there, other=0.0)
            moved = (scale * (m - m * m) * (pulled - back))[:, None]
            mask = m[:, None]
            for j in range(0, w, W):
                top, inside = tile_of(corner, first, there, j, w, shape, columns, INLINE, W)
                for r in range(0, h):
                    at = top + r * step
                    theta = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
                    g = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
                    sign = tl.where(theta > 0.0, 1.0, tl.where(theta < 0.0, -1.0, 0.0))
                    tl.store(grad_at + at, (mask * g + sign * moved).to(GRAD), mask=inside)
