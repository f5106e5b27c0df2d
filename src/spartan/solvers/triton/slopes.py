"""Works on one number per block, row or column: slopes of what ranks or shifts them, and scales of bands of them.

`table` has pieces of units; vectors of one's own are read from `bases` on.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.gradient import RATIO, share_of
from spartan.solvers.triton.spread import shifted_of
from spartan.solvers.triton.state import BETA, CUT, FLOATS, INTS, VALUE, row_of, segment_of
from spartan.solvers.triton.weights import kept_of, line_of, mask_of


@triton.jit
def learn(
    ranks, pulls, learned, table, segments, bases, costs, all_floats, out, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """βm(1−m)·(G − c·a₁/a₂) for learned ranks, from G of their units; into their gradient or added to it."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    segment = segment_of(segments, piece)
    floats = all_floats + segment * FLOATS
    back = (tl.load(out + 2 * segment + RATIO) * tl.load(costs + piece)).to(tl.float32)
    beta = tl.load(floats + BETA).to(tl.float32)
    slope, center, shift = line_of(floats)
    pull_at = pulls + tl.load(bases + which) + start
    rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
    learned_at = tl.load(learned + which).to(tl.pointer_type(tl.float32)) + start
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        m = mask_of(tl.load(rank_at + here, mask=inside, other=0.0), slope, center, shift)
        moved = beta * (m - m * m) * (tl.load(pull_at + here, mask=inside, other=0.0) - back)
        if ADD:
            moved += tl.load(learned_at + here, mask=inside, other=0.0)
        tl.store(learned_at + here, moved, mask=inside)


@triton.jit
def of_shifted(
    units, ranks, pulls, taus, masks, table, segments, bases, factors, all_floats, all_ints, sums, BLOCK: tl.constexpr
):
    """Of every unit its mask min(rank − τ, u)/u where kept, and in the place of G the slope (∂u/∂|θ|)·G·(1 − m)/u.

    And of each piece −Σ G/u where kept and shrunk: what a shift of its ranks does to the loss.
    """
    piece = tl.program_id(0)
    which, start, length, position = row_of(table, piece)
    base = tl.load(bases + which) + start
    segment = segment_of(segments, piece)
    factor = tl.load(factors + piece)
    rank_at = tl.load(ranks + which).to(tl.pointer_type(tl.float32)) + start
    value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
    cut = tl.load(all_ints + segment * INTS + CUT) - position
    tau = tl.load(taus + segment).to(tl.float32)
    found = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        u = tl.load(units + base + here, mask=inside, other=0.0)
        rank = tl.load(rank_at + here, mask=inside, other=0.0)
        kept = inside & kept_of(rank, here, value, cut)
        m = shifted_of(u, rank, tau)
        moves = kept & (u > 0.0) & (rank - tau < u)
        pull = tl.load(pulls + base + here, mask=inside, other=0.0)
        pull = tl.where(moves, pull / tl.where(moves, u, 1.0), 0.0)
        found -= pull
        tl.store(masks + base + here, tl.where(kept, m, 0.0), mask=inside)
        tl.store(pulls + base + here, factor * pull * (1.0 - m), mask=inside)
    tl.store(sums + 4 * piece, tl.sum(found).to(tl.float64))


@triton.jit
def row_scales(
    thetas, units, owners, firsts, targets, bases, shapes, columns, all_floats, all_ints, scales,
    DTYPE: tl.constexpr, INLINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1.01/(r + 0.01) of every row of every matrix, r the share of its magnitude that lies in kept units.

    `owners` has the target of each row, `firsts` the first row of each target, `targets` its segment and its first
    position there.
    """
    row = tl.program_id(0)
    which = tl.load(owners + row)
    mine = (row - tl.load(firsts + which)).to(tl.int32)
    shape = shapes + 5 * which
    across = tl.load(shape + 1)
    w = tl.load(shape + 2)
    segment = tl.load(targets + 2 * which)
    cut = tl.load(all_ints + segment * INTS + CUT) - tl.load(targets + 2 * which + 1)
    value = tl.load(all_floats + segment * FLOATS + VALUE).to(tl.float32)
    first = mine // tl.load(shape) * across
    unit_at = units + tl.load(bases + which)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + mine * tl.load(shape + 3)
    whole = tl.zeros((BLOCK,), tl.float32)
    left = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, across * w, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < across * w
        unit = first + here // w
        at = here
        if not INLINE:
            at = tl.load(columns + tl.load(shape + 4) + here, mask=inside, other=0)
        x = tl.abs(tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32))
        u = tl.load(unit_at + unit, mask=inside, other=0.0)
        whole += x
        left += tl.where(kept_of(u, unit, value, cut) & inside, x, 0.0)
    n = across * w
    r = (tl.sum(left) / n + 1e-6) / (tl.sum(whole) / n + 1e-6)
    tl.store(scales + row, 1.01 / (r + 0.01))


@triton.jit
def row_lengths(
    parameters, thetas, by, owners, firsts, shapes, columns, lengths,
    DTYPE: tl.constexpr, INLINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σw² and Σθ² of every row of the matrices for which `by` is not 0; parameters hold w."""
    row = tl.program_id(0)
    which = tl.load(owners + row)
    if tl.load(by + which) != 0.0:
        mine = (row - tl.load(firsts + which)).to(tl.int32)
        shape = shapes + 5 * which
        n = tl.load(shape + 1) * tl.load(shape + 2)
        begin = mine * tl.load(shape + 3)
        theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + begin
        weight_at = tl.load(parameters + which).to(tl.pointer_type(DTYPE)) + begin
        whole = tl.zeros((BLOCK,), tl.float32)
        left = tl.zeros((BLOCK,), tl.float32)
        for i in range(0, n, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < n
            at = here
            if not INLINE:
                at = tl.load(columns + tl.load(shape + 4) + here, mask=inside, other=0)
            x = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(weight_at + at, mask=inside, other=0.0).to(tl.float32)
            whole += x * x
            left += w * w
        tl.store(lengths + 2 * row, tl.sum(left))
        tl.store(lengths + 2 * row + 1, tl.sum(whole))


@triton.jit
def band_shares(lengths, bands, owners, by, shares, ROWS: tl.constexpr):
    """So much of ‖w‖/‖θ‖ of every band of units as `by` says of its target, 0 for all."""
    band = tl.program_id(0)
    times = tl.load(by + tl.load(owners + band)).to(tl.float32)
    first = tl.load(bands + 2 * band)
    h = tl.load(bands + 2 * band + 1)
    whole = tl.zeros((ROWS,), tl.float32)
    left = tl.zeros((ROWS,), tl.float32)
    if times != 0.0:
        for i in range(0, h, ROWS):
            here = i + tl.arange(0, ROWS)
            left += tl.load(lengths + 2 * (first + here), mask=here < h, other=0.0)
            whole += tl.load(lengths + 2 * (first + here) + 1, mask=here < h, other=0.0)
    tl.store(shares + band, share_of(tl.sum(left), tl.sum(whole), times))


@triton.jit
def band_scales(scales, bands, found, ROWS: tl.constexpr):
    """The mean over the rows of each band of units; `bands` has its first row and how many it has."""
    band = tl.program_id(0)
    first = tl.load(bands + 2 * band)
    h = tl.load(bands + 2 * band + 1)
    total = tl.zeros((ROWS,), tl.float32)
    for i in range(0, h, ROWS):
        here = i + tl.arange(0, ROWS)
        total += tl.load(scales + first + here, mask=here < h, other=0.0)
    tl.store(found + band, tl.sum(total) / h)
