"""Draws random numbers for units, shifts ranks, and brings numbers within a budget, for all segments at once."""

import triton
import triton.language as tl

from spartan.ops.drawing import FACTORS, SHIFTS
from spartan.solvers.triton.moves import read
from spartan.solvers.triton.powers import value_of
from spartan.solvers.triton.state import row_of, segment_of

SHIFT_1, SHIFT_2, SHIFT_3, SHIFT_4 = map(tl.constexpr, SHIFTS)
FACTOR_1, FACTOR_2, FACTOR_3 = map(tl.constexpr, FACTORS)

# What is known of a segment while its shift is sought, in float64.
V = tl.constexpr(0)  # the present shift
LEAST_V = tl.constexpr(1)  # it lies between these
MOST_V = tl.constexpr(2)
BEST = tl.constexpr(3)  # the one that missed the budget least, and by how much
MISSED = tl.constexpr(4)
LAST = tl.constexpr(5)  # by how much the last one did
DONE = tl.constexpr(6)  # whether another pass would change nothing
KNOWN = tl.constexpr(7)


@triton.jit
def fold(x, SHIFT: tl.constexpr):
    """x xor x >> SHIFT, of signed numbers."""
    return x ^ (x >> SHIFT)


@triton.jit
def number_of(index, one, two):
    """The number in (0, 1) of an index under a key: bit for bit that of `ops.drawing.uniform`."""
    x = (fold(index + one, SHIFT_1) * FACTOR_1) ^ two
    x = fold(x, SHIFT_2) * FACTOR_2
    x = fold(x, SHIFT_3) * FACTOR_3
    return (fold(x, SHIFT_4) >> 8).to(tl.float32) * 1.1920928955078125e-07 + 5.9604644775390625e-08


@triton.jit
def random_at(one, two, order, start, i, BLOCK: tl.constexpr):
    """Random numbers of a block of a piece, by the place of units in row-major order, however the weights lie.

    `order` has n and m of the target, and its key: memory has runs of n·m entries in which the row-major ones lie turned.
    """
    n = tl.load(order)
    m = tl.load(order + 1)
    run = n * m
    begins = start + i
    turned = (begins % run).to(tl.int32) + tl.arange(0, BLOCK)  # from the run in which the block begins
    rest = turned % run.to(tl.int32)
    place = turned - rest + (rest % n.to(tl.int32)) * m.to(tl.int32) + rest // n.to(tl.int32)
    one += tl.load(order + 2).to(tl.int32)
    two ^= tl.load(order + 3).to(tl.int32)
    return number_of((begins - begins % run).to(tl.int32) + place, one, two)


@triton.jit(do_not_specialize=["one", "two"])
def uniform(out, starts, table, orders, one, two, BLOCK: tl.constexpr):
    """A random number in (0, 1) per unit; `orders` has a row for every target."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    first = tl.load(starts + which)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        u = random_at(one, two, orders + 4 * which, start, i, BLOCK)
        tl.store(out + first + start + here, u, mask=here < length)


@triton.jit
def shifted(values, table, segments, costs, known, found, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Of every piece Σ min(max(s − v·c, 0), 1), and how many of these move with v; at FIRST v is 0, and the largest s/c."""
    piece = tl.program_id(0)
    mine = known + segment_of(segments, piece) * KNOWN
    cost = tl.load(costs + piece).to(tl.float32)
    down = 0.0
    if not FIRST:
        if tl.load(mine + DONE) != 0.0:
            return
        down = tl.load(mine + V).to(tl.float32) * cost
    which, start, length, _ = row_of(table, piece)
    at = tl.load(values + which).to(tl.pointer_type(tl.float32)) + start
    total = tl.zeros((BLOCK,), tl.float64)
    moving = tl.zeros((BLOCK,), tl.int32)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        x = tl.load(at + here, mask=inside, other=-float("inf")) - down
        if FIRST:
            most = tl.maximum(most, x)
        total += tl.minimum(tl.maximum(x, 0.0), 1.0).to(tl.float64)
        moving += ((x > 0.0) & (x <= 1.0)).to(tl.int32)
    tl.store(found + 3 * piece, tl.sum(total))
    tl.store(found + 3 * piece + 1, tl.sum(moving).to(tl.float64))
    if FIRST:
        tl.store(found + 3 * piece + 2, (tl.max(most) / cost).to(tl.float64))


@triton.jit
def step(limits, found, prices, costs, budgets, known, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """A bracketed Newton step on the piecewise linear Σ c·s(v) = k of every segment; the FIRST one is from v = 0."""
    segment = tl.program_id(0)
    mine = known + segment * KNOWN
    if not FIRST and tl.load(mine + DONE) != 0.0:
        return
    first = tl.load(limits + 6 * segment)
    last = tl.load(limits + 6 * segment + 1)
    sums = tl.zeros((ROWS,), tl.float64)
    slopes = tl.zeros((ROWS,), tl.float64)
    most = tl.zeros((ROWS,), tl.float64)
    for i in range(0, last - first, ROWS):
        row = first + i + tl.arange(0, ROWS)
        there = row < last
        price = tl.load(prices + row, mask=there, other=0.0)
        sums += tl.load(found + 3 * row, mask=there, other=0.0) * price
        slopes += (
            tl.load(found + 3 * row + 1, mask=there, other=0.0) * price * tl.load(costs + row, mask=there, other=0.0)
        )
        if FIRST:
            most = tl.maximum(most, tl.load(found + 3 * row + 2, mask=there, other=0.0))
    if FIRST:  # the root lies below the largest s/c
        v = tl.full((), 0.0, tl.float64)
        low = v
        high = tl.max(most)
        best = v
        missed = tl.full((), float("inf"), tl.float64)
        before = missed
    else:
        v = tl.load(mine + V)
        low = tl.load(mine + LEAST_V)
        high = tl.load(mine + MOST_V)
        best = tl.load(mine + BEST)
        missed = tl.load(mine + MISSED)
        before = tl.load(mine + LAST)
    excess = tl.sum(sums) - tl.load(budgets + segment)
    slope = tl.sum(slopes)
    off = tl.abs(excess)
    tl.store(mine + BEST, tl.where(off < missed, v, best))
    tl.store(mine + MISSED, tl.minimum(off, missed))
    low = tl.where(excess > 0.0, v, low)
    high = tl.where(excess > 0.0, high, v)
    moved = tl.where(slope > 0.0, v + excess / tl.where(slope > 0.0, slope, 1.0), float("inf"))
    fast = (moved > low) & (moved < high) & (off < 0.5 * before)
    tl.store(mine + LEAST_V, low)
    tl.store(mine + MOST_V, high)
    following = tl.where(fast, moved, 0.5 * (low + high))
    # Passes go by v in float32: where that stays, so does what they find.
    tl.store(mine + DONE, tl.where((off == 0.0) | (following.to(tl.float32) == v.to(tl.float32)), 1.0, 0.0))
    tl.store(mine + V, following)
    tl.store(mine + LAST, off)


@triton.jit
def clip(values, out, table, segments, costs, known, BLOCK: tl.constexpr):
    """min(max(s − v·c, 0), 1) with the best v."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    at = tl.load(values + which).to(tl.pointer_type(tl.float32)) + start
    to = tl.load(out + which).to(tl.pointer_type(tl.float32)) + start
    down = tl.load(known + segment_of(segments, piece) * KNOWN + BEST).to(tl.float32)
    down = down * tl.load(costs + piece).to(tl.float32)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        x = tl.load(at + here, mask=inside, other=0.0) - down
        tl.store(to + here, tl.minimum(tl.maximum(x, 0.0), 1.0), mask=inside)


@triton.jit
def shift_ranks(
    thetas, shifts, out, starts, table, factors, POWER: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """z = u − sigmoid(s) of every weight, s being its target's; `starts` tells where those of each target begin."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    factor = tl.load(factors + piece)
    shift = tl.sigmoid(tl.load(shifts + which).to(tl.float32))
    address = tl.load(thetas + which)
    to = out + tl.load(starts + which) + start
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        u = tl.abs(value_of(read(address, start, i, length, DTYPE, BLOCK), POWER)) * factor
        tl.store(to + here, u - shift, mask=here < length)


@triton.jit(do_not_specialize=["one", "two"])
def sample(s, out, starts, table, orders, one, two, beta, BLOCK: tl.constexpr):
    """sigmoid(β·(logit s + logit U)), U the numbers of `uniform`; where s is 0 or 1, that."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    first = tl.load(starts + which)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        u = random_at(one, two, orders + 4 * which, start, i, BLOCK)
        chance = tl.load(s + first + start + here, mask=inside, other=0.0)
        free = (chance > 0.0) & (chance < 1.0)
        p = tl.where(free, chance, 0.5)
        found = tl.sigmoid((tl.log(p / (1.0 - p)) + tl.log(u / (1.0 - u))) * beta)
        tl.store(out + first + start + here, tl.where(free, found, chance), mask=inside)


@triton.jit
def sample_gradient(
    grads, thetas, s, m, out, starts, table, beta,
    POWER: tl.constexpr, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g·ψ · βm(1−m)/(s(1−s)) of every weight; 0 where there is no gradient, or s is 0 or 1."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    first = tl.load(starts + which) + start
    grad = tl.load(grads + which)
    theta = tl.load(thetas + which)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        found = tl.zeros((BLOCK,), tl.float32)
        if grad != 0:
            pull = read(grad, start, i, length, GRAD, BLOCK).to(tl.float32)
            pull *= value_of(read(theta, start, i, length, DTYPE, BLOCK), POWER)
            chance = tl.load(s + first + here, mask=inside, other=0.0)
            mask = tl.load(m + first + here, mask=inside, other=0.0)
            spread = chance * (1.0 - chance)
            found = tl.where(spread > 0.0, beta * mask * (1.0 - mask) / tl.where(spread > 0.0, spread, 1.0), 0.0) * pull
        tl.store(out + first + here, found, mask=inside)


@triton.jit
def adam(
    s, mean, square, grad, new_s, new_mean, new_square, n, rate, to_mean, to_square, fix_mean, fix_square, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of Adam on a vector, into others; `to_mean` is 1 − β₁, `fix_mean` 1 − β₁ᵗ."""
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    g = tl.load(grad + here, mask=inside, other=0.0)
    u = tl.load(mean + here, mask=inside, other=0.0)
    v = tl.load(square + here, mask=inside, other=0.0)
    u += (g - u) * to_mean
    v += (g * g - v) * to_square
    tl.store(new_mean + here, u, mask=inside)
    tl.store(new_square + here, v, mask=inside)
    moved = u / fix_mean * rate / (tl.sqrt(v / fix_square) + eps)
    tl.store(new_s + here, tl.load(s + here, mask=inside, other=0.0) - moved, mask=inside)
