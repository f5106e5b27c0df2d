"""Moves θ and w in and out of the parameters: all targets in one launch, masks made on the way and never stored.

An address of 0 stands for a tensor that is left alone.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.ptx import LOG2E, logistic
from spartan.solvers.triton.state import (
    BETA,
    CENTER,
    CUT,
    FLOATS,
    INTS,
    OFFSET,
    VALUE,
    even_row_of,
    place_of,
    row_of,
    segment_of,
)


@triton.jit
def line_of(floats):
    """The present dual: sigmoid(β(u − center) + offset) = 1/(1 + 2^(slope·(u − center) + shift))."""
    slope = tl.load(floats + BETA) * -LOG2E
    shift = tl.load(floats + OFFSET) * -LOG2E
    return slope.to(tl.float32), tl.load(floats + CENTER).to(tl.float32), shift.to(tl.float32)


@triton.jit
def mask_of(u, slope, center, shift):
    """The soft mask."""
    return logistic((u - center) * slope + shift)


@triton.jit
def project(
    parameters, thetas, table, segments, factors, all_floats, all_ints,
    SOFT: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w = [kept] ⊙ θ, with SOFT [kept] ⊙ m ⊙ θ, into the parameters; exactly +0.0 where not kept."""
    piece = tl.program_id(0)
    which, start, length, position = even_row_of(table, piece, ALIGNED)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        segment = segment_of(segments, piece)
        floats = all_floats + segment * FLOATS
        factor = tl.load(factors + piece)
        theta_at = place_of(tl.load(thetas + which), start, DTYPE, ALIGNED)
        parameter_at = place_of(parameter, start, DTYPE, ALIGNED)
        value = tl.load(floats + VALUE).to(tl.float32)
        cut = tl.load(all_ints + segment * INTS + CUT) - position
        if SOFT:
            slope, center, shift = line_of(floats)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            theta = tl.load(theta_at + here, mask=inside, other=0.0).to(tl.float32)
            u = tl.abs(theta) * factor
            kept = (u > value) | ((u == value) & (here < cut))
            w = theta
            if SOFT:
                w = theta * mask_of(u, slope, center, shift).to(DTYPE).to(tl.float32)
            tl.store(parameter_at + here, tl.where(kept, w, 0.0).to(DTYPE), mask=inside)


@triton.jit
def project_stored(parameters, thetas, masks, table, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """w = [kept] ⊙ θ into the parameters, from masks of one byte an entry."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
        mask_at = tl.load(masks + which).to(tl.pointer_type(tl.int8)) + start
        parameter_at = parameter.to(tl.pointer_type(DTYPE)) + start
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            kept = tl.load(mask_at + here, mask=inside, other=0) != 0
            w = tl.load(theta_at + here, mask=kept, other=0.0)
            tl.store(parameter_at + here, w, mask=inside)


@triton.jit
def take(
    parameters, thetas, table, bad, numbers,
    FINE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """θ from the parameters, unless `bad` names a gradient. An entry that is not finite stays as it was."""
    piece = tl.program_id(0)
    which, start, length, _ = even_row_of(table, piece, ALIGNED)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        good = tl.load(bad) == FINE
        theta_at = place_of(tl.load(thetas + which), start, DTYPE, ALIGNED)
        parameter_at = place_of(parameter, start, DTYPE, ALIGNED)
        wrong = tl.zeros((BLOCK,), tl.int32)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            theta = tl.load(parameter_at + here, mask=inside, other=0.0)
            finite = tl.abs(theta.to(tl.float32)) < float("inf")
            wrong += (inside & (finite == 0)).to(tl.int32)
            if good:  # whole runs are stored: what stays as it was is read, and stored again
                was = tl.load(theta_at + here, mask=inside & (finite == 0), other=0.0)
                tl.store(theta_at + here, tl.where(finite, theta, was), mask=inside)
        if tl.sum(wrong) > 0:
            tl.atomic_min(bad + 1, tl.load(numbers + which))


@triton.jit
def put(parameters, thetas, table, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """θ into the parameters."""
    piece = tl.program_id(0)
    which, start, length, _ = even_row_of(table, piece, ALIGNED)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        theta_at = place_of(tl.load(thetas + which), start, DTYPE, ALIGNED)
        parameter_at = place_of(parameter, start, DTYPE, ALIGNED)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            tl.store(parameter_at + here, tl.load(theta_at + here, mask=inside), mask=inside)
