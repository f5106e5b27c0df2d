"""Writes which of n units are kept: one bit each, or the gaps between them in a Golomb–Rice code.

Bits are packed into bytes without loops: eight at a time, the first in the lowest place.

The bound. To say which c of n units are kept takes log₂ C(n, c) ≤ n·H(c/n) bits, H(p) = −p log₂ p − (1−p) log₂(1−p),
and their values take c·b bits.

Gaps. Kept units i₀ < i₁ < … are written as the numbers of dropped ones before each, g_j = i_j − i_{j−1} − 1, and each g
as its k low bits and the quotient ⌊g/2^k⌋ in unary, zeros and a closing one (Golomb, 1966; Rice, 1979). The low bits of
all gaps come first, one row of bits for each of the k places, then all quotients. That costs

    c(k + 1) + Σ ⌊g/2^k⌋  ≤  c(k + 1) + (n − c)/2^k   bits,

which is at most 0.56 bits per kept unit over the bound however the units lie (2.4% of the whole with 16-bit values,
1.4% with 32-bit ones), and 0.02 to 0.12 bits if they are dropped at random. From about 40% kept on, the mask is
smaller.
"""

import math

import torch
from torch import Tensor

# Eight bytes of 0 or 1, read as one integer and multiplied by Σᵢ 2^(56 − 7i), have byte i's bit at place i of the top
# byte: place 8i + (56 − 7i) = 56 + i, and no two of the 64 products share a place, so that nothing carries.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))
_SPREAD = torch.tensor([sum((byte >> i & 1) << (8 * i) for i in range(8)) for byte in range(256)], device="cpu")


def entropy(n: int, kept: int) -> float:
    """n·H(kept/n) in bits.

    Example:
        >>> entropy(1000, 500)
        1000.0
    """
    if not 0 < kept < n:
        return 0.0
    p = kept / n
    return -n * (p * math.log2(p) + (1 - p) * math.log2(1 - p))


def bound(n: int, kept: int, bits: int) -> float:
    """The information bound in bits: kept·bits + n·H(kept/n)."""
    return kept * bits + entropy(n, kept)


def byte_count(bits: int) -> int:
    """Bytes that hold so many bits."""
    return (bits + 7) // 8


def pack(flags: Tensor) -> Tensor:
    """Flags (bool or 0/1 in uint8, flat) as bytes; the last byte is filled with zeros.

    Example:
        >>> pack(torch.tensor([True, False, True, False, False, False, False, False, True])).tolist()
        [5, 1]
    """
    flags = flags.view(torch.uint8)
    padded = flags.new_zeros(8 * byte_count(flags.numel()))
    padded[: flags.numel()] = flags
    return ((padded.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack(data: Tensor, count: int) -> Tensor:
    """The `count` flags of `pack`, as bool; ValueError if a bit behind the last one is set: a file has one reading."""
    flags = _SPREAD.index_select(0, data.int()).view(torch.bool)
    if bool(flags[count:].any()):
        raise ValueError("bits are set behind the last one")
    return flags[:count]


def pack_numbers(numbers: Tensor, width: int) -> Tensor:
    """Numbers below 2^width as `width` rows of bits: row j holds bit j of all of them."""
    rows = [pack((numbers >> j & 1).bool()) for j in range(width)]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


def unpack_numbers(data: Tensor, count: int, width: int) -> Tensor:
    """The numbers of `pack_numbers`; ValueError if a bit beyond the last number is set."""
    numbers = torch.zeros(count, dtype=torch.int64)
    for j, row in enumerate(data.reshape(width, byte_count(count)) if width else ()):
        numbers |= unpack(row, count).long() << j
    return numbers


def encode_mask(kept: Tensor, n: int) -> Tensor:
    """The mask of n units, those at `kept` set.

    Example:
        >>> data = encode_mask(torch.tensor([1, 2, 9]), 12)
        >>> decode_mask(data, 12, 3).tolist()
        [1, 2, 9]
    """
    return pack(torch.zeros(n, dtype=torch.uint8).index_fill_(0, kept, 1))


def decode_mask(data: Tensor, n: int, count: int) -> Tensor:
    """The positions of `encode_mask`; ValueError where the bytes are not the mask of `count` of n units."""
    if data.numel() != byte_count(n):
        raise ValueError(f"a mask of {n} units takes {byte_count(n)} bytes, not {data.numel()}")
    kept = unpack(data, n).nonzero().squeeze(1)
    if kept.numel() != count:
        raise ValueError(f"the mask keeps {kept.numel()} units, and there are values for {count}")
    return kept


def gaps_of(kept: Tensor) -> Tensor:
    """How many dropped units lie before each kept one."""
    gaps = kept.clone()
    gaps[1:] -= kept[:-1] + 1
    return gaps


def gaps_size(gaps: Tensor, n: int) -> tuple[int, int]:
    """Bytes of the smallest gap code, and the k that gives it.

    The best k is near log₂ of the mean gap; where gaps vary more than at random it is smaller.
    """
    count = gaps.numel()
    if not count:
        return 0, 0
    middle = max(n // count, 1).bit_length() - 1
    # Far smaller ones lose as well, but a mask that is dense in places and empty elsewhere can want one.
    tried = range(max(0, middle - 3), middle + 2)
    return min((count_bytes(count, k, int((gaps >> k).sum())), k) for k in tried)


def count_bytes(count: int, k: int, quotients: int) -> int:
    """Bytes of the code: k rows of low bits, and the unary part."""
    return k * byte_count(count) + byte_count(count + quotients)


def encode_gaps(gaps: Tensor, k: int) -> Tensor:
    """The gap code with parameter k.

    Example:
        >>> data = encode_gaps(gaps_of(torch.tensor([3, 70, 71])), 5)
        >>> decode_gaps(data, 100, 3, 5).tolist()
        [3, 70, 71]
    """
    if not gaps.numel():
        return torch.empty(0, dtype=torch.uint8)
    ones = torch.cumsum((gaps >> k) + 1, 0) - 1
    unary = torch.zeros(int(ones[-1]) + 1, dtype=torch.uint8).index_fill_(0, ones, 1)
    return torch.cat([pack_numbers(gaps & ((1 << k) - 1), k), pack(unary)])


def decode_gaps(data: Tensor, n: int, count: int, k: int) -> Tensor:
    """The positions of `encode_gaps`; ValueError where the bytes are not the code of `count` of n units."""
    if not 0 <= k < 63 or count << k >= 1 << 62:
        raise ValueError(f"k = {k} cannot be the parameter of a code of {count} gaps")
    low_bytes = k * byte_count(count)
    if data.numel() < low_bytes:
        raise ValueError(f"{count} gaps with k = {k} take more than {data.numel()} bytes")
    flags = unpack(data[low_bytes:], 8 * data[low_bytes:].numel())
    ones = flags.nonzero().squeeze(1)
    if ones.numel() != count:
        raise ValueError(f"the code has {ones.numel()} gaps, and there are values for {count}")
    last = int(ones[-1]) if count else -1
    if flags.numel() != 8 * byte_count(last + 1):
        raise ValueError("there are bytes behind the last gap")
    if (last + 1 - count) << k > n:  # before shifting: nothing below can overflow
        raise ValueError(f"the gaps add up to more than {n} units")
    gaps = (gaps_of(ones) << k) | unpack_numbers(data[:low_bytes], count, k)
    kept = torch.cumsum(gaps + 1, 0) - 1
    if count and int(kept[-1]) >= n:
        raise ValueError(f"the gaps add up to more than {n} units")
    return kept
