"""Writes which zeros of a tensor are −0.0: beside the code of the rest, in a mask or in gaps.

A weight that is multiplied by a mask becomes −0.0 where it was negative, so that half of the zeros of many models are.
Stored as kept values they would take 20 to 30 bits each; here they take a bit for every entry at most.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.files import codes
from spartan.files.format import as_bits

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASK = -1  # in the place of k: a mask, not gaps
# Below this fraction of the other kept values they are left among them: the map would save next to nothing.
WORTHWHILE = 0.25


@dataclass(frozen=True)
class Signs:
    """The map of the −0.0 of a tensor: their number, the parameter k of `gaps` (MASK: a mask), and the bytes."""

    count: int
    k: int
    data: Tensor


def split_signs(x: Tensor) -> tuple[Tensor, Signs] | None:
    """The tensor with +0.0 for −0.0, and their map; None if they are too few for one.

    Example:
        >>> x = torch.randn(4, 100) * (torch.arange(100) < 10)
        >>> plain, signs = split_signs(x)
        >>> torch.equal(join_signs(plain, signs).signbit(), x.signbit())
        True
    """
    if x.dtype not in DTYPES:
        return None
    negative = (x == 0) & x.signbit()
    count = int(torch.count_nonzero(negative))
    if count <= WORTHWHILE * int(torch.count_nonzero(x)):
        return None
    places, total = negative.reshape(-1).nonzero().squeeze(1), x.numel()
    size, k = codes.gaps_size(codes.gaps_of(places), total)
    plain = x.masked_fill(negative, 0.0)
    if codes.byte_count(total) <= size:
        return plain, Signs(count, MASK, codes.encode_mask(places, total))
    return plain, Signs(count, k, codes.encode_gaps(codes.gaps_of(places), k))


def join_signs(plain: Tensor, signs: Signs) -> Tensor:
    """The tensor of `split_signs`, in place; ValueError where the map is not one of zeros of the tensor."""
    flat = as_bits(plain).view(-1)
    if signs.k == MASK:
        places = codes.decode_mask(signs.data, flat.numel(), signs.count)
    else:
        places = codes.decode_gaps(signs.data, flat.numel(), signs.count, signs.k)
    if bool(flat.index_select(0, places).any()):  # a file has one reading
        raise ValueError("a sign is given to a value that is not zero")
    flat.index_fill_(0, places, torch.iinfo(flat.dtype).min)
    return plain


def check(item: object, dtype: torch.dtype) -> tuple[int, int, int]:
    """Number, k and bytes of the map that a header gives; ValueError if they cannot be those of one."""
    if not isinstance(item, list) or len(item) != 3 or not all(type(number) is int for number in item):
        raise ValueError("its signs have no such map")
    count, k, size = item
    if dtype not in DTYPES or count < 1 or size < 1 or not MASK <= k < 63:
        raise ValueError("its signs have no such map")
    return count, k, size
