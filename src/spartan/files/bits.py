"""Packs bits into bytes without loops: eight at a time, the first in the lowest place."""

from __future__ import annotations

import torch
from torch import Tensor

# Eight bytes of 0 or 1, read as one integer and multiplied by Σᵢ 2^(56 − 7i), have byte i's bit at place i of the top
# byte: place 8i + (56 − 7i) = 56 + i, and no two of the 64 products share a place, so that nothing carries.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))
_SPREAD = torch.tensor([sum((byte >> i & 1) << (8 * i) for i in range(8)) for byte in range(256)], device="cpu")


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


def unpack(data: Tensor) -> Tensor:
    """The flags of `pack`, as bool, eight for every byte."""
    return _SPREAD.index_select(0, data.int()).view(torch.bool)


def pack_numbers(numbers: Tensor, width: int) -> Tensor:
    """Numbers below 2^width as `width` rows of bits: row j holds bit j of all of them."""
    rows = [pack((numbers >> j & 1).bool()) for j in range(width)]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


def unpack_numbers(data: Tensor, count: int, width: int) -> Tensor:
    """The numbers of `pack_numbers`; ValueError if a bit beyond the last number is set."""
    numbers = torch.zeros(count, dtype=torch.int64)
    for j, row in enumerate(data.reshape(width, byte_count(count)) if width else ()):
        flags = unpack(row)
        check_padding(flags, count)
        numbers |= flags[:count].long() << j
    return numbers


def check_padding(flags: Tensor, count: int) -> None:
    """Refuse bits after the last one that counts: a file has one reading."""
    if bool(flags[count:].any()):
        raise ValueError("bits are set behind the last one")
