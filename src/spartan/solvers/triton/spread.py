"""Puts what a form says of blocks, rows and columns at all their entries: weights, gradients and decay.

Tiles, and the tables of units, are those of `units.py`. What a form says of a unit is a number, made from its u, its
rank or what is stored of it, once for all its entries. `ranks` and `masks` have the address of each target's part of a
vector of units, since methods replace these; vectors of one's own are read from `bases` on.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.gradient import DECAY, TIMES, paced
from spartan.solvers.triton.state import CUT, FLOATS, INTS, VALUE, row_of, segment_of
from spartan.solvers.triton.units import at_address, corner_of, sides_of, tile_of
from spartan.solvers.triton.weights import (
    ABOVE,
    NUMBERS,
    ONE,
    SHIFTED,
    SHRUNK,
    SOFT,
    STORED,
    kept_of,
    line_of,
    mask_of,
    shrunk_of,
)


@triton.jit
def shifted_of(u, rank, tau):
    """min(rank − τ, u)/u; 1 for u = 0."""
    return tl.where(u > 0.0, tl.minimum(rank - tau, u) / tl.where(u > 0.0, u, 1.0), 1.0)


@triton.jit
def project(
    parameters, thetas, units, ranks, masks, taus, scales, bands, table, segments, bases, shapes, columns,
    all_floats, all_ints,
    KEPT: tl.constexpr, MASK: tl.constexpr, P: tl.constexpr,
    DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """w = [kept] ⊙ mask ⊙ θ into the parameters; exactly +0.0 where not kept, where θ is not read either.

    KEPT and MASK are those of `weights.project`, of u or of given ranks. `scales` has a number for each band of units
    that are side by side, `bands` the first band of each target; None for none.
    """
    piece = tl.program_id(0)
    which, start, length, position = row_of(table, piece)
    segment = segment_of(segments, piece)
    floats = all_floats + segment * FLOATS
    theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
    parameter_at = at_address(tl.load(parameters + which), DTYPE, GRAIN)
    unit_at = units + tl.load(bases + which) + start
    if ranks is not None:
        rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
    if masks is not None:
        kind: tl.constexpr = tl.float32 if MASK == NUMBERS else tl.int8
        mask_at = tl.load(masks + which).to(tl.pointer_type(kind)) + start
    shape = shapes + 5 * which
    h, w, step = sides_of(shape, GRAIN)
    value = tl.load(floats + VALUE).to(tl.float32)
    cut = tl.load(all_ints + segment * INTS + CUT) - position
    slope, center, shift = line_of(floats)
    if (MASK == SHRUNK) | (MASK == SHIFTED):
        tau = tl.load(taus + segment).to(tl.float32)
    for i in range(0, length, U):
        unit = i + tl.arange(0, U)
        there = unit < length
        corner, first = corner_of(start + unit, shape, h, w, step)
        u = tl.load(unit_at + unit, mask=there, other=0.0)
        rank = u
        if ranks is not None:
            rank = tl.load(rank_at + unit, mask=there, other=0.0)
        m = tl.full((U,), 1.0, tl.float32)
        if MASK == SOFT:
            m = mask_of(rank, slope, center, shift)
        elif MASK == SHRUNK:
            m = shrunk_of(u, tl.maximum(tau, 0.0), P)
            if scales is not None:
                band = tl.load(bands + which) + (start + unit) // tl.load(shape + 1)
                m *= tl.load(scales + band, mask=there, other=0.0)
        elif MASK == SHIFTED:
            m = shifted_of(u, rank, tau)
        elif MASK == NUMBERS:
            m = tl.load(mask_at + unit, mask=there, other=0.0)
        kept = there
        if KEPT == ABOVE:
            kept = kept_of(rank, unit, value, cut)
        elif KEPT == STORED:
            kept = tl.load(mask_at + unit, mask=there, other=0) != 0
        m = m.to(DTYPE).to(tl.float32)[:, None]
        for j in range(0, w, W):
            top, inside = tile_of(corner, first, there, j, w, shape, columns, INLINE, W)
            for r in range(0, h):
                x = tl.load(theta_at + top + r * step, mask=inside & kept[:, None], other=0.0).to(tl.float32)
                if MASK != ONE:
                    x = tl.where(kept[:, None], x * m, 0.0)
                tl.store(parameter_at + top + r * step, x.to(DTYPE), mask=inside)


@triton.jit
def in_a(u, unit, there, masks, which, start, segment, position, all_floats, all_ints, KEPT: tl.constexpr):
    """Which of the units of a target are in A."""
    a = there
    if KEPT == ABOVE:
        value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
        a = kept_of(u, unit, value, tl.load(all_ints + segment * INTS + CUT) - position)
    elif KEPT == STORED:
        mask_at = tl.load(masks + which).to(tl.pointer_type(tl.int8)) + start
        a = tl.load(mask_at + unit, mask=there, other=0) != 0
    return a


@triton.jit
def where(
    grads, thetas, units, ranks, masks, more_masks, numbers, scale, table, segments, bases, shapes, columns,
    all_floats, all_ints, more_values, more_cuts,
    KEPT: tl.constexpr, MORE: tl.constexpr, DO: tl.constexpr,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """g TIMES a factor on A, on B∖A and on the rest; for DECAY that factor times θ is added to g; or PACE.

    As `gradient.where`. What a factor leaves as it is, is neither read nor written; what it makes 0 is not read.
    """
    piece = tl.program_id(0)
    which, start, length, position = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        segment = segment_of(segments, piece)
        theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
        grad_at = at_address(grad, GRAD, GRAIN)
        unit_at = units + tl.load(bases + which) + start
        if ranks is not None:
            unit_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
        shape = shapes + 5 * which
        h, w, step = sides_of(shape, GRAIN)
        on_a = tl.load(numbers + 3 * segment)
        on_b = tl.load(numbers + 3 * segment + 1)
        on_rest = tl.load(numbers + 3 * segment + 2)
        for i in range(0, length, U):
            unit = i + tl.arange(0, U)
            there = unit < length
            corner, first = corner_of(start + unit, shape, h, w, step)
            u = tl.load(unit_at + unit, mask=there, other=0.0)
            a = in_a(u, unit, there, masks, which, start, segment, position, all_floats, all_ints, KEPT)
            b = there
            if MORE == ABOVE:
                value = tl.load(more_values + segment).to(tl.float32)
                b = kept_of(u, unit, value, tl.load(more_cuts + segment) - position)
            elif MORE == STORED:
                more_at = tl.load(more_masks + which).to(tl.pointer_type(tl.int8)) + start
                b = tl.load(more_at + unit, mask=there, other=0) != 0
            by = tl.where(a, on_a, tl.where(b, on_b, on_rest))
            if scale is not None:
                by *= tl.load(scale).to(tl.float32)
            moved = there & (by != (0.0 if DO == DECAY else 1.0))
            for j in range(0, w, W):
                top, inside = tile_of(corner, first, moved, j, w, shape, columns, INLINE, W)
                for r in range(0, h):
                    at = top + r * step
                    if DO != TIMES:
                        theta = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
                        g = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
                        if DO == DECAY:
                            g += (by[:, None] * theta).to(DTYPE).to(tl.float32)
                        else:
                            g = paced(theta, g, by[:, None])
                    else:  # a NaN where nothing is to come is none
                        g = tl.load(grad_at + at, mask=inside & (by != 0.0)[:, None], other=0.0).to(tl.float32)
                        g = g * by[:, None]
                    tl.store(grad_at + at, g.to(GRAD), mask=inside)


@triton.jit
def along(
    grads, thetas, units, ranks, masks, shares, bands, table, segments, bases, shapes, columns, all_floats, all_ints,
    KEPT: tl.constexpr,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Outside A g becomes θ·(Σ g·θ)/(Σ θ²), the sums over the unit; A is left alone.

    `shares` has a factor for each band of units that are side by side, `bands` the first band of each target; None for
    none.
    """
    piece = tl.program_id(0)
    which, start, length, position = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        segment = segment_of(segments, piece)
        theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
        grad_at = at_address(grad, GRAD, GRAIN)
        unit_at = units + tl.load(bases + which) + start
        if ranks is not None:
            unit_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
        shape = shapes + 5 * which
        h, w, step = sides_of(shape, GRAIN)
        for i in range(0, length, U):
            unit = i + tl.arange(0, U)
            there = unit < length
            corner, first = corner_of(start + unit, shape, h, w, step)
            u = tl.load(unit_at + unit, mask=there, other=0.0)
            a = in_a(u, unit, there, masks, which, start, segment, position, all_floats, all_ints, KEPT)
            out = there & (a == 0)
            products = tl.zeros((U, W), tl.float32)
            squares = tl.zeros((U, W), tl.float32)
            for j in range(0, w, W):
                top, inside = tile_of(corner, first, out, j, w, shape, columns, INLINE, W)
                for r in range(0, h):
                    at = top + r * step
                    theta = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
                    products += tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32) * theta
                    squares += theta * theta
            square = tl.sum(squares, 1)
            part = tl.where(square > 0.0, tl.sum(products, 1) / tl.where(square > 0.0, square, 1.0), 0.0)
            if shares is not None:
                band = tl.load(bands + which) + (start + unit) // tl.load(shape + 1)
                part *= tl.load(shares + band, mask=there, other=0.0)
            part = part[:, None]
            for j in range(0, w, W):
                top, inside = tile_of(corner, first, out, j, w, shape, columns, INLINE, W)
                for r in range(0, h):
                    at = top + r * step
                    theta = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
                    tl.store(grad_at + at, (part * theta).to(GRAD), mask=inside)


@triton.jit
def times_mask(
    grads, ranks, masks, table, segments, shapes, columns, all_floats,
    MASK: tl.constexpr, GRAD: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """∂L/∂θ = m·g, m the SOFT mask of given ranks, or stored NUMBERS."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        grad_at = at_address(grad, GRAD, GRAIN)
        given = masks if MASK == NUMBERS else ranks
        given_at = tl.load(given + which).to(tl.pointer_type(tl.float32)) + start
        slope, center, shift = line_of(all_floats + segment_of(segments, piece) * FLOATS)
        shape = shapes + 5 * which
        h, w, step = sides_of(shape, GRAIN)
        for i in range(0, length, U):
            unit = i + tl.arange(0, U)
            there = unit < length
            corner, first = corner_of(start + unit, shape, h, w, step)
            m = tl.load(given_at + unit, mask=there, other=0.0)
            if MASK == SOFT:
                m = mask_of(m, slope, center, shift)
            m = m.to(GRAD).to(tl.float32)[:, None]
            for j in range(0, w, W):
                top, inside = tile_of(corner, first, there, j, w, shape, columns, INLINE, W)
                for r in range(0, h):
                    g = tl.load(grad_at + top + r * step, mask=inside, other=0.0).to(tl.float32)
                    tl.store(grad_at + top + r * step, (g * m).to(GRAD), mask=inside)


@triton.jit
def bend(
    grads, thetas, masks, slopes, table, bases, shapes, columns,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """∂L/∂θ = m·g + sign(θ)·slope, with both numbers of every unit given; 0 where both are."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        base = tl.load(bases + which) + start
        theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
        grad_at = at_address(grad, GRAD, GRAIN)
        shape = shapes + 5 * which
        h, w, step = sides_of(shape, GRAIN)
        for i in range(0, length, U):
            unit = i + tl.arange(0, U)
            there = unit < length
            corner, first = corner_of(start + unit, shape, h, w, step)
            m = tl.load(masks + base + unit, mask=there, other=0.0)[:, None]
            slope = tl.load(slopes + base + unit, mask=there, other=0.0)[:, None]
            for j in range(0, w, W):
                top, inside = tile_of(corner, first, there, j, w, shape, columns, INLINE, W)
                for r in range(0, h):
                    at = top + r * step
                    theta = tl.load(theta_at + at, mask=inside & (slope != 0.0), other=0.0).to(tl.float32)
                    g = tl.load(grad_at + at, mask=inside & (m != 0.0), other=0.0).to(tl.float32)
                    sign = tl.where(theta > 0.0, 1.0, tl.where(theta < 0.0, -1.0, 0.0))
                    tl.store(grad_at + at, (m * g + sign * slope).to(GRAD), mask=inside)


@triton.jit
def restart(
    thetas, masks, table, shapes, columns,
    DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """θ ← 0 at the units of a mask."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
    mask_at = tl.load(masks + which).to(tl.pointer_type(tl.int8)) + start
    shape = shapes + 5 * which
    h, w, step = sides_of(shape, GRAIN)
    for i in range(0, length, U):
        unit = i + tl.arange(0, U)
        gone = tl.load(mask_at + unit, mask=unit < length, other=0) != 0
        corner, first = corner_of(start + unit, shape, h, w, step)
        for j in range(0, w, W):
            top, inside = tile_of(corner, first, gone, j, w, shape, columns, INLINE, W)
            for r in range(0, h):
                tl.store(theta_at + top + r * step, tl.zeros((U, W), DTYPE), mask=inside)


@triton.jit
def sum_products(
    grads, thetas, sums, table, shapes, columns,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, INLINE: tl.constexpr, GRAIN: tl.constexpr, U: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """G = Σ g·θ of every unit; a missing g counts as zero."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    theta_at = at_address(tl.load(thetas + which), DTYPE, GRAIN)
    sum_at = tl.load(sums + which).to(tl.pointer_type(tl.float32)) + start
    grad = tl.load(grads + which)
    grad_at = at_address(grad, GRAD, GRAIN)
    shape = shapes + 5 * which
    h, w, step = sides_of(shape, GRAIN)
    for i in range(0, length, U):
        unit = i + tl.arange(0, U)
        there = unit < length
        corner, first = corner_of(start + unit, shape, h, w, step)
        found = tl.zeros((U, W), tl.float32)
        if grad != 0:
            for j in range(0, w, W):
                top, inside = tile_of(corner, first, there, j, w, shape, columns, INLINE, W)
                for r in range(0, h):
                    theta = tl.load(theta_at + top + r * step, mask=inside, other=0.0).to(tl.float32)
                    found += tl.load(grad_at + top + r * step, mask=inside, other=0.0).to(tl.float32) * theta
        tl.store(sum_at + unit, tl.sum(found, 1), mask=there)
