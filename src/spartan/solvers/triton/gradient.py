"""Turns gradients for w into gradients for θ by kernels: in place, all targets in one launch.

ψ is what methods see of θ: θ itself, or with a POWER other than 1 that power of it, whose slope comes last.

An address of 0 stands for a gradient that is not there.
"""

import triton
import triton.language as tl

from spartan.solvers import forms
from spartan.solvers.triton.moves import read, write
from spartan.solvers.triton.powers import slope_of, value_of
from spartan.solvers.triton.state import (
    BETA,
    CUT,
    FLOATS,
    INTS,
    VALUE,
    row_of,
    segment_of,
)
from spartan.solvers.triton.weights import ABOVE, STORED, cut_within, kept_of, line_of, mask_of, place_of

LEAST = tl.constexpr(forms.LEAST)
# What `where` does with its factors.
TIMES = tl.constexpr(0)
DECAY = tl.constexpr(1)
PACE = tl.constexpr(2)
# What is made of the sums of `pull` for `through_mask` (`ratios`).
RATIO = tl.constexpr(0)  # a₁/a₂
RESIDUAL = tl.constexpr(1)  # |Σ c m − k| / k: a late look at how well the mask was solved


@triton.jit
def pull(
    grads, thetas, ranks, table, segments, factors, all_floats, sums,
    POWER: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each piece: Σ g·ψ·m(1−m), Σ m(1−m) and Σ m. The mask is that of |ψ|, or of given ranks."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    factor = tl.load(factors + piece)
    theta = tl.load(thetas + which)
    grad = tl.load(grads + which)
    floats = all_floats + segment_of(segments, piece) * FLOATS
    slope, center, shift = line_of(floats)
    if ranks is not None:
        rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
    a1 = tl.zeros((BLOCK,), tl.float32)
    a2 = tl.zeros((BLOCK,), tl.float32)
    f = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        psi = value_of(read(theta, start, i, length, DTYPE, BLOCK), POWER)
        g = tl.zeros((BLOCK,), tl.float32)
        if grad != 0:
            g = read(grad, start, i, length, GRAD, BLOCK).to(tl.float32)
        u = tl.abs(psi) * factor
        if ranks is not None:
            u = tl.load(rank_at + here, mask=inside, other=0.0)
        m = mask_of(u, slope, center, shift)
        steep = tl.where(inside, m - m * m, 0.0)
        a1 += g * psi * steep
        a2 += steep
        f += tl.where(inside, m, 0.0)
    one = tl.sum(a1)
    # Its own gradient says that it is not finite; the others', which a loss scaler may have found good, stay so.
    one = tl.where(tl.abs(one) < float("inf"), one, 0.0)
    tl.store(sums + 4 * piece, one.to(tl.float64))
    tl.store(sums + 4 * piece + 1, tl.sum(a2).to(tl.float64))
    tl.store(sums + 4 * piece + 2, tl.sum(f).to(tl.float64))


@triton.jit
def through_mask(
    grads, thetas, table, segments, factors, costs, all_floats, out,
    POWER: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂L/∂ψ = m·g + sign(ψ)·(∂u/∂|ψ|)·βm(1−m)·(g·ψ − c·a₁/a₂)."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        factor = tl.load(factors + piece)
        segment = segment_of(segments, piece)
        floats = all_floats + segment * FLOATS
        back = (tl.load(out + 2 * segment + RATIO) * tl.load(costs + piece)).to(tl.float32)
        scale = tl.load(floats + BETA).to(tl.float32) * factor
        slope, center, shift = line_of(floats)
        theta = tl.load(thetas + which)
        for i in range(0, length, BLOCK):
            x = read(theta, start, i, length, DTYPE, BLOCK)
            psi = value_of(x, POWER)
            g = read(grad, start, i, length, GRAD, BLOCK).to(tl.float32)
            m = mask_of(tl.abs(psi) * factor, slope, center, shift)
            sign = tl.where(psi > 0.0, 1.0, tl.where(psi < 0.0, -1.0, 0.0))
            turned = m * g + sign * scale * (m - m * m) * (g * psi - back)
            if POWER != 1.0:
                turned *= slope_of(x, POWER)
            write(grad, start, i, length, turned, GRAD, BLOCK)


@triton.jit
def through_learned(
    grads, thetas, ranks, learned, table, segments, costs, all_floats, out,
    ADD: tl.constexpr, POWER: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂L/∂ψ = m·g; and for the learned ranks of the mask βm(1−m)·(g·ψ − c·a₁/a₂), into their gradient or added to it."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    segment = segment_of(segments, piece)
    floats = all_floats + segment * FLOATS
    back = (tl.load(out + 2 * segment + RATIO) * tl.load(costs + piece)).to(tl.float32)
    beta = tl.load(floats + BETA).to(tl.float32)
    slope, center, shift = line_of(floats)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
    grad_at = grad.to(tl.pointer_type(GRAD)) + start
    rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
    learned_at = tl.load(learned + which).to(tl.pointer_type(tl.float32)) + start
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        m = mask_of(tl.load(rank_at + here, mask=inside, other=0.0), slope, center, shift)
        pull = tl.zeros((BLOCK,), tl.float32)
        if grad != 0:
            psi = value_of(tl.load(theta_at + here, mask=inside, other=0.0), POWER)
            g = tl.load(grad_at + here, mask=inside, other=0.0)
            pull = g.to(tl.float32) * psi
            tl.store(grad_at + here, g * m.to(GRAD), mask=inside)
        moved = beta * (m - m * m) * (pull - back)
        if ADD:
            moved += tl.load(learned_at + here, mask=inside, other=0.0)
        tl.store(learned_at + here, moved, mask=inside)


@triton.jit
def paced(theta, moved, by):
    """θ + by·(moved − θ), as `torch.lerp` has it: nothing is lost where `by` is 1."""
    way = moved - theta
    return tl.where(by < 0.5, theta + by * way, moved - way * (1.0 - by))


@triton.jit
def where(
    grads, thetas, ranks, masks, more_masks, numbers, scale, table, segments, factors,
    all_floats, all_ints, more_values, more_cuts,
    KEPT: tl.constexpr, MORE: tl.constexpr, DO: tl.constexpr, POWER: tl.constexpr,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g TIMES a factor on A, on B∖A and on the rest; for DECAY that factor times ψ is added to g. Both times the slope.

    For PACE what is given in the place of g are parameters: they go as far from θ as the factor says.

    A and B are EVERYTHING, what is ABOVE a threshold of |ψ| or of given ranks, or STORED, a byte an entry. `numbers`
    has the three factors of every segment. A loss scale, where there is one, multiplies what is added.
    """
    piece = tl.program_id(0)
    which, start, length, position = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        factor = tl.load(factors + piece)
        theta = tl.load(thetas + which)
        segment = segment_of(segments, piece)
        on_a = tl.load(numbers + 3 * segment)
        on_b = tl.load(numbers + 3 * segment + 1)
        on_rest = tl.load(numbers + 3 * segment + 2)
        if scale is not None:
            scaled = tl.load(scale).to(tl.float32)
            on_a *= scaled
            on_b *= scaled
            on_rest *= scaled
        if ranks is not None:
            rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
        if masks is not None:
            mask_at = tl.load(masks + which).to(tl.pointer_type(tl.int8)) + start
        if more_masks is not None:
            more_at = tl.load(more_masks + which).to(tl.pointer_type(tl.int8)) + start
        if KEPT == ABOVE:
            value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
            cut = cut_within(tl.load(all_ints + segment * INTS + CUT), position)
        if MORE == ABOVE:
            more_value = tl.load(more_values + segment).to(tl.float32)
            more_cut = cut_within(tl.load(more_cuts + segment), position)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            u = tl.zeros((BLOCK,), tl.float32)
            x = tl.zeros((BLOCK,), DTYPE)
            if DO != TIMES or POWER != 1.0 or ((KEPT == ABOVE or MORE == ABOVE) and ranks is None):
                x = read(theta, start, i, length, DTYPE, BLOCK)
                u = tl.abs(value_of(x, POWER)) * factor
            if ranks is not None:
                u = tl.load(rank_at + here, mask=inside, other=0.0)
            by = tl.zeros((BLOCK,), tl.float32) + on_rest
            if MORE == ABOVE:
                by = tl.where(kept_of(u, here, more_value, more_cut), on_b, by)
            elif MORE == STORED:
                by = tl.where(tl.load(more_at + here, mask=inside, other=0) != 0, on_b, by)
            else:
                by = tl.zeros((BLOCK,), tl.float32) + on_b
            a = inside
            if KEPT == ABOVE:
                a = kept_of(u, here, value, cut)
            elif KEPT == STORED:
                a = tl.load(mask_at + here, mask=inside, other=0) != 0
            by = tl.where(a, on_a, by)
            g = read(grad, start, i, length, GRAD, BLOCK).to(tl.float32)
            if POWER != 1.0 and DO != PACE:
                by *= slope_of(x, POWER)
            if DO == DECAY:
                g += (by * value_of(x, POWER)).to(DTYPE).to(tl.float32)
            elif DO == PACE:
                g = paced(x.to(tl.float32), g, by)
            else:
                g = tl.where(by == 0.0, 0.0, g * by)  # a NaN where nothing is to come is none
            write(grad, start, i, length, g, GRAD, BLOCK)


@triton.jit
def share_of(left, whole, by):
    """What of a length is kept, from the sums of squares, times a number; 1 where that is 0."""
    share = tl.minimum(tl.maximum(by * tl.sqrt(left / tl.maximum(whole, 1e-38)), LEAST), 1.0)
    return tl.where(by == 0.0, 1.0, share)


@triton.jit
def damp(
    grads, parameters, thetas, by, owners, rows, targets, factors, all_floats, all_ints,
    POWER: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g outside A times so much of ‖w‖/‖ψ‖ of its row as `by` says of the target, 0 for none; parameters hold w.

    A program has a row. `owners` has the target of each, `rows` the first row of each target and the length of its rows,
    `targets` of each target its segment and its first position there.
    """
    row = tl.program_id(0)
    which, start, long, segment, cut = place_of(row, owners, rows, targets, all_ints)
    grad = tl.load(grads + which)
    times = tl.load(by + which).to(tl.float32)
    if (grad != 0) & (times != 0.0):
        value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
        factor = tl.load(factors + which)
        theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
        weight_at = tl.load(parameters + which).to(tl.pointer_type(DTYPE)) + start
        grad_at = grad.to(tl.pointer_type(GRAD)) + start
        whole = tl.zeros((BLOCK,), tl.float32)
        left = tl.zeros((BLOCK,), tl.float32)
        for i in range(0, long, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < long
            psi = value_of(tl.load(theta_at + here, mask=inside, other=0.0), POWER)
            w = tl.load(weight_at + here, mask=inside, other=0.0).to(tl.float32)
            whole += psi * psi
            left += w * w
        share = share_of(tl.sum(left), tl.sum(whole), times)
        for i in range(0, long, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < long
            psi = value_of(tl.load(theta_at + here, mask=inside, other=0.0), POWER)
            out = inside & (kept_of(tl.abs(psi) * factor, here, value, cut) == 0)
            g = tl.load(grad_at + here, mask=out, other=0.0).to(tl.float32)
            tl.store(grad_at + here, (g * share).to(GRAD), mask=out)


@triton.jit
def where_stored(grads, masks, table, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """∂L/∂θ = [kept] ⊙ g, from masks of one byte an entry: zeros are written, the rest is left alone."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        mask_at = tl.load(masks + which).to(tl.pointer_type(tl.int8)) + start
        grad_at = grad.to(tl.pointer_type(GRAD)) + start
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            gone = tl.load(mask_at + here, mask=here < length, other=1) == 0
            tl.store(grad_at + here, tl.zeros((BLOCK,), GRAD), mask=gone)


@triton.jit
def times_mask(grads, masks, table, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """∂L/∂θ = m·g, m a stored number for every entry."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        mask_at = tl.load(masks + which).to(tl.pointer_type(tl.float32)) + start
        grad_at = grad.to(tl.pointer_type(GRAD)) + start
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            g = tl.load(grad_at + here, mask=inside, other=0.0)
            m = tl.load(mask_at + here, mask=inside, other=0.0).to(GRAD)
            tl.store(grad_at + here, g * m, mask=inside)


@triton.jit
def teach(
    grads, thetas, learned, table,
    ADD: tl.constexpr, POWER: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g·ψ of every entry, into the gradient of what is learned, or added to it; a missing g counts as zero."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
    grad_at = grad.to(tl.pointer_type(GRAD)) + start
    learned_at = tl.load(learned + which).to(tl.pointer_type(tl.float32)) + start
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        pull = tl.zeros((BLOCK,), tl.float32)
        if grad != 0:
            psi = value_of(tl.load(theta_at + here, mask=inside, other=0.0), POWER)
            pull = tl.load(grad_at + here, mask=inside, other=0.0).to(tl.float32) * psi
        if ADD:
            pull += tl.load(learned_at + here, mask=inside, other=0.0)
        tl.store(learned_at + here, pull, mask=inside)


@triton.jit
def pull_on_shift(
    grads, thetas, ranks, taus, table, segments, factors, all_floats, all_ints, sums,
    POWER: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each piece −Σ g·ψ/u where kept and shrunk: what a shift of its ranks does to the loss."""
    piece = tl.program_id(0)
    which, start, length, position = row_of(table, piece)
    grad = tl.load(grads + which)
    found = tl.zeros((BLOCK,), tl.float32)
    if grad != 0:
        segment = segment_of(segments, piece)
        factor = tl.load(factors + piece)
        theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
        rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
        grad_at = grad.to(tl.pointer_type(GRAD)) + start
        value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
        cut = cut_within(tl.load(all_ints + segment * INTS + CUT), position)
        tau = tl.load(taus + segment).to(tl.float32)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            psi = value_of(tl.load(theta_at + here, mask=inside, other=0.0), POWER)
            rank = tl.load(rank_at + here, mask=inside, other=0.0)
            g = tl.load(grad_at + here, mask=inside, other=0.0).to(tl.float32)
            u = tl.abs(psi) * factor
            moves = inside & kept_of(rank, here, value, cut) & (u > 0.0) & (rank - tau < u)
            found -= tl.where(moves, g * psi / tl.where(u > 0.0, u, 1.0), 0.0)
    tl.store(sums + 4 * piece, tl.sum(found).to(tl.float64))


@triton.jit
def learn_shift(sums, stretches, shifts, found, ROWS: tl.constexpr):
    """∂L/∂s of every target, from its pieces, through sigmoid(s)."""
    target = tl.program_id(0)
    first = tl.load(stretches + 2 * target)
    last = tl.load(stretches + 2 * target + 1)
    total = tl.zeros((ROWS,), tl.float64)
    for i in range(0, last - first, ROWS):
        row = first + i + tl.arange(0, ROWS)
        total += tl.load(sums + 4 * row, mask=row < last, other=0.0)
    shift = tl.sigmoid(tl.load(shifts + target).to(tl.float32))
    tl.store(found + target, tl.sum(total).to(tl.float32) * (shift * (1.0 - shift)))


@triton.jit
def check(grads, table, bad, numbers, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """The first tensor whose gradient is not finite is named in `bad`, by its number."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        wrong = tl.zeros((BLOCK,), tl.int32)
        for i in range(0, length, BLOCK):
            g = read(grad, start, i, length, GRAD, BLOCK).to(tl.float32)
            wrong += ((tl.abs(g) < float("inf")) == 0).to(tl.int32)
        if tl.sum(wrong) > 0:
            tl.atomic_min(bad, tl.load(numbers + which))


@triton.jit
def clear(grads, table, bad, FINE: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """No gradient at all, if one was not finite: the optimizer's state stays clean."""
    if tl.load(bad) != FINE:
        which, start, length, _ = row_of(table, tl.program_id(0))
        grad = tl.load(grads + which)
        if grad != 0:
            for i in range(0, length, BLOCK):
                write(grad, start, i, length, tl.zeros((BLOCK,), GRAD), GRAD, BLOCK)
