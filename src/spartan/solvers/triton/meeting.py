"""Has the programs of a launch wait for each other: all for all, the deciding ones for all, and all for what these decide.

All programs must be on the device at the same time, or those that wait would keep the others out. Counts only ever grow, by
as much in every launch. A wait for all is a way to the memory and back; who only wants to know that nothing is left to do
reads it from the count itself, and is done.
"""

import triton
import triton.language as tl

# What a count of decisions is made of: decisions, segments that look further, and segments whose ties are to be cut.
FURTHER_BIT = tl.constexpr(24)
TIES_BIT = tl.constexpr(44)
DECISIONS = tl.constexpr((1 << 24) - 1)
SEGMENTS = tl.constexpr((1 << 20) - 1)


@triton.jit
def arrive(arrived):
    """Say that this program has come here; the count when all have."""
    tl.debug_barrier()
    programs = tl.num_programs(0).to(tl.int64)
    now = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    return (now + programs - 1) // programs * programs


@triton.jit
def wait_for(arrived, goal):
    """Wait until so many programs have arrived: what they wrote before, this one reads after."""
    now = tl.atomic_add(arrived, 0, sem="acquire")
    while now < goal:
        now = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def announce(decided, further, ties):
    """Say that this program has decided: how many of its segments look further, and how many have ties to be cut."""
    tl.debug_barrier()
    word = (further.to(tl.int64) << FURTHER_BIT) + (ties.to(tl.int64) << TIES_BIT) + 1
    tl.atomic_add(decided, word, sem="release")


@triton.jit
def hear(decided, before, deciders):
    """Wait until so many more have decided; how much the count has grown.

    What they wrote is only to be read where something is left to do.
    """
    news = tl.load(decided, volatile=True) - before
    while (news & DECISIONS) < deciders:
        news = tl.load(decided, volatile=True) - before
    if news != deciders:
        tl.atomic_add(decided, 0, sem="acquire")
        tl.debug_barrier()
    return news


@triton.jit
def look_further(news):
    """How many segments look further, by what was heard."""
    return (news >> FURTHER_BIT) & SEGMENTS


@triton.jit
def with_ties(news):
    """How many segments have more units equal to their threshold than fit."""
    return news >> TIES_BIT
