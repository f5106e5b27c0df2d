"""Says where the first pass of a top-k looks, from what the last one found: whoever wants to know works it out alike."""

import triton
import triton.language as tl

from spartan.solvers.triton.state import (
    BETA,
    CENTER,
    HIGHEST,
    LAST_BETA,
    MOVED,
    NEAR,
    NEAREST,
    OFFSET,
    SOFT_K,
    SOLVED,
    TOTAL,
    VALUE,
    K,
    key_of,
)


@triton.jit
def opening(floats, ints, SOFT: tl.constexpr, COLD: tl.constexpr):
    """Where the first pass of a segment looks, from its last solution: all of it is read, nothing is written.

    Whether the threshold is sought, and between which keys, the last one among them or −1; whether the soft mask is, at
    which line, whether it is flat, and whether it starts from its last line.
    """
    everything = tl.load(floats + K) == float("inf")
    value = tl.load(floats + VALUE)
    moved = tl.load(ints + MOVED)
    solved = (tl.load(ints + SOLVED) != 0) & (not COLD)
    known = solved & (value > -float("inf"))
    key = tl.where(known, key_of(value.to(tl.float32)).to(tl.int64), -1)
    width = tl.where(2 * moved <= NEAREST, NEAREST, tl.minimum(4 * moved, NEAR)).to(tl.int64)
    low = tl.where(known, tl.maximum(key - width, 0), 0)
    high = tl.where(known, tl.minimum(key + width - 1, HIGHEST), HIGHEST)
    soft = tl.full((), 0, tl.int1)
    flat = tl.full((), 1, tl.int1)
    warm = tl.full((), 0, tl.int1)
    center = tl.full((), 0.0, tl.float64)
    offset = tl.full((), 0.0, tl.float64)
    if SOFT:
        beta = tl.load(floats + BETA)
        share = tl.load(floats + SOFT_K) / tl.load(floats + TOTAL)
        last = tl.load(floats + LAST_BETA)
        middle = tl.load(floats + CENTER)
        before = tl.load(floats + OFFSET)
        flat = (beta == 0.0) | (share <= 0.0) | (share >= 1.0)
        warm = solved & (last > 0.0) & (before > -float("inf")) & (before < float("inf"))
        center = tl.where(warm, middle, 0.0)
        offset = tl.where(warm, before * beta / tl.where(last > 0.0, last, 1.0), 0.0)  # the same τ under the new β
        soft = (flat == 0) & (warm | everything)
    return everything == 0, key, low, high, soft, center, offset, flat, warm
