"""Moves θ, w and gradients once the mask is fixed: at the kept places only, all targets in one launch.

A program takes a piece of a target's memory, BLOCK entries at a time. `spans` tells, for every such block, which of the
kept entries lie in it: from where to where in the sorted list of their places. An address of 0 stands for a tensor that
is left alone.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.state import row_of


@triton.jit
def kept_in(spans, index, block, BLOCK: tl.constexpr, INDEX: tl.constexpr):
    """Numbers of the kept entries of a block, which of them there are, and their places in the target."""
    start = tl.load(spans + 2 * block)
    stop = tl.load(spans + 2 * block + 1)
    number = start + tl.arange(0, BLOCK)
    there = number < stop
    place = tl.load(index.to(tl.pointer_type(INDEX)) + number, mask=there, other=0).to(tl.int64)
    return number, there, place


@triton.jit
def spread(
    parameters, thetas, masks, indices, table, blocks, spans,
    WEIGHTS: tl.constexpr, DTYPE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """θ into the parameters where kept, and nothing else; with WEIGHTS w = θ · m, and zeros elsewhere."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE))
        mask_at = tl.load(masks + which).to(tl.pointer_type(DTYPE))
        parameter_at = parameter.to(tl.pointer_type(DTYPE))
        index = tl.load(indices + which)
        first = tl.load(blocks + piece)
        for i in range(0, length, BLOCK):
            number, there, place = kept_in(spans, index, first + i // BLOCK, BLOCK, INDEX)
            x = tl.load(theta_at + number, mask=there, other=0.0)
            if WEIGHTS:
                m = tl.load(mask_at + number, mask=there, other=0.0).to(tl.float32)
                x = (x.to(tl.float32) * m).to(DTYPE)
                here = i + tl.arange(0, BLOCK)
                tl.store(parameter_at + start + here, tl.zeros((BLOCK,), DTYPE), mask=here < length)
                tl.debug_barrier()  # the zeros first
            tl.store(parameter_at + place, x, mask=there)


@triton.jit
def collect(
    parameters, thetas, indices, table, blocks, spans, bad, numbers,
    FINE: tl.constexpr, DTYPE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """θ from the parameters where kept, unless `bad` names a gradient. What is not finite stays as it was."""
    piece = tl.program_id(0)
    which, _, length, _ = row_of(table, piece)
    parameter = tl.load(parameters + which)
    if parameter != 0:
        good = tl.load(bad) == FINE
        theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE))
        parameter_at = parameter.to(tl.pointer_type(DTYPE))
        index = tl.load(indices + which)
        first = tl.load(blocks + piece)
        wrong = tl.zeros((BLOCK,), tl.int32)
        for i in range(0, length, BLOCK):
            number, there, place = kept_in(spans, index, first + i // BLOCK, BLOCK, INDEX)
            theta = tl.load(parameter_at + place, mask=there, other=0.0)
            finite = tl.abs(theta.to(tl.float32)) < float("inf")
            wrong += (there & (finite == 0)).to(tl.int32)
            if good:
                tl.store(theta_at + number, theta, mask=there & finite)
        if tl.sum(wrong) > 0:
            tl.atomic_min(bad + 1, tl.load(numbers + which))


@triton.jit
def mask_gradients(
    grads, masks, indices, table, blocks, spans,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂L/∂θ = g · m where kept, zero elsewhere, in place."""
    piece = tl.program_id(0)
    which, start, length, _ = row_of(table, piece)
    grad = tl.load(grads + which)
    if grad != 0:
        mask_at = tl.load(masks + which).to(tl.pointer_type(DTYPE))
        grad_at = grad.to(tl.pointer_type(GRAD))
        index = tl.load(indices + which)
        first = tl.load(blocks + piece)
        for i in range(0, length, BLOCK):
            number, there, place = kept_in(spans, index, first + i // BLOCK, BLOCK, INDEX)
            g = tl.load(grad_at + place, mask=there, other=0.0).to(tl.float32)
            g = (g * tl.load(mask_at + number, mask=there, other=0.0).to(tl.float32)).to(GRAD)
            tl.debug_barrier()  # read before anything is overwritten
            here = i + tl.arange(0, BLOCK)
            tl.store(grad_at + start + here, tl.zeros((BLOCK,), GRAD), mask=here < length)
            tl.debug_barrier()
            tl.store(grad_at + place, g, mask=there)
