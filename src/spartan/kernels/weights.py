"""θ and w in and out of the model's parameters: all targets in one launch, masks made on the way and never stored."""

from __future__ import annotations

import triton
import triton.language as tl

from spartan.kernels.state import BETA, CENTER, CUT, OFFSET, VALUE


@triton.jit
def mask_of(u, floats):
    """The soft mask at the present dual."""
    beta = tl.load(floats + BETA).to(tl.float32)
    center = tl.load(floats + CENTER).to(tl.float32)
    offset = tl.load(floats + OFFSET).to(tl.float32)
    return tl.sigmoid((u - center) * beta + offset)


@triton.jit
def project(
    parameters, thetas, table, factors, floats, ints,
    SOFT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w = [kept] ⊙ θ, with SOFT [kept] ⊙ m ⊙ θ, into the parameters; exactly +0.0 where not kept."""
    piece = tl.program_id(0)
    which = tl.load(table + 4 * piece)
    start = tl.load(table + 4 * piece + 1)
    length = tl.load(table + 4 * piece + 2)
    position = tl.load(table + 4 * piece + 3)
    factor = tl.load(factors + piece)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
    parameter_at = tl.load(parameters + which).to(tl.pointer_type(DTYPE)) + start
    value = tl.load(floats + VALUE).to(tl.float32)
    cut = tl.load(ints + CUT) - position
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        theta = tl.load(theta_at + here, mask=inside, other=0.0).to(tl.float32)
        u = tl.abs(theta) * factor
        kept = (u > value) | ((u == value) & (here < cut))
        w = theta
        if SOFT:
            w = theta * mask_of(u, floats).to(DTYPE).to(tl.float32)
        tl.store(parameter_at + here, tl.where(kept, w, 0.0).to(DTYPE), mask=inside)


@triton.jit
def take(parameters, thetas, table, bad, first, FINE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """θ from the parameters, unless `bad` names a gradient. An entry that is not finite stays as it was."""
    good = tl.load(bad) == FINE
    piece = tl.program_id(0)
    which = tl.load(table + 4 * piece)
    start = tl.load(table + 4 * piece + 1)
    length = tl.load(table + 4 * piece + 2)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
    parameter_at = tl.load(parameters + which).to(tl.pointer_type(DTYPE)) + start
    wrong = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        theta = tl.load(parameter_at + here, mask=inside, other=0.0)
        finite = tl.abs(theta.to(tl.float32)) < float("inf")
        wrong += (inside & (finite == 0)).to(tl.int32)
        if good:
            tl.store(theta_at + here, theta, mask=inside & finite)
    if tl.sum(wrong) > 0:
        tl.atomic_min(bad + 1, (first + which).to(tl.int32))


@triton.jit
def put(parameters, thetas, table, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """θ into the parameters."""
    piece = tl.program_id(0)
    which = tl.load(table + 4 * piece)
    start = tl.load(table + 4 * piece + 1)
    length = tl.load(table + 4 * piece + 2)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
    parameter_at = tl.load(parameters + which).to(tl.pointer_type(DTYPE)) + start
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        tl.store(parameter_at + here, tl.load(theta_at + here, mask=inside), mask=inside)
