"""Writes which n of every m are kept (N:M sparsity), as the number of the choice among all C(m, n).

Choices are numbered in the order of `itertools.combinations`. t numbers make one word, Σ aᵢ C(m, n)ⁱ, of as many bits
as that needs: for 2:4 17 numbers in 44 bits, 2.588 bits a group where log₂ 6 = 2.585 and a mask takes 4.
"""

import itertools
import math
from functools import lru_cache

import torch
from torch import Tensor

from spartan.files.codes import byte_count, pack_numbers, unpack_numbers

LARGEST_M = 16  # the tables have 2^m rows


def check(n: int, m: int) -> None:
    """Refuse what has no code."""
    if not 1 <= n < m <= LARGEST_M:
        raise ValueError(f"{n}:{m} has no code: 1 <= n < m <= {LARGEST_M} is needed")


# All pairs fit, in 8 MiB: a file that goes through them again and again does not make them anew.
@lru_cache(maxsize=128)
def _choices(n: int, m: int) -> Tensor:
    """The positions of every choice [C, n]."""
    return torch.tensor(list(itertools.combinations(range(m), n)))


@lru_cache(maxsize=8)
def _covered(n: int, m: int) -> Tensor:
    """For every mask of m bits, the first choice that covers it (−1: none).

    Example:
        >>> _covered(2, 4)[[0b0000, 0b0001, 0b1000, 0b1100, 0b0111]].tolist()
        [0, 0, 2, 5, -1]
    """
    choices = _choices(n, m)
    number_of = torch.full((1 << m,), -1, dtype=torch.int64)
    number_of[(1 << choices).sum(1)] = torch.arange(choices.shape[0])
    # In the order of combinations, the first one that covers a mask fills it up with the lowest places.
    full = torch.arange(1 << m)
    missing = n - sum((full >> i) & 1 for i in range(m))
    for i in range(m):
        add = (missing > 0) & ((full >> i) & 1 == 0)
        full, missing = full + (add.long() << i), missing - add.long()
    return number_of[full]


@lru_cache(maxsize=32)
def word(n: int, m: int) -> tuple[int, int]:
    """Numbers in a word and its bits, at most 62: the pair that wastes least.

    Example:
        >>> word(2, 4), word(1, 4)
        ((17, 44), (1, 2))
    """
    choices = math.comb(m, n)
    fits = [(t, (choices**t - 1).bit_length()) for t in range(1, 63)]
    return min(((t, b) for t, b in fits if b <= 62), key=lambda pair: (pair[1] / pair[0], pair[0]))


def size(groups: int, n: int, m: int) -> int:
    """Bytes of the code of so many groups."""
    t, bits = word(n, m)
    return bits * byte_count(-(-groups // t))


def masks(flags: Tensor, m: int) -> Tensor:
    """Every m flags as one number below 2^m."""
    return (flags.reshape(-1, m).float() @ (2.0 ** torch.arange(m))).long()


def most(numbers: Tensor, m: int) -> int:
    """The largest number of flags that any group has set."""
    counts = sum((numbers >> i) & 1 for i in range(m))
    return int(counts.max()) if isinstance(counts, Tensor) and counts.numel() else 0


def encode(numbers: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """The code of groups whose masks are `numbers`, and the positions [groups · n] of the entries to store, in order.

    A group with fewer than n flags keeps others besides: entries that are zero, and stored as such.

    Example:
        >>> data, kept = encode(masks(torch.tensor([0, 1, 0, 1, 0, 0, 1, 0]).bool(), 4), 2, 4)
        >>> kept.tolist(), torch.equal(decode(data, 8, 2, 4), kept)
        ([1, 3, 4, 6], True)
    """
    codes = _covered(n, m)[numbers]
    t, bits = word(n, m)
    padded = torch.zeros(-(-codes.numel() // t) * t, dtype=torch.int64)
    padded[: codes.numel()] = codes
    weights = torch.tensor([math.comb(m, n) ** i for i in range(t)])
    return pack_numbers((padded.reshape(-1, t) * weights).sum(1), bits), _positions(codes, _choices(n, m), m)


def decode(data: Tensor, total: int, n: int, m: int) -> Tensor:
    """The positions of `encode` among `total` entries; ValueError where the bytes are not their code."""
    groups, (t, bits) = total // m, word(n, m)
    if total % m or data.numel() != size(groups, n, m):
        raise ValueError(f"the {n}:{m} code of {total} entries takes {size(groups, n, m)} bytes, not {data.numel()}")
    rest = unpack_numbers(data, -(-groups // t), bits)
    codes = torch.empty(rest.numel(), t, dtype=torch.int64)
    for i in range(t):
        codes[:, i], rest = rest % math.comb(m, n), rest // math.comb(m, n)
    flat = codes.reshape(-1)
    if bool(rest.any()) or bool(flat[groups:].any()):
        raise ValueError(f"the {n}:{m} code holds a number that no choice has")
    return _positions(flat[:groups], _choices(n, m), m)


def _positions(codes: Tensor, choices: Tensor, m: int) -> Tensor:
    return (choices[codes] + torch.arange(codes.numel())[:, None] * m).reshape(-1)
