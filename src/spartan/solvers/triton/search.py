"""Searches for a top-k in one launch: the programs go over the values together, and meet between the passes.

All programs must be on the device at the same time, or those that wait would keep the others out: the launch is a
cooperative one, of a few programs for every multiprocessor (`topk.py`). In the interpreter one program does everything.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.decide import decide, start
from spartan.solvers.triton.passes import count_ties, cut_ties, look
from spartan.solvers.triton.state import FLOATS, HARD_DONE, INTS, SOFT_DONE, TIES


@triton.jit
def meet(arrived):
    """Wait for all programs: what any of them wrote before, each of them reads after."""
    tl.debug_barrier()
    programs = tl.num_programs(0).to(tl.int64)
    now = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    goal = (now + programs - 1) // programs * programs  # it only ever grows, by as many as there are each time
    while now < goal:
        now = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def left_to_do(ints, limits, segments, SEGMENTS: tl.constexpr):
    """How many segments still look for their threshold or their mask."""
    segment = tl.arange(0, SEGMENTS)
    there = segment < segments
    first = tl.load(limits + 6 * segment, mask=there, other=0)
    last = tl.load(limits + 6 * segment + 1, mask=there, other=0)
    there = first < last
    hard = tl.load(ints + segment * INTS + HARD_DONE, mask=there, other=1)
    soft = tl.load(ints + segment * INTS + SOFT_DONE, mask=there, other=1)
    return tl.sum(((hard == 0) | (soft == 0)).to(tl.int32))


@triton.jit
def with_ties(ints, segments, SEGMENTS: tl.constexpr):
    """How many segments have more units equal to their threshold than fit."""
    segment = tl.arange(0, SEGMENTS)
    return tl.sum(tl.load(ints + segment * INTS + TIES, mask=segment < segments, other=0))


@triton.jit
def search(
    addresses, table, shares, owners, limits, factors, kinds, costs, prices, fine_costs, fine_prices,
    floats, ints, counts, above, sums, arrived, segments, most, tol,
    SOFT: tl.constexpr, COLD: tl.constexpr, SAMPLED: tl.constexpr, ABS: tl.constexpr, POWER: tl.constexpr,
    DTYPE: tl.constexpr, SUM: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every segment's threshold and soft mask, in at most so many passes."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    first = tl.load(shares + program)
    last = tl.load(shares + program + 1)
    for segment in range(program, segments, programs):
        own = limits + 6 * segment
        if tl.load(own) < tl.load(own + 1):
            start(floats + segment * FLOATS, ints + segment * INTS, SOFT, COLD, SAMPLED)
    meet(arrived)
    left = left_to_do(ints, limits, segments, SEGMENTS)
    passes = 0
    while (left > 0) & (passes < most):
        for piece in range(first, last):
            look(
                piece, addresses, table, owners, factors, kinds, floats, ints, counts, above, sums,
                SOFT, ABS, POWER, DTYPE, SUM, BLOCK,
            )  # fmt: skip
        meet(arrived)
        for segment in range(program, segments, programs):
            own = limits + 6 * segment
            if tl.load(own) < tl.load(own + 1):
                decide(
                    floats + segment * FLOATS, ints + segment * INTS, own, counts, above, sums, costs, prices,
                    fine_costs, fine_prices, tol, SOFT, ROWS,
                )  # fmt: skip
        meet(arrived)
        left = left_to_do(ints, limits, segments, SEGMENTS)
        passes += 1
    if with_ties(ints, segments, SEGMENTS) > 0:
        for piece in range(first, last):
            count_ties(
                piece, addresses, table, owners, factors, floats, ints, above, ABS, POWER, DTYPE, BLOCK
            )  # fmt: skip
        meet(arrived)
        for segment in range(program, segments, programs):
            own = limits + 6 * segment
            cut_ties(
                addresses, table, own, factors, floats + segment * FLOATS, ints + segment * INTS, above, costs,
                fine_costs, ABS, POWER, DTYPE, ROWS, BLOCK,
            )  # fmt: skip
