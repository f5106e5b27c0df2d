"""The passes of a top-k over the values: each reads them once, a piece per program."""

from __future__ import annotations

import triton
import triton.language as tl

from spartan.kernels.state import (
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
    SAMPLE,
    SAMPLES,
    SHIFT,
    SOFT_DONE,
    TIES,
    VALUE,
    WAITS,
    group_of,
    key_of,
    row_of,
)


@triton.jit
def value_at(address, start, here, inside, factor, ABS: tl.constexpr, DTYPE: tl.constexpr):
    """u of the entries `here` of a tensor."""
    at = address.to(tl.pointer_type(DTYPE)) + start + here
    if inside is None:
        x = tl.load(at).to(tl.float32)
    else:
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if ABS:
        x = tl.abs(x) * factor
    else:
        x = x + 0.0  # −0.0 becomes 0.0: they are equal, and must have one key
    return x


@triton.jit
def visit(
    address, start, here, inside, factor, counts, low, high, shift, hard, beta, center, offset, over, f, f2, least, most,
    SOFT: tl.constexpr, ABS: tl.constexpr, DTYPE: tl.constexpr, SUM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A block of a piece: its keys into bins, its mask into the sums. A WHOLE block needs no looking at its end."""
    if WHOLE:
        u = value_at(address, start, here, None, factor, ABS, DTYPE)
    else:
        u = value_at(address, start, here, inside, factor, ABS, DTYPE)
    if hard:
        key = key_of(u)
        higher = key > high
        within = (key >= low) & (key <= high)
        if not WHOLE:
            higher = higher & inside
            within = within & inside
        over += higher.to(tl.int32)
        # Few lie within, so that few meet; whole numbers add up to the same in any order.
        tl.atomic_add(counts + ((key - low) >> shift).to(tl.int32), 1, mask=within, sem="relaxed")
    if SOFT:
        m = tl.sigmoid((u.to(SUM) - center) * beta + offset)
        if WHOLE:
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
def one_pass(
    addresses, table, groups, factors, kinds, all_floats, all_ints, counts, above, sums,
    SOFT: tl.constexpr, ABS: tl.constexpr, DTYPE: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a piece: count its keys into bins, and sum its soft mask."""
    piece = tl.program_id(0)
    group = group_of(groups, piece)
    floats = all_floats + group * FLOATS
    ints = all_ints + group * INTS
    hard = tl.load(ints + HARD_DONE) == 0
    soft = False
    if SOFT:
        soft = (tl.load(ints + SOFT_DONE) == 0) & (tl.load(ints + WAITS) == 0)
    if hard | soft:
        which, start, length, _ = row_of(table, piece)
        if tl.load(ints + SAMPLES) == 1:
            length = tl.minimum(length, SAMPLE)
        address = tl.load(addresses + which)
        factor = tl.load(factors + piece)
        mine = counts + tl.load(kinds + piece) * BINS
        low = tl.load(ints + LOW).to(tl.uint32)
        high = tl.load(ints + HIGH).to(tl.uint32)
        shift = tl.load(ints + SHIFT).to(tl.uint32)
        beta = tl.load(floats + BETA).to(SUM)
        center = tl.load(floats + CENTER).to(SUM)
        offset = tl.load(floats + OFFSET).to(SUM)
        over = tl.zeros((BLOCK,), tl.int32)
        f = tl.zeros((BLOCK,), SUM)
        f2 = tl.zeros((BLOCK,), SUM)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        most = tl.full((BLOCK,), -float("inf"), tl.float32)
        whole = length // BLOCK * BLOCK
        for i in range(0, whole, BLOCK):
            here = i + tl.arange(0, BLOCK)
            over, f, f2, least, most = visit(
                address, start, here, here < length, factor, mine, low, high, shift, hard, beta, center, offset,
                over, f, f2, least, most, SOFT, ABS, DTYPE, SUM, True,
            )  # fmt: skip
        if whole < length:
            here = whole + tl.arange(0, BLOCK)
            over, f, f2, least, most = visit(
                address, start, here, here < length, factor, mine, low, high, shift, hard, beta, center, offset,
                over, f, f2, least, most, SOFT, ABS, DTYPE, SUM, False,
            )  # fmt: skip
        tl.store(above + piece, tl.sum(over))
        if SOFT:
            tl.store(sums + 4 * piece, tl.sum(f).to(tl.float64))
            tl.store(sums + 4 * piece + 1, tl.sum(f2).to(tl.float64))
            tl.store(sums + 4 * piece + 2, tl.min(least).to(tl.float64))
            tl.store(sums + 4 * piece + 3, tl.max(most).to(tl.float64))


@triton.jit
def count_ties(
    addresses, table, groups, factors, floats, ints, above,
    ABS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many entries of each piece equal the threshold, if only some of them fit."""
    piece = tl.program_id(0)
    group = group_of(groups, piece)
    if tl.load(ints + group * INTS + TIES) != 0:
        which, start, length, _ = row_of(table, piece)
        address = tl.load(addresses + which)
        factor = tl.load(factors + piece)
        value = tl.load(floats + group * FLOATS + VALUE).to(tl.float32)
        found = tl.zeros((BLOCK,), tl.int32)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            u = value_at(address, start, here, inside, factor, ABS, DTYPE)
            found += (inside & (u == value)).to(tl.int32)
        tl.store(above + piece, tl.sum(found))


@triton.jit
def cut_ties(
    addresses, table, limits, factors, all_floats, all_ints, above, costs,
    ABS: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The position, in every group, of the first entry equal to the threshold that no longer fits."""
    group = tl.program_id(0)
    floats = all_floats + group * FLOATS
    ints = all_ints + group * INTS
    if tl.load(ints + TIES) != 0:
        room = tl.load(floats + ROOM)
        before = tl.full((), 0.0, tl.float64)
        at = tl.full((), -1, tl.int64)
        spent = tl.full((), 0.0, tl.float64)
        first = tl.load(limits + 6 * group)
        last = tl.load(limits + 6 * group + 1)
        for j in range(0, last - first, ROWS):
            row = first + j + tl.arange(0, ROWS)
            there = row < last
            tied = tl.load(above + row, mask=there, other=0).to(tl.float64)
            tied = tied * tl.load(costs + row, mask=there, other=0.0)
            upto = before + tl.cumsum(tied)
            over = tl.min(tl.where(there & (upto > room), row, 2147483647)).to(tl.int64)
            if (at < 0) & (over < 2147483647):
                at = over
                spent = tl.sum(tl.where(row < over, tied, 0.0)) + before
            before += tl.sum(tied)
        if at >= 0:
            cost = tl.load(costs + at)
            fit = tl.floor((room - spent) / cost)
            which, start, length, position = row_of(table, at)
            address = tl.load(addresses + which)
            factor = tl.load(factors + at)
            value = tl.load(floats + VALUE).to(tl.float32)
            seen = tl.full((), 0, tl.int64)
            cut = tl.full((), -1, tl.int64)
            for i in range(0, length, BLOCK):
                here = i + tl.arange(0, BLOCK)
                inside = here < length
                tie = (inside & (value_at(address, start, here, inside, factor, ABS, DTYPE) == value)).to(tl.int64)
                number = seen + tl.cumsum(tie) - tie
                place = tl.min(tl.where((tie != 0) & (number.to(tl.float64) >= fit), here, 2147483647)).to(tl.int64)
                cut = tl.where((cut < 0) & (place < 2147483647), position + place, cut)
                seen += tl.sum(tie)
            tl.store(ints + CUT, cut)
            tl.store(floats + COST, tl.load(floats + COST) + spent + fit * cost)
