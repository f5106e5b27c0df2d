"""Draws random numbers by a hash: each from its number and a key, in any order, alike on every device.

A generator draws one number after the other, which a CPU does with one thread.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The 32-bit hash "triple32" (Wellons, Prospecting for hash functions, 2018): what it shifts by, and its factors. Numbers
# and shifts are signed here, which takes fewer operations; each shift then loses a bit, and 31 are left.
SHIFTS = 17, 11, 15, 14
FACTORS = 0xED5AD4BB - (1 << 32), 0xAC4C1B51 - (1 << 32), 0x31848BAB


class Key(NamedTuple):
    """Which numbers are drawn: 64 bits, as two signed numbers. The first is where indices begin."""

    one: int
    two: int

    def joined(self, other: "Key") -> "Key":
        """Another key, made of two; `after` one of them is after that."""
        return Key(signed(self.one + other.one), self.two ^ other.two)

    def after(self, n: int) -> "Key":
        """The key by which index 0 has what n has by this one."""
        return Key(signed(self.one + n), self.two)


def key_of(*numbers: int) -> Key:
    """A key that looks nothing like those of other numbers."""
    x = hash(numbers) & (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = ((x ^ x >> shift) * factor) & (1 << 64) - 1
    x ^= x >> 31
    return Key(signed(x), signed(x >> 32))


def signed(number: int) -> int:
    """The last 32 bits of a number, as a signed one."""
    return (number & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)


def uniform(index: Tensor, key: Key, out: Tensor | None = None, room: Tensor | None = None) -> Tensor:
    """The numbers in (0, 1) of these indices under a key, each an odd multiple of 2⁻²⁴, of which float32 has all.

    Args:
        index: int32; beyond 2³² indices, and their numbers, repeat.
        key: which numbers.
        out: where to put them.
        room: int32, two rows as long as the index, for what is between.
    """
    x, high = torch.empty(2, *index.shape, dtype=torch.int32, device=index.device) if room is None else room
    torch.add(index, key.one, out=x)
    _fold(x, SHIFTS[0], high).mul_(FACTORS[0]).bitwise_xor_(key.two)
    _fold(x, SHIFTS[1], high).mul_(FACTORS[1])
    _fold(x, SHIFTS[2], high).mul_(FACTORS[2])
    _fold(x, SHIFTS[3], high).bitwise_right_shift_(8)
    found = torch.empty(index.shape, device=index.device) if out is None else out
    # 23 bits beside the exponent of 1 are a number in [1, 2).
    return torch.sub(x.bitwise_or_(0x3F800000).view(torch.float32), 1.0 - 2.0**-24, out=found)


def _fold(x: Tensor, shift: int, high: Tensor) -> Tensor:
    """x ← x xor x >> shift."""
    return x.bitwise_xor_(torch.bitwise_right_shift(x, shift, out=high))
