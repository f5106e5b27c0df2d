"""Passes over the values of a top-k: what a program does with every piece of its share."""

import triton
import triton.language as tl

from spartan.solvers.triton.moves import read, read_whole
from spartan.solvers.triton.powers import value_of
from spartan.solvers.triton.ptx import LOG2E, count_places, logistic
from spartan.solvers.triton.state import (
    BETA,
    BINS,
    CENTER,
    COST,
    CUT,
    FLOATS,
    HARD_DONE,
    HIGH,
    INTS,
    LOW,
    OFFSET,
    ROOM,
    ROOM_FINE,
    SAMPLE,
    SAMPLES,
    SHIFT,
    SOFT_DONE,
    TIES,
    VALUE,
    WAITS,
    row_of,
    segment_of,
    signed,
    signed_key_of,
)

STRETCH = tl.constexpr(4)  # blocks at a time, where one program looks for something in a piece


@triton.jit
def rank_of(x, factor, ABS: tl.constexpr, POWER: tl.constexpr):
    """u of an entry: of a weight factor · |ψ|."""
    if ABS:
        u = tl.abs(value_of(x, POWER)) * factor
    else:
        u = x.to(tl.float32) + 0.0  # −0.0 becomes 0.0: they are equal, and must have one key
    return u


@triton.jit
def visit(
    u, inside, counts, low, span, shift, top, hard, soft, slope, center, offset, over, f, f2, least, most,
    SOFT: tl.constexpr, ABS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """A block of a piece: its keys into bins, its mask into the sums. A whole block needs no looking at its end."""
    if hard:
        key = u.to(tl.int32, bitcast=True) if ABS else signed_key_of(u)
        place = (key - low).to(tl.uint32, bitcast=True)
        higher = key > top
        if inside is not None:
            higher = higher & inside
            place = tl.where(inside, place, 4294967295)  # no key is that high
        over += higher.to(tl.int32)
        count_places(counts, place, span, shift)
    if SOFT and soft:
        m = logistic((u.to(SUM) - center) * slope + offset)
        if inside is None:
            least = tl.minimum(least, u)
            most = tl.maximum(most, u)
        else:
            m = tl.where(inside, m, 0.0)
            least = tl.minimum(least, tl.where(inside, u, float("inf")))
            most = tl.maximum(most, tl.where(inside, u, -float("inf")))
        f += m
        f2 += m * m
    return over, f, f2, least, most


@triton.jit
def look(
    piece, addresses, table, segments, factors, kinds, all_floats, all_ints, counts, above, sums,
    SOFT: tl.constexpr, ABS: tl.constexpr, POWER: tl.constexpr, DTYPE: tl.constexpr, SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a piece: count its keys into bins, and sum its soft mask."""
    segment = segment_of(segments, piece)
    floats = all_floats + segment * FLOATS
    ints = all_ints + segment * INTS
    # Read before it is asked whether they are needed: one way to the memory and back instead of three.
    which, start, length, _ = row_of(table, piece)
    factor = tl.load(factors + piece)
    kind = tl.load(kinds + piece)
    hard = tl.load(ints + HARD_DONE) == 0
    soft = False
    if SOFT:
        soft = (tl.load(ints + SOFT_DONE) == 0) & (tl.load(ints + WAITS) == 0)
    sampled = tl.load(ints + SAMPLES) == 1
    address = tl.load(addresses + which)
    if hard | soft:
        if sampled:
            length = tl.minimum(length, SAMPLE)
        mine = counts + kind * BINS
        low = signed(tl.load(ints + LOW))
        top = signed(tl.load(ints + HIGH))
        span = (top - low).to(tl.uint32, bitcast=True)
        shift = tl.load(ints + SHIFT).to(tl.uint32)
        # sigmoid(β(u − center) + offset) = 1/(1 + 2^x)
        slope = (tl.load(floats + BETA) * -LOG2E).to(SUM)
        center = tl.load(floats + CENTER).to(SUM)
        offset = (tl.load(floats + OFFSET) * -LOG2E).to(SUM)
        over = tl.zeros((BLOCK,), tl.int32)
        f = tl.zeros((BLOCK,), SUM)
        f2 = tl.zeros((BLOCK,), SUM)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        most = tl.full((BLOCK,), -float("inf"), tl.float32)
        whole = length // BLOCK * BLOCK
        following = tl.zeros((BLOCK,), DTYPE)
        if whole > 0:
            following = read_whole(address, start, 0, DTYPE, BLOCK)
        for i in range(0, whole, BLOCK):
            u = rank_of(following, factor, ABS, POWER)
            # The next block is on its way while this one is worked on; after the last, it once more.
            following = read_whole(address, start, tl.minimum(i + BLOCK, whole - BLOCK), DTYPE, BLOCK)
            over, f, f2, least, most = visit(
                u, None, mine, low, span, shift, top, hard, soft, slope, center, offset, over, f, f2, least, most,
                SOFT, ABS, SUM,
            )  # fmt: skip
        if whole < length:
            here = whole + tl.arange(0, BLOCK)
            u = rank_of(read(address, start, whole, length, DTYPE, BLOCK), factor, ABS, POWER)
            over, f, f2, least, most = visit(
                u, here < length, mine, low, span, shift, top, hard, soft, slope, center, offset,
                over, f, f2, least, most, SOFT, ABS, SUM,
            )  # fmt: skip
        if hard:
            tl.store(above + piece, tl.sum(over))
        if soft:
            tl.store(sums + 4 * piece, tl.sum(f).to(tl.float64))
            tl.store(sums + 4 * piece + 1, tl.sum(f2).to(tl.float64))
            tl.store(sums + 4 * piece + 2, tl.min(least).to(tl.float64))
            tl.store(sums + 4 * piece + 3, tl.max(most).to(tl.float64))


@triton.jit
def count_ties(
    piece, addresses, table, segments, factors, floats, ints, above,
    ABS: tl.constexpr, POWER: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many entries of a piece equal the threshold, if only some of them fit."""
    segment = segment_of(segments, piece)
    if tl.load(ints + segment * INTS + TIES) != 0:
        which, start, length, _ = row_of(table, piece)
        address = tl.load(addresses + which)
        factor = tl.load(factors + piece)
        value = tl.load(floats + segment * FLOATS + VALUE).to(tl.float32)
        found = tl.zeros((BLOCK,), tl.int32)
        for i in range(0, length, BLOCK):
            inside = i + tl.arange(0, BLOCK) < length
            u = rank_of(read(address, start, i, length, DTYPE, BLOCK), factor, ABS, POWER)
            found += (inside & (u == value)).to(tl.int32)
        tl.store(above + piece, tl.sum(found))


@triton.jit
def cut_ties(
    addresses, table, limits, factors, floats, ints, above, costs, fine_costs,
    ABS: tl.constexpr, POWER: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The position, in a segment, of the first entry equal to the threshold that no longer fits."""
    if tl.load(ints + TIES) != 0:
        room = tl.load(floats + ROOM)
        before = tl.full((), 0.0, tl.float64)
        piece = tl.full((), -1, tl.int64)
        spent = tl.full((), 0.0, tl.float64)
        SPLIT: tl.constexpr = fine_costs is not None
        fine_room = tl.full((), 0.0, tl.float64)
        if SPLIT:
            fine_room = tl.load(floats + ROOM_FINE)
        fine_before = tl.full((), 0.0, tl.float64)
        fine_spent = tl.full((), 0.0, tl.float64)
        first = tl.load(limits)
        last = tl.load(limits + 1)
        for j in range(0, last - first, ROWS):
            row = first + j + tl.arange(0, ROWS)
            there = row < last
            number = tl.load(above + row, mask=there, other=0).to(tl.float64)
            cost = tl.load(costs + row, mask=there, other=0.0)
            if SPLIT:
                fine = tl.load(fine_costs + row, mask=there, other=0.0)
                fine_tied = number * fine
                cost -= fine
            tied = number * cost
            upto = before + tl.cumsum(tied)
            if SPLIT:
                too_much = (upto - room) + (fine_before + tl.cumsum(fine_tied) - fine_room) > 0.0
            else:
                too_much = upto > room
            over = tl.min(tl.where(there & too_much, row, 2147483647)).to(tl.int64)
            if (piece < 0) & (over < 2147483647):
                piece = over
                spent = tl.sum(tl.where(row < over, tied, 0.0)) + before
                if SPLIT:
                    fine_spent = tl.sum(tl.where(row < over, fine_tied, 0.0)) + fine_before
            before += tl.sum(tied)
            if SPLIT:
                fine_before += tl.sum(fine_tied)
        if piece >= 0:
            cost = tl.load(costs + piece)
            fit = tl.floor((room - spent + (fine_room - fine_spent)) / cost)
            if SPLIT:  # the quotient rounds
                fine = tl.load(fine_costs + piece)
                left = (room - spent - fit * (cost - fine)) + (fine_room - fine_spent - fit * fine)
                fit += tl.where(left < 0.0, -1.0, tl.where(left >= cost, 1.0, 0.0))
            which, start, length, position = row_of(table, piece)
            address = tl.load(addresses + which)
            factor = tl.load(factors + piece)
            value = tl.load(floats + VALUE).to(tl.float32)
            # First the stretch of the piece in which it lies, then the place there.
            seen = tl.full((), 0.0, tl.float64)
            stretch = tl.full((), 0, tl.int64)
            found = tl.full((), 0.0, tl.float64)
            while (stretch < length) & (seen + found <= fit):
                seen += found
                inside = stretch + tl.arange(0, STRETCH * BLOCK) < length
                u = rank_of(read(address, start, stretch, length, DTYPE, STRETCH * BLOCK), factor, ABS, POWER)
                found = tl.sum((inside & (u == value)).to(tl.int32)).to(tl.float64)
                stretch += STRETCH * BLOCK
            cut = tl.full((), -1, tl.int64)
            for i in range(tl.maximum(stretch - STRETCH * BLOCK, 0), tl.minimum(stretch, length), BLOCK):
                here = i + tl.arange(0, BLOCK)
                inside = here < length
                u = rank_of(read(address, start, i, length, DTYPE, BLOCK), factor, ABS, POWER)
                tie = (inside & (u == value)).to(tl.int32)
                number = seen + (tl.cumsum(tie) - tie).to(tl.float64)
                place = tl.min(tl.where((tie != 0) & (number >= fit), here, 2147483647)).to(tl.int64)
                cut = tl.where((cut < 0) & (place < 2147483647), position + place, cut)
                seen += tl.sum(tie).to(tl.float64)
            # Where not even the first of them fits, none is kept: then the cut is 0.
            tl.store(ints + CUT, tl.where((spent + fine_spent == 0.0) & (fit == 0.0), 0, cut))
            tl.store(floats + COST, tl.load(floats + COST) + spent + fine_spent + fit * cost)
