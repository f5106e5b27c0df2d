"""Gradients for w into gradients for θ, in place, all targets in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from spartan.kernels.state import BETA, CUT, SOFT_K, VALUE
from spartan.kernels.weights import mask_of

# What `pull` leaves for `through_mask`.
RATIO = tl.constexpr(0)  # a₁/a₂
RESIDUAL = tl.constexpr(1)  # |Σ c m − k| / k: a late look at how well the mask was solved


@triton.jit
def pull(
    grads, thetas, table, factors, floats, sums, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of each piece: Σ g·θ·m(1−m), Σ m(1−m) and Σ m."""
    piece = tl.program_id(0)
    which = tl.load(table + 4 * piece)
    start = tl.load(table + 4 * piece + 1)
    length = tl.load(table + 4 * piece + 2)
    factor = tl.load(factors + piece)
    theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
    grad = tl.load(grads + which)
    grad_at = grad.to(tl.pointer_type(GRAD)) + start
    there = grad != 0
    a1 = tl.zeros((BLOCK,), tl.float32)
    a2 = tl.zeros((BLOCK,), tl.float32)
    f = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, length, BLOCK):
        here = i + tl.arange(0, BLOCK)
        inside = here < length
        theta = tl.load(theta_at + here, mask=inside, other=0.0).to(tl.float32)
        g = tl.zeros((BLOCK,), tl.float32)
        if there:
            g = tl.load(grad_at + here, mask=inside, other=0.0).to(tl.float32)
        m = mask_of(tl.abs(theta) * factor, floats)
        slope = tl.where(inside, m - m * m, 0.0)
        a1 += g * theta * slope
        a2 += slope
        f += tl.where(inside, m, 0.0)
    one = tl.sum(a1)
    # Its own gradient says that it is not finite; the others', which a loss scaler may have found good, stay so.
    one = tl.where(tl.abs(one) < float("inf"), one, 0.0)
    tl.store(sums + 4 * piece, one.to(tl.float64))
    tl.store(sums + 4 * piece + 1, tl.sum(a2).to(tl.float64))
    tl.store(sums + 4 * piece + 2, tl.sum(f).to(tl.float64))


@triton.jit
def ratio(sums, costs, pieces, floats, out, ROWS: tl.constexpr):
    """a₁/a₂ = Σ g·θ·m(1−m) / Σ c·m(1−m); 0 where the mask is flat."""
    a1 = tl.zeros((ROWS,), tl.float64)
    a2 = tl.zeros((ROWS,), tl.float64)
    f = tl.zeros((ROWS,), tl.float64)
    for first in range(0, pieces, ROWS):
        row = first + tl.arange(0, ROWS)
        there = row < pieces
        cost = tl.load(costs + row, mask=there, other=0.0)
        a1 += tl.load(sums + 4 * row, mask=there, other=0.0)
        a2 += tl.load(sums + 4 * row + 1, mask=there, other=0.0) * cost
        f += tl.load(sums + 4 * row + 2, mask=there, other=0.0) * cost
    below = tl.sum(a2)
    tl.store(out + RATIO, tl.where(below != 0.0, tl.sum(a1) / tl.where(below != 0.0, below, 1.0), 0.0))
    k = tl.load(floats + SOFT_K)
    # The budget is 0 where there is nothing to miss, and until the first solution after a checkpoint.
    tl.store(out + RESIDUAL, tl.where(k > 0.0, tl.abs(tl.sum(f) - k) / tl.where(k > 0.0, k, 1.0), 0.0))


@triton.jit
def through_mask(
    grads, thetas, table, factors, costs, floats, out,
    GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂L/∂θ = m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − c·a₁/a₂)."""
    piece = tl.program_id(0)
    which = tl.load(table + 4 * piece)
    grad = tl.load(grads + which)
    if grad != 0:
        start = tl.load(table + 4 * piece + 1)
        length = tl.load(table + 4 * piece + 2)
        factor = tl.load(factors + piece)
        back = (tl.load(out + RATIO) * tl.load(costs + piece)).to(tl.float32)
        scale = tl.load(floats + BETA).to(tl.float32) * factor
        theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
        grad_at = grad.to(tl.pointer_type(GRAD)) + start
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            theta = tl.load(theta_at + here, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(grad_at + here, mask=inside, other=0.0).to(tl.float32)
            m = mask_of(tl.abs(theta) * factor, floats)
            sign = tl.where(theta > 0.0, 1.0, tl.where(theta < 0.0, -1.0, 0.0))
            moved = sign * scale * (m - m * m) * (g * theta - back)
            tl.store(grad_at + here, (m * g + moved).to(GRAD), mask=inside)


@triton.jit
def where_kept(
    grads, thetas, table, factors, floats, ints, GRAD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """∂L/∂θ = [kept] ⊙ g."""
    piece = tl.program_id(0)
    which = tl.load(table + 4 * piece)
    grad = tl.load(grads + which)
    if grad != 0:
        start = tl.load(table + 4 * piece + 1)
        length = tl.load(table + 4 * piece + 2)
        position = tl.load(table + 4 * piece + 3)
        factor = tl.load(factors + piece)
        theta_at = tl.load(thetas + which).to(tl.pointer_type(DTYPE)) + start
        grad_at = grad.to(tl.pointer_type(GRAD)) + start
        value = tl.load(floats + VALUE).to(tl.float32)
        cut = tl.load(ints + CUT) - position
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            inside = here < length
            u = tl.abs(tl.load(theta_at + here, mask=inside, other=0.0).to(tl.float32)) * factor
            kept = (u > value) | ((u == value) & (here < cut))
            g = tl.load(grad_at + here, mask=inside, other=0.0)
            tl.store(grad_at + here, tl.where(kept, g, 0.0), mask=inside)


@triton.jit
def check(grads, table, bad, first, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """The first tensor whose gradient is not finite is named in `bad`."""
    piece = tl.program_id(0)
    which = tl.load(table + 4 * piece)
    grad = tl.load(grads + which)
    if grad != 0:
        grad_at = grad.to(tl.pointer_type(GRAD)) + tl.load(table + 4 * piece + 1)
        length = tl.load(table + 4 * piece + 2)
        wrong = tl.zeros((BLOCK,), tl.int32)
        for i in range(0, length, BLOCK):
            here = i + tl.arange(0, BLOCK)
            g = tl.load(grad_at + here, mask=here < length, other=0.0).to(tl.float32)
            wrong += ((tl.abs(g) < float("inf")) == 0).to(tl.int32)
        if tl.sum(wrong) > 0:
            tl.atomic_min(bad, (first + which).to(tl.int32))


@triton.jit
def clear(grads, table, bad, FINE: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """No gradient at all, if one was not finite: the optimizer's state stays clean."""
    if tl.load(bad) != FINE:
        piece = tl.program_id(0)
        grad = tl.load(grads + tl.load(table + 4 * piece))
        if grad != 0:
            grad_at = grad.to(tl.pointer_type(GRAD)) + tl.load(table + 4 * piece + 1)
            length = tl.load(table + 4 * piece + 2)
            for i in range(0, length, BLOCK):
                here = i + tl.arange(0, BLOCK)
                tl.store(grad_at + here, tl.zeros((BLOCK,), GRAD), mask=here < length)
