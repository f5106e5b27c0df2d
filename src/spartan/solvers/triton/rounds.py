"""Searches for a top-k over values that lie in shards: a launch a pass, and between two of them processes add up.

Every process passes over its own values (`read`) and says what it found (`tell`): how many units of each price lie
above the bins and in each of them, as whole numbers, and for every segment the sums of its soft mask and, to be
maximised, both ends. Added up over the processes, these tell each of them the same, and so all decide alike
(`decide_all`).

Where only some of the units equal to a threshold fit, the position of the first that does not is found in the same way
(`read_ties`, `tell`, `narrow_cut`): positions are those in the whole weights. A process's own units stand in the same
order, so that one number a segment says which of those it keeps (`cut_here`).
"""

import triton
import triton.language as tl

from spartan.solvers.triton import moves
from spartan.solvers.triton.adding import added_up, told_within
from spartan.solvers.triton.decide import decide, start
from spartan.solvers.triton.passes import look, rank_of
from spartan.solvers.triton.state import (
    BINS,
    COST,
    FITTING,
    FLOATS,
    INTS,
    LOW,
    ROOM,
    ROOM_FINE,
    SHIFT,
    TIES,
    VALUE,
    WHOLE_CUT,
    row_of,
    segment_of,
)

# Of each target: the position of its first unit in its segment, the columns of its grid of units, and of the rows and
# the columns that lie here the first and how many.
GRID = tl.constexpr(6)


@triton.jit
def begin(
    floats, ints, SOFT: tl.constexpr, COLD: tl.constexpr, SAMPLED: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Every segment, from its last solution or from nothing."""
    segment = tl.program_id(0)
    start(floats + segment * FLOATS, ints + segment * INTS, SOFT, COLD, SAMPLED, N)
    tl.store(ints + segment * INTS + WHOLE_CUT, 0)


@triton.jit
def read(
    addresses, table, segments, factors, kinds, floats, ints, counts, above, sums,
    SOFT: tl.constexpr, ABS: tl.constexpr, POWER: tl.constexpr, DTYPE: tl.constexpr, SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A pass over what lies here."""
    look(
        tl.program_id(0), addresses, table, segments, factors, kinds, floats, ints, counts, above, sums,
        SOFT, ABS, POWER, DTYPE, SUM, BLOCK,
    )  # fmt: skip


@triton.jit
def tell(
    limits, kinds, counts, above, sums, costs, told, moments, ends,
    SOFT: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What the pass found here, to be added up; of the ends, the smallest with its sign turned, the largest counts."""
    segment = tl.program_id(0)
    first = tl.load(limits + 6 * segment)
    last = tl.load(limits + 6 * segment + 1)
    bins = tl.arange(0, N)
    for kind in range(tl.load(limits + 6 * segment + 2), tl.load(limits + 6 * segment + 3)):
        row = told + kind * (N + 1)
        number = tl.load(counts + kind * BINS + bins)
        tl.debug_barrier()  # a thread may write where another reads: all have read, then
        tl.store(counts + kind * BINS + bins, 0)  # for the next pass
        tl.store(row + 1 + bins, number.to(tl.float64))
        over = tl.zeros((ROWS,), tl.int64)
        for i in range(0, last - first, ROWS):
            piece = first + i + tl.arange(0, ROWS)
            mine = (piece < last) & (tl.load(kinds + piece, mask=piece < last, other=-1) == kind)
            over += tl.load(above + piece, mask=mine, other=0)
        tl.store(row, tl.sum(over).to(tl.float64))
    if SOFT:
        _, _, f, d, lows, highs = added_up(first, last, above, sums, costs, None, SOFT, ROWS)
        tl.store(moments + 2 * segment, tl.sum(f))
        tl.store(moments + 2 * segment + 1, tl.sum(d))
        tl.store(ends + 2 * segment, -tl.min(lows))
        tl.store(ends + 2 * segment + 1, tl.max(highs))


@triton.jit
def decide_all(
    floats, ints, limits, prices, fine_prices, told, moments, ends, tol, SOFT: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """What all processes found of every segment, and where the next pass looks."""
    segment = tl.program_id(0)
    decide(
        floats + segment * FLOATS, ints + segment * INTS, limits + 6 * segment, None, None, None, None, prices, None,
        fine_prices, tol, SOFT, 1, told, moments + 2 * segment, ends + 2 * segment, N,
    )  # fmt: skip


@triton.jit
def begin_cut(ints, shift):
    """Units equal to a threshold are sought in bins of 2^shift positions, from the first on."""
    own = ints + tl.program_id(0) * INTS
    tl.store(own + LOW, 0)
    tl.store(own + SHIFT, shift)
    tl.store(own + FITTING, 0)


@triton.jit
def read_ties(
    addresses, table, segments, factors, kinds, floats, ints, counts, above, grids,
    FIRST: tl.constexpr, ABS: tl.constexpr, POWER: tl.constexpr, DTYPE: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the units of a piece that equal the threshold into bins of positions. The FIRST time tells which have any."""
    piece = tl.program_id(0)
    segment = segment_of(segments, piece)
    own = ints + segment * INTS
    wanted = tl.load(own + TIES) != 0
    if not FIRST:
        wanted = wanted & (tl.load(above + piece) > 0)
    if wanted:
        which, begins, length, _ = row_of(table, piece)
        address = tl.load(addresses + which)
        factor = tl.load(factors + piece)
        value = tl.load(floats + segment * FLOATS + VALUE).to(tl.float32)
        mine = counts + tl.load(kinds + piece) * BINS
        low = tl.load(own + LOW)
        shift = tl.load(own + SHIFT)
        grid = grids + GRID * which
        wide = tl.load(grid + 1)
        columns = tl.load(grid + 5)
        corner = tl.load(grid) + tl.load(grid + 2) * wide + tl.load(grid + 4)
        number = tl.full((), 0, tl.int32)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            u = rank_of(moves.read(address, begins, i, length, DTYPE, BLOCK), factor, ABS, POWER)
            tie = inside & (u == value)
            found = tl.sum(tie.to(tl.int32))
            if found > 0:
                index = begins + here
                row = index // columns
                place = (corner + row * wide + index - row * columns - low) >> shift
                tl.atomic_add(mine + place, 1, mask=tie & (place >= 0) & (place < N), sem="relaxed")
                number += found
        if FIRST:
            tl.store(above + piece, number)


@triton.jit
def narrow_cut(floats, ints, limits, prices, fine_prices, told, BITS: tl.constexpr, N: tl.constexpr):
    """Which bin of positions holds the first unit equal to the threshold that does not fit; what lies before it does."""
    segment = tl.program_id(0)
    own = ints + segment * INTS
    if tl.load(own + TIES) != 0:
        state = floats + segment * FLOATS
        first_kind = tl.load(limits + 6 * segment + 2)
        last_kind = tl.load(limits + 6 * segment + 3)
        bins = tl.arange(0, N)
        cost_of, fine_of, number_in = told_within(told, prices, fine_prices, first_kind, last_kind, N)
        room = tl.load(state + ROOM)
        if fine_prices is not None:
            fine_room = tl.load(state + ROOM_FINE)
            too_much = (tl.cumsum(cost_of) - room) + (tl.cumsum(fine_of) - fine_room) > 0.0
        else:
            too_much = tl.cumsum(cost_of) > room
        bin = tl.min(tl.where(too_much, bins, N)).to(tl.int64)
        spent = tl.sum(tl.where(bins < bin, cost_of, 0.0))
        tl.store(state + ROOM, room - spent)
        if fine_prices is not None:
            fine_spent = tl.sum(tl.where(bins < bin, fine_of, 0.0))
            tl.store(state + ROOM_FINE, fine_room - fine_spent)
            spent += fine_spent
        tl.store(state + COST, tl.load(state + COST) + spent)
        fitting = tl.load(own + FITTING) + tl.sum(tl.where(bins < bin, number_in, 0))
        shift = tl.load(own + SHIFT)
        low = tl.load(own + LOW) + (bin << shift)
        tl.store(own + FITTING, fitting)
        tl.store(own + LOW, low)
        tl.store(own + SHIFT, tl.maximum(shift - BITS, 0))
        if shift == 0:  # where not even the first of them fits, none is kept: then the cut is 0
            tl.store(own + WHOLE_CUT, tl.where(fitting > 0, low, 0))


@triton.jit
def count_marked(masks, starts, table, found, BLOCK: tl.constexpr):
    """How many units of each piece a mask of one byte a unit has."""
    piece = tl.program_id(0)
    which, begins, length, _ = row_of(table, piece)
    at = masks + tl.load(starts + which) + begins
    number = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        number += (tl.load(at + here, mask=here < length, other=0) != 0).to(tl.int32)
    tl.store(found + piece, tl.sum(number).to(tl.int64))


@triton.jit
def cut_here(cuts, step, out, out_step, owners, grids, targets, ROWS: tl.constexpr):
    """How many units of each segment that lie here stand before its cut."""
    segment = tl.program_id(0)
    cut = tl.load(cuts + segment * step)
    found = tl.zeros((ROWS,), tl.int64)
    for i in range(0, targets, ROWS):
        target = i + tl.arange(0, ROWS)
        mine = (target < targets) & (tl.load(owners + target, mask=target < targets, other=-1) == segment)
        grid = grids + GRID * target
        wide = tl.load(grid + 1, mask=mine, other=1)
        rows = tl.load(grid + 3, mask=mine, other=0)
        columns = tl.load(grid + 5, mask=mine, other=0)
        before = tl.maximum(cut - tl.load(grid, mask=mine, other=0), 0)
        down = before // wide
        right = before - down * wide - tl.load(grid + 4, mask=mine, other=0)
        row = down - tl.load(grid + 2, mask=mine, other=0)
        whole = tl.minimum(tl.maximum(row, 0), rows) * columns
        rest = tl.minimum(tl.maximum(right, 0), columns)
        found += tl.where(mine, whole + tl.where((row >= 0) & (row < rows), rest, 0), 0)
    tl.store(out + segment * out_step, tl.sum(found))
