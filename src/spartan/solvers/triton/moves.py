"""Reads and writes pieces of tensors: 16 bytes at a time wherever they lie so, each tensor and each block for itself.

A tensor is given by its address, a piece of it by where it starts, which is a multiple of 1,024, and by its length. A
block of a piece moves wide if the tensor's address is a multiple of 16 and no entry of the block lies in the last few
beyond a multiple of 8. Both are known to the whole program, so that all its threads go the same way.
"""

import triton
import triton.language as tl


@triton.jit
def wide_at(address, start, DTYPE: tl.constexpr):
    """Where a piece begins, as the compiler is to know it: at a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + start // 1024 * 1024


@triton.jit
def narrow_at(address, start, DTYPE: tl.constexpr):
    """Where a piece begins, anywhere."""
    return address.to(tl.pointer_type(DTYPE)) + start


@triton.jit
def moves_wide(address, i, length, BLOCK: tl.constexpr):
    """Whether a block moves 16 bytes at a time."""
    return (address % 16 == 0) & (tl.minimum(i + BLOCK, length) <= length // 8 * 8)


@triton.jit
def read(address, start, i, length, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """The block of a piece from its i-th entry on; zeros beyond its end."""
    here = i + tl.arange(0, BLOCK)
    if moves_wide(address, i, length, BLOCK):
        x = tl.load(wide_at(address, start, DTYPE) + here, mask=here < length // 8 * 8, other=0.0)
    else:
        x = tl.load(narrow_at(address, start, DTYPE) + here, mask=here < length, other=0.0)
    return x


@triton.jit
def read_whole(address, start, i, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """The same of a block that ends within its piece."""
    here = i + tl.arange(0, BLOCK)
    if address % 16 == 0:
        x = tl.load(wide_at(address, start, DTYPE) + here)
    else:
        x = tl.load(narrow_at(address, start, DTYPE) + here)
    return x


@triton.jit
def write(address, start, i, length, x, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """A block into a piece, from its i-th entry to its end."""
    here = i + tl.arange(0, BLOCK)
    if moves_wide(address, i, length, BLOCK):
        tl.store(wide_at(address, start, DTYPE) + here, x.to(DTYPE), mask=here < length // 8 * 8)
    else:
        tl.store(narrow_at(address, start, DTYPE) + here, x.to(DTYPE), mask=here < length)
