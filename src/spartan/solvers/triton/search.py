"""Searches for a top-k in one launch: the programs go over the values together, and meet between the passes.

All programs must be on the device at the same time: the launch is a cooperative one, of a few programs for every
multiprocessor (`topk.py`). In the interpreter one program does everything.

From a last solution every program works out by itself where the first pass looks, so that it begins at once; meanwhile
those that decide write it down. With one segment that is the last program, which has nothing to read: it waits for the
others, with all that it needs to know but for what they find.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.decide import decide, start
from spartan.solvers.triton.meeting import announce, arrive, hear, look_further, wait_for, with_ties
from spartan.solvers.triton.passes import count_ties, cut_ties, look
from spartan.solvers.triton.state import FLOATS, INTS, row_of

SHARE = tl.constexpr(
    6
)  # numbers of a row: the first piece of a program's share, the one past the last, the row of the first


@triton.jit
def search(
    addresses, table, shares, owners, limits, factors, kinds, costs, prices, fine_costs, fine_prices,
    floats, ints, counts, above, sums, arrived, segments, most, tol,
    SOFT: tl.constexpr, COLD: tl.constexpr, SAMPLED: tl.constexpr, ABS: tl.constexpr, POWER: tl.constexpr,
    DTYPE: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every segment's threshold and soft mask, in at most so many passes."""
    programs = tl.num_programs(0)
    decided = arrived + 1
    share = shares + SHARE * tl.program_id(0)
    first = tl.load(share)
    last = tl.load(share + 1)
    first_which, first_start, first_length, _ = row_of(share + 2, 0)
    heard = tl.load(decided, volatile=True)
    mine = programs - 1 - tl.program_id(0)  # the last programs decide
    deciders = tl.minimum(segments, programs)
    for segment in range(mine, segments, programs):
        own = limits + 6 * segment
        if tl.load(own) < tl.load(own + 1):
            start(floats + segment * FLOATS, ints + segment * INTS, SOFT, COLD, SAMPLED, OTHERS=not COLD)
    if COLD:
        wait_for(arrived, arrive(arrived))
    elif mine < segments:
        tl.debug_barrier()  # a thread wrote what all read
    left = tl.full((), 1, tl.int64)
    news = tl.full((), 0, tl.int64)
    passes = 0
    while (left > 0) & (passes < most):
        opening = (passes == 0) & (not COLD)
        for piece in range(first, last):
            which = first_which
            begin = first_start
            length = first_length
            if piece > first:
                which, begin, length, _ = row_of(table, piece)
            look(
                piece, which, begin, length, opening, addresses, owners, factors, kinds, floats, ints, counts, above, sums,
                SOFT, ABS, POWER, DTYPE, SUM, BLOCK,
            )  # fmt: skip
        goal = arrive(arrived)
        if mine < segments:
            further = tl.full((), 0, tl.int32)
            ties = tl.full((), 0, tl.int32)
            for segment in range(mine, segments, programs):
                own = limits + 6 * segment
                if tl.load(own) < tl.load(own + 1):
                    more, tied = decide(
                        floats + segment * FLOATS, ints + segment * INTS, own, counts, above, sums, costs, prices,
                        fine_costs, fine_prices, tol, SOFT, ROWS, arrived=arrived, goal=goal, first=opening,
                    )  # fmt: skip
                    further += more
                    ties += tied
            announce(decided, further, ties)
        news = hear(decided, heard, deciders)
        heard += news
        left = look_further(news)
        passes += 1
    if with_ties(news) > 0:
        for piece in range(first, last):
            count_ties(
                piece, addresses, table, owners, factors, floats, ints, above, ABS, POWER, DTYPE, BLOCK
            )  # fmt: skip
        wait_for(arrived, arrive(arrived))
        for segment in range(mine, segments, programs):
            own = limits + 6 * segment
            cut_ties(
                addresses, table, own, factors, floats + segment * FLOATS, ints + segment * INTS, above, costs,
                fine_costs, ABS, POWER, DTYPE, ROWS, BLOCK,
            )  # fmt: skip
