"""Random numbers by a hash: what they are, that they are even, and that nothing ties one to another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spartan.ops.drawing import Key, key_of, signed, uniform

N, CELLS = 1 << 20, 64


def draw(n: int, *numbers: int) -> Tensor:
    return uniform(torch.arange(n, dtype=torch.int32), key_of(*numbers))


def hashed(x: int, two: int) -> int:
    """The hash in plain integers, with the second half of a key after its first product."""
    x = signed((x ^ x >> 17) * 0xED5AD4BB) ^ two
    x = signed((x ^ x >> 11) * 0xAC4C1B51)
    x = signed((x ^ x >> 15) * 0x31848BAB)
    return x ^ x >> 14


@pytest.mark.parametrize("key", [Key(0, 0), Key(-1, 1), Key(2**31 - 1, -(2**31)), key_of(3, 4)])
def test_numbers_are_those_of_the_hash(key: Key) -> None:
    indices = [0, 1, 2, 77, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5]
    found = uniform(torch.tensor([signed(i) for i in indices], dtype=torch.int32), key)
    numbers = [hashed(signed(i + key.one), key.two) for i in indices]
    assert all(0 <= x < 1 << 31 for x in numbers)
    assert found.tolist() == [(2 * (x >> 8) + 1) / (1 << 24) for x in numbers]
    assert found.dtype == torch.float32


def test_numbers_are_even_and_tell_nothing_of_each_other() -> None:
    """χ² in cells of pairs: neighbours, units a row apart, the same unit in the next step or another target."""
    first = draw(N, 7, 0)
    assert bool(((first > 0) & (first < 1)).all())
    others = [draw(N, 7, 1), draw(N, 8, 0), draw(N, 7, 0).roll(1), draw(N, 7, 0).roll(256)]
    others.append(uniform(torch.arange(N, dtype=torch.int32), key_of(7, 0).joined(key_of(1))))
    for other in others:
        pairs = (first * CELLS).long() * CELLS + (other * CELLS).long()
        expected = N / CELLS**2
        chi2 = float(((torch.bincount(pairs, minlength=CELLS**2) - expected) ** 2 / expected).sum())
        assert abs(chi2 - CELLS**2) < 5 * (2 * CELLS**2) ** 0.5


def test_any_part_can_be_drawn_alone() -> None:
    key, whole = key_of(1), draw(10_000, 1)
    index, out, room = (
        torch.arange(300, 400, dtype=torch.int32),
        torch.empty(100),
        torch.empty(2, 100, dtype=torch.int32),
    )
    assert uniform(index, key, out, room) is out
    assert torch.equal(out, whole[300:400])
    assert torch.equal(uniform(index - 300, key.after(300)), out)
    wide = torch.empty(100, dtype=torch.float64)
    assert torch.equal(uniform(index, key, wide), whole[300:400].double())


def test_keys_differ() -> None:
    keys = {key_of(seed, step) for seed in range(50) for step in range(50)} | {key_of(n) for n in range(500)}
    assert len(keys) == 3_000
    assert all(-(2**31) <= half < 2**31 for key in keys for half in key)
    assert key_of(1).joined(key_of(2).after(7)) == key_of(1).joined(key_of(2)).after(7)
