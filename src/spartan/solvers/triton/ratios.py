"""Makes a₁/a₂ of every segment, how far its budget pulls gradients back, from what its pieces summed.

Where weights lie in shards the sums go around first: `tell_pulls`, then `told_ratios`.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.gradient import RATIO, RESIDUAL
from spartan.solvers.triton.state import FLOATS, SOFT_K


@triton.jit
def has_gradient(grads, limits):
    """Not 0 where any tensor of a segment has a gradient."""
    first_tensor = tl.load(limits + 4)
    found = tl.full((), 0, tl.int64)
    for i in range(0, tl.load(limits + 5) - first_tensor):
        found = found | tl.load(grads + first_tensor + i)
    return found


@triton.jit
def pulls_of(limits, counted, sums, costs, ROWS: tl.constexpr):
    """a₁ = Σ g·θ·m(1−m), a₂ = Σ c·m(1−m) and Σ c·m of a segment, from its pieces; `counted` has 0 for those left out."""
    first = tl.load(limits)
    last = tl.load(limits + 1)
    a1 = tl.zeros((ROWS,), tl.float64)
    a2 = tl.zeros((ROWS,), tl.float64)
    f = tl.zeros((ROWS,), tl.float64)
    for i in range(0, last - first, ROWS):
        row = first + i + tl.arange(0, ROWS)
        there = row < last
        if counted is not None:
            there = there & (tl.load(counted + row, mask=there, other=0) != 0)
        cost = tl.load(costs + row, mask=there, other=0.0)
        a1 += tl.load(sums + 4 * row, mask=there, other=0.0)
        a2 += tl.load(sums + 4 * row + 1, mask=there, other=0.0) * cost
        f += tl.load(sums + 4 * row + 2, mask=there, other=0.0) * cost
    return tl.sum(a1), tl.sum(a2), tl.sum(f)


@triton.jit
def divide(a1, a2, f, floats, out):
    """a₁/a₂ of a segment, and how far its mask is off its budget."""
    tl.store(out + RATIO, tl.where(a2 != 0.0, a1 / tl.where(a2 != 0.0, a2, 1.0), 0.0))
    k = tl.load(floats + SOFT_K)
    # The budget is 0 where there is nothing to miss, and until the first solution after a checkpoint.
    tl.store(out + RESIDUAL, tl.where(k > 0.0, tl.abs(f - k) / tl.where(k > 0.0, k, 1.0), 0.0))


@triton.jit
def ratios(grads, limits, sums, costs, floats, out, ROWS: tl.constexpr):
    """a₁/a₂ = Σ g·θ·m(1−m) / Σ c·m(1−m) of every segment that has a gradient; 0 where the mask is flat."""
    segment = tl.program_id(0)
    if has_gradient(grads, limits + 6 * segment) != 0:
        a1, a2, f = pulls_of(limits + 6 * segment, None, sums, costs, ROWS)
        divide(a1, a2, f, floats + segment * FLOATS, out + 2 * segment)
    else:  # what is learned there still asks
        tl.store(out + 2 * segment + RATIO, 0.0)


@triton.jit
def tell_pulls(grads, limits, counted, sums, costs, told, ROWS: tl.constexpr):
    """What a segment's ratio is made of on this process, to be added up over all; the last tells of a gradient."""
    segment = tl.program_id(0)
    a1, a2, f = pulls_of(limits + 6 * segment, counted, sums, costs, ROWS)
    mine = told + 4 * segment
    tl.store(mine, a1)
    tl.store(mine + 1, a2)
    tl.store(mine + 2, f)
    tl.store(mine + 3, (has_gradient(grads, limits + 6 * segment) != 0).to(tl.float64))


@triton.jit
def told_ratios(told, floats, out):
    """The same ratios from what all processes told."""
    segment = tl.program_id(0)
    mine = told + 4 * segment
    if tl.load(mine + 3) > 0.0:
        a1, a2, f = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2)
        divide(a1, a2, f, floats + segment * FLOATS, out + 2 * segment)
    else:
        tl.store(out + 2 * segment + RATIO, 0.0)
