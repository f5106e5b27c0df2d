"""Every code gives back what went in, within its size bound, and refuses bytes that are not its own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spartan.files import codes, nm
from spartan.files.format import as_bits
from spartan.files.values import FIELDS, decode_values, encode_values

many = settings(deadline=None, max_examples=150)
seeds = st.integers(0, 2**32 - 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def supports(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Kept positions among n: at random, in runs, at one end, or with the density changing along the way."""
    n, density = draw(st.integers(1, 20_000)), draw(st.sampled_from([0.0, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.9, 1.0]))
    kind, g = draw(st.sampled_from(["random", "runs", "end", "drift"])), generator(draw(seeds))
    if kind == "random":
        flags = torch.rand(n, generator=g) < density
    elif kind == "runs":
        flags = (torch.rand(n // 37 + 1, generator=g) < density).repeat_interleave(37)[:n]
    elif kind == "end":
        flags = torch.arange(n) >= n - round(density * n)
    else:
        flags = torch.rand(n, generator=g) < density * torch.linspace(0, 2, n)
    return flags.nonzero().squeeze(1), n


@many
@given(st.lists(st.booleans(), max_size=200))
def test_bits_come_back(flags: list[bool]) -> None:
    packed = codes.pack(torch.tensor(flags, dtype=torch.bool))
    assert packed.numel() == codes.byte_count(len(flags))
    assert codes.unpack(packed, len(flags)).tolist() == flags
    assert packed.tolist() == [
        sum(flag << i for i, flag in enumerate(flags[at : at + 8])) for at in range(0, len(flags), 8)
    ]


@many
@given(st.integers(0, 62), st.integers(0, 100), seeds)
def test_numbers_come_back(width: int, count: int, seed: int) -> None:
    numbers = torch.randint(0, 1 << width, (count,), generator=generator(seed))
    packed = codes.pack_numbers(numbers, width)
    assert packed.numel() == width * codes.byte_count(count)
    assert torch.equal(codes.unpack_numbers(packed, count, width), numbers)


@many
@given(supports())
def test_mask_comes_back(support: tuple[Tensor, int]) -> None:
    kept, n = support
    data = codes.encode_mask(kept, n)
    assert data.numel() == codes.byte_count(n) == math.ceil(n / 8)
    assert torch.equal(codes.decode_mask(data, n, kept.numel()), kept)


@many
@given(supports())
def test_gaps_come_back_within_their_bound(support: tuple[Tensor, int]) -> None:
    kept, n = support
    count = kept.numel()
    gaps = codes.gaps_of(kept)
    size, k = codes.gaps_size(gaps, n)
    data = codes.encode_gaps(gaps, k)
    assert data.numel() == size
    assert torch.equal(codes.decode_gaps(data, n, count, k), kept)
    # The module's promise, however the units lie: 0.56 bits per kept unit over the bound; and rows are whole bytes.
    rows = max(1, n // max(1, count)).bit_length() + 1
    smallest = 8 * min(size, codes.byte_count(n))
    assert smallest <= (codes.entropy(n, count) if count <= n / 2 else n) + 0.56 * count + 8 * rows


@many
@given(supports(), st.integers(0, 14))
def test_gaps_come_back_with_any_parameter(support: tuple[Tensor, int], k: int) -> None:
    kept, n = support
    assert torch.equal(codes.decode_gaps(codes.encode_gaps(codes.gaps_of(kept), k), n, kept.numel(), k), kept)


@pytest.mark.parametrize("density", [0.2, 0.1, 0.05, 0.01, 0.001])
def test_random_gaps_are_near_the_entropy(density: float) -> None:
    n = 1_000_000
    kept = (torch.rand(n, generator=generator(0)) < density).nonzero().squeeze(1)
    size, _ = codes.gaps_size(codes.gaps_of(kept), n)
    assert 8 * size <= 1.025 * codes.entropy(n, kept.numel())


@many
@given(st.sampled_from([(1, 2), (2, 4), (1, 4), (3, 4), (2, 8), (4, 8), (1, 16)]), st.integers(0, 300), seeds)
def test_nm_comes_back(pair: tuple[int, int], groups: int, seed: int) -> None:
    (n, m), g = pair, generator(seed)
    order = torch.rand(groups, m, generator=g).argsort(1)
    flags = (order < n) & (torch.rand(groups, m, generator=g) < 0.9)  # some groups keep fewer
    masks = nm.masks(flags, m)
    data, kept = nm.encode(masks, n, m)
    assert nm.most(masks, m) == (int(flags.sum(1).max()) if groups else 0)
    assert data.numel() == nm.size(groups, n, m)
    assert torch.equal(nm.decode(data, groups * m, n, m), kept)
    assert kept.numel() == groups * n
    assert torch.equal(kept, kept.unique())
    assert torch.equal(torch.bincount(kept // m, minlength=groups), torch.full((groups,), n))
    assert set(flags.reshape(-1).nonzero().squeeze(1).tolist()) <= set(kept.tolist())


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (1, 8), (2, 16)])
def test_nm_is_within_one_percent_of_its_bound(n: int, m: int) -> None:
    groups = 100_000
    assert 8 * nm.size(groups, n, m) <= 1.015 * groups * math.log2(math.comb(m, n)) + 8 * 62


@many
@given(
    st.sampled_from(sorted(FIELDS, key=str)),
    st.sampled_from(["normal", "pruned", "constant", "special", "random bits"]),
    st.integers(1, 3000),
    seeds,
)
def test_values_come_back(dtype: torch.dtype, kind: str, count: int, seed: int) -> None:
    g = generator(seed)
    x = torch.randn(count, generator=g) * 0.03
    if kind == "pruned":
        x = torch.where(x < 0, x - 0.04, x + 0.04)
    elif kind == "constant":
        x.fill_(-0.0)
    elif kind == "special":
        x[::3] = torch.tensor([math.inf, -0.0, math.nan, 1e-40, -1e-7])[torch.arange(len(x[::3])) % 5]
    values = x.to(dtype)
    if kind == "random bits":
        values = torch.randint(0, 256, (count * dtype.itemsize,), generator=g, dtype=torch.uint8).view(dtype)
    coded = encode_values(values)
    if coded is None:
        assert count < 200 or kind in ("random bits", "special") or dtype == torch.float16
        return
    assert coded.data.numel() < values.nbytes
    assert torch.equal(as_bits(decode_values(coded, dtype, count)), as_bits(values))


@pytest.mark.parametrize(("dtype", "bits_saved"), [(torch.float32, 5.5), (torch.bfloat16, 5.5), (torch.float16, 2.5)])
def test_pruned_normal_values_take_fewer_bits(dtype: torch.dtype, bits_saved: float) -> None:
    values = torch.randn(100_000, generator=generator(0)) * 0.03
    coded = encode_values(values[values.abs() > 0.04].to(dtype))
    assert coded is not None
    count = int((values.abs() > 0.04).sum())
    assert 8 * coded.data.numel() / count < 8 * dtype.itemsize - bits_saved


@many
@given(st.sampled_from(["mask", "gaps", "nm"]), seeds, st.integers(0, 40))
def test_any_bytes_decode_or_raise_valueerror(code: str, seed: int, length: int) -> None:
    g = generator(seed)
    data = torch.randint(0, 256, (length,), generator=g, dtype=torch.uint8)
    n, count, k = (int(torch.randint(0, high, (1,), generator=g)) for high in (200, 60, 8))
    try:
        if code == "mask":
            kept = codes.decode_mask(data, n, count)
        elif code == "gaps":
            kept = codes.decode_gaps(data, n, count, k)
        else:
            kept, count = nm.decode(data, n * 4, 2, 4), n * 2
    except ValueError:
        return
    assert kept.numel() == count
    assert torch.equal(kept, kept.unique())
    assert not count or 0 <= int(kept[0]) <= int(kept[-1]) < max(n, n * 4 * (code == "nm"))


def test_a_code_has_one_reading() -> None:
    kept = torch.tensor([1, 5, 9])
    mask = codes.encode_mask(kept, 10)
    mask[-1] |= 128
    with pytest.raises(ValueError, match="behind the last"):
        codes.decode_mask(mask, 10, 3)
    gaps = codes.encode_gaps(codes.gaps_of(kept), 1)
    with pytest.raises(ValueError, match="behind the last"):
        codes.decode_gaps(torch.cat([gaps, gaps.new_zeros(1)]), 10, 3, 1)
    with pytest.raises(ValueError, match="more than 9"):
        codes.decode_gaps(gaps, 9, 3, 1)
    with pytest.raises(ValueError, match="there are values for 4"):
        codes.decode_gaps(gaps, 10, 4, 1)
    with pytest.raises(ValueError, match="cannot be the parameter"):
        codes.decode_gaps(gaps, 10, 3, 61)
    with pytest.raises(ValueError, match="no choice"):
        nm.decode(torch.full((nm.size(8 * 17, 2, 4),), 255, dtype=torch.uint8), 4 * 8 * 17, 2, 4)
    with pytest.raises(ValueError, match="3:3 has no code"):
        nm.check(3, 3)
