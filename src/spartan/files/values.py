"""Writes kept values in a code: trained weights use few of their exponents, and most of them use two or three.

A float is a sign, an exponent and a mantissa. Signs and mantissas are close to random and are stored as they are.
Exponents are not: the weights that pruning keeps lie between its threshold and a few times that. Numbered by how often
they occur, they go into the Golomb–Rice code of `codes`, at 1.5 to 3 bits instead of 8. So a file can be smaller than
the information bound, which takes values for random bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.files.codes import byte_count, count_bytes, decode_gaps, encode_gaps, gaps_of, pack_numbers, unpack_numbers
from spartan.files.format import as_bits

# Bits of mantissa and of exponent.
FIELDS = {torch.float32: (23, 8), torch.bfloat16: (7, 8), torch.float16: (10, 5)}
_HEADER_BYTES = 24  # of the numbers in the header, besides the exponents


@dataclass(frozen=True)
class CodedValues:
    """Values in the code: their exponents in order of how often they occur, the code's parameter k, and the bytes."""

    exponents: tuple[int, ...]
    k: int
    data: Tensor


def encode_values(values: Tensor) -> CodedValues | None:
    """Flat values in the code; None if that is not smaller than they are.

    Example:
        >>> values = torch.randn(10_000).clamp(min=0.5)
        >>> coded = encode_values(values)
        >>> round(8 * coded.data.numel() / 10_000, 1), coded.exponents
        (25.2, (126, 127, 128, 129))
        >>> torch.equal(decode_values(coded, torch.float32, 10_000), values)
        True
    """
    if values.dtype not in FIELDS or not values.numel():
        return None
    mantissa, exponent = FIELDS[values.dtype]
    count, bits = values.numel(), as_bits(values).int()
    found = (bits >> mantissa) & ((1 << exponent) - 1)
    counts = torch.bincount(found, minlength=1 << exponent)
    order = counts.argsort(descending=True, stable=True)[: int(torch.count_nonzero(counts))]
    often, numbers = counts[order], torch.arange(order.numel())
    size, k = min((count_bytes(count, k, int(((numbers >> k) * often).sum())), k) for k in range(4))
    if size + _low_size(values.dtype, count) + _HEADER_BYTES + 4 * order.numel() >= values.nbytes:
        return None
    number_of = torch.zeros(1 << exponent, dtype=torch.int64).index_copy_(0, order, numbers)
    sign = (bits >> (mantissa + exponent)) & 1
    low = (bits & ((1 << mantissa) - 1)) | (sign << mantissa)
    whole, rest = divmod(mantissa + 1, 8)
    parts = [
        encode_gaps(number_of[found], k),
        low.view(torch.uint8).reshape(count, 4)[:, :whole].reshape(-1),
        pack_numbers(low >> 8 * whole, rest),
    ]
    return CodedValues(tuple(order.tolist()), k, torch.cat(parts))


def decode_values(coded: CodedValues, dtype: torch.dtype, count: int) -> Tensor:
    """The values of `encode_values`; ValueError where the bytes are not the code of `count` of them."""
    mantissa, exponent = FIELDS[dtype]
    table = torch.tensor(coded.exponents)
    split = coded.data.numel() - _low_size(dtype, count)  # where the exponents' code ends
    if split < 0:
        raise ValueError(f"{count} values take more than {coded.data.numel()} bytes")
    # A number counts as the gap before the next one, so that Σ (number + 1) units hold them all.
    units = count * len(coded.exponents)
    numbers = gaps_of(decode_gaps(coded.data[:split], units, count, coded.k))
    if count and int(numbers.max()) >= len(coded.exponents):
        raise ValueError("a value has an exponent that is not listed")
    whole, rest = divmod(mantissa + 1, 8)
    bytes_of = torch.zeros(count, 4, dtype=torch.uint8)
    bytes_of[:, :whole] = coded.data[split : split + count * whole].reshape(count, whole)
    low = bytes_of.view(torch.int32).reshape(-1)
    low |= (unpack_numbers(coded.data[split + count * whole :], count, rest) << 8 * whole).int()
    sign = (low >> mantissa) << (mantissa + exponent)
    bits = sign | (table[numbers].int() << mantissa) | (low & ((1 << mantissa) - 1))
    return bits.to(torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)


def check(exponents: object, k: object, dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """The exponents and the parameter that a header gives; ValueError if they cannot be those of the dtype."""
    limit = 1 << FIELDS[dtype][1] if dtype in FIELDS else 0
    if type(k) is not int or not 0 <= k < 4 or not isinstance(exponents, list) or len(exponents) > limit:
        raise ValueError("its values have no such code")
    numbers = all(type(e) is int and 0 <= e < limit for e in exponents)
    if not exponents or not numbers or len(set(exponents)) < len(exponents):
        raise ValueError("its exponents are none")
    return tuple(exponents), k


def _low_size(dtype: torch.dtype, count: int) -> int:
    """Bytes of the signs and mantissas."""
    whole, rest = divmod(FIELDS[dtype][0] + 1, 8)
    return count * whole + rest * byte_count(count)
