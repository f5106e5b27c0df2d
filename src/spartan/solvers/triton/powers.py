"""Makes ψ = sign(θ)·|θ|^α of θ, which methods see in its place: the same to the bit wherever kernels need it.

A threshold is one of these values, so that the search and all who compare with it must agree. POWER is α; with 1 nothing
is done.
"""

import triton
import triton.language as tl

from spartan.solvers.triton.moves import read, write
from spartan.solvers.triton.state import row_of


@triton.jit
def raised(size, EXPONENT: tl.constexpr):
    """|θ| to a positive power."""
    if EXPONENT == 1.0:
        return size
    else:
        return tl.where(size == 0.0, 0.0, tl.exp2(EXPONENT * tl.log2(tl.where(size == 0.0, 1.0, size))))


@triton.jit
def value_of(theta, POWER: tl.constexpr):
    """ψ of weights as they lie in memory: in float32, rounded to what their own type can hold."""
    x = theta.to(tl.float32)
    if POWER == 1.0:
        return x
    else:
        size = tl.abs(x)
        if POWER == 2.0:
            psi = x * size
        else:
            psi = raised(size, POWER)
            psi = tl.where(x < 0.0, -psi, psi)
        return psi.to(theta.dtype).to(tl.float32)


@triton.jit
def slope_of(theta, POWER: tl.constexpr):
    """dψ/dθ = α|θ|^(α−1)."""
    return POWER * raised(tl.abs(theta.to(tl.float32)), POWER - 1.0)


@triton.jit
def values(thetas, found, table, DTYPE: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """ψ of every weight."""
    which, start, length, _ = row_of(table, tl.program_id(0))
    theta = tl.load(thetas + which)
    to = tl.load(found + which)
    for i in range(0, length, BLOCK):
        psi = value_of(read(theta, start, i, length, DTYPE, BLOCK), POWER)
        write(to, start, i, length, psi, DTYPE, BLOCK)


@triton.jit
def times_slope(
    grads, thetas, table, GRAD: tl.constexpr, DTYPE: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr
):
    """∂L/∂θ = dψ/dθ · ∂L/∂ψ, in place."""
    which, start, length, _ = row_of(table, tl.program_id(0))
    grad = tl.load(grads + which)
    if grad != 0:
        theta = tl.load(thetas + which)
        for i in range(0, length, BLOCK):
            slope = slope_of(read(theta, start, i, length, DTYPE, BLOCK), POWER)
            g = read(grad, start, i, length, GRAD, BLOCK).to(tl.float32)
            write(grad, start, i, length, g * slope, GRAD, BLOCK)
