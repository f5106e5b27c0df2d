"""hard_topk: the exact prefix, against a plain sort."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spartan import hard_topk
from spartan.ops import parts as parts_module
from spartan.ops import select as select_module
from spartan.ops.parts import Part
from spartan.ops.select import select


def by_sorting(values: Tensor, k: float, costs: Tensor | None = None) -> Tensor:
    """The definition: the longest prefix by value/cost, ties by position, whose cost fits k."""
    c = torch.ones(values.numel(), dtype=torch.float64) if costs is None else costs.double()
    u = values.double() if costs is None else (values / costs).double()
    keep = torch.zeros(values.numel(), dtype=torch.bool)
    spent = 0.0
    for i in sorted(range(values.numel()), key=lambda i: (-float(u[i]), i)):
        if spent + float(c[i]) > k + 1e-9 * float(c.mean()) + 1e-15 * k:
            break
        spent += float(c[i])
        keep[i] = True
    return keep


finite = st.floats(-10, 10, width=32)
# Few distinct values make ties the rule.
tied = st.sampled_from([0.0, 0.5, 1.0, -1.0, 2.0])


@settings(deadline=None, max_examples=300)
@given(st.lists(finite | tied, min_size=1, max_size=40), st.floats(0, 1), st.booleans())
def test_equals_sorting(values: list[float], fraction: float, whole: bool) -> None:
    v = torch.tensor(values)
    k = fraction * len(values)
    k = float(math.floor(k)) if whole else k
    keep = hard_topk(v, k)
    assert torch.equal(keep, by_sorting(v, k))
    assert int(keep.sum()) == math.floor(k + 1e-9)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(tied | finite, st.sampled_from([1.0, 2.0, 0.25, 9.0])), min_size=1, max_size=40), st.floats(0, 1)
)
def test_equals_sorting_with_costs(items: list[tuple[float, float]], fraction: float) -> None:
    v, c = torch.tensor([i[0] for i in items]), torch.tensor([i[1] for i in items])
    k = fraction * float(c.double().sum())
    keep = hard_topk(v, k, c)
    assert torch.equal(keep, by_sorting(v, k, c))
    assert float(c[keep].double().sum()) <= k * (1 + 1e-12) + 1e-8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.999, 1.0])
def test_many_values_every_dtype(dtype: torch.dtype, density: float) -> None:
    """Large enough for the sampled bracket; in half precision nearly every value is tied."""
    v = torch.randn(400_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    k = density * v.numel()
    keep = hard_topk(v, k)
    order = v.double().sort(descending=True, stable=True).indices[: math.floor(k + 1e-9)]
    expected = torch.zeros_like(keep)
    expected[order] = True
    assert torch.equal(keep, expected)


def test_every_chunking_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(3)
    v = torch.randn(5000, generator=g).mul(8).round()  # many ties
    costs = torch.randint(1, 5, (5000,), generator=g).float()
    reference = hard_topk(v, 4321.5, costs), hard_topk(v, 777)
    pieces = [Part(p) for p in v.split([1, 999, 0, 2500, 1500])]
    threshold = select(pieces, 777)
    start, found = 0, []
    for piece in pieces:
        found.append(threshold.keep(piece.u, start))
        start += piece.u.numel()
    assert torch.equal(torch.cat(found), reference[1])
    for chunk in (7, 64, 1000):
        monkeypatch.setattr(parts_module, "CHUNK", chunk)
        monkeypatch.setattr(select_module, "SORT_ALL", chunk)
        monkeypatch.setattr(select_module, "SAMPLE", chunk)
        assert torch.equal(hard_topk(v, 4321.5, costs), reference[0])
        assert torch.equal(hard_topk(v, 777), reference[1])


def test_a_misleading_sample_costs_time_but_not_the_answer() -> None:
    """Every value that the evenly spaced sample sees is small; the large ones lie between."""
    v = torch.arange(400_000.0)
    v[:: 400_000 // (1 << 16)] = -1.0
    k = 100_000
    assert torch.equal(hard_topk(v, k).nonzero().flatten(), v.sort(descending=True).indices[:k].sort().values)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.floats(-6, 6)), min_size=2, max_size=60),
    st.floats(0, 0.999),
    st.integers(0, 59),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_budget_is_never_exceeded(
    items: list[tuple[float, float]], fraction: float, at: int, dtype: torch.dtype
) -> None:
    """In exact fractions, costs from 1e-6 to 1e6, but for a billionth of the cheapest; and the next would exceed it."""
    values, costs = (torch.tensor(column, dtype=dtype) for column in zip(*items, strict=True))
    costs = 10**costs
    order = (values / costs).argsort(descending=True, stable=True).tolist()
    exact = [Fraction(cost) for cost in costs.tolist()]
    whole = float(costs.double().sum())
    # Any budget, and those that a prefix just meets or just misses.
    prefix = float(sum(exact[i] for i in order[: at % len(order)]))
    for k in (fraction * whole, prefix, math.nextafter(prefix, 0.0), math.nextafter(prefix, math.inf)):
        if k >= whole:
            continue
        kept = hard_topk(values, k, costs).tolist()
        count = sum(kept)
        assert sorted(order[:count]) == [i for i, keep in enumerate(kept) if keep]
        assert sum((exact[i] for i in order[:count]), Fraction(0)) <= Fraction(k) + Fraction(1e-9 * float(min(exact)))
        assert count == len(order) or sum(exact[i] for i in order[: count + 1]) > Fraction(k)


def test_cheap_units_beside_a_dear_one_do_not_slip_through() -> None:
    costs = torch.tensor([1e-6] * 300 + [1e6])
    values = torch.cat([2 * costs[:-1], torch.ones(1)])
    assert int(hard_topk(values, 0.0, costs).sum()) == 0
    assert int(hard_topk(values, 1e-5, costs).sum()) == 10  # 1e-6 in float32 is a little less
    assert bool(hard_topk(values, float(costs.double().sum()), costs).all())


def test_a_budget_within_rounding_of_a_whole_unit_is_that_unit() -> None:
    v = torch.rand(1000)
    assert int(hard_topk(v, (1 - 0.9) * 1000).sum()) == 100
    assert int(hard_topk(v, 100.0 - 1e-6).sum()) == 99
    small = torch.full((1000,), 1e-12)
    assert int(hard_topk(v, 0.5e-9, small).sum()) == 500


def test_edges() -> None:
    v = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert not hard_topk(v, 0).any()
    assert hard_topk(v, 4).all()
    assert hard_topk(v, 4 + 3e-6).all()
    assert hard_topk(torch.tensor(5.0), 1.0).item() is True
    assert hard_topk(torch.tensor(5.0), 0.5).item() is False
    assert hard_topk(torch.zeros(6), 2).tolist() == [True, True, False, False, False, False]
    assert hard_topk(v.reshape(2, 2), 1).tolist() == [[False, True], [False, False]]
    # A prefix, not a knapsack: the large unit does not fit, so the small one behind it is not taken either.
    assert hard_topk(torch.tensor([9.0, 1.0]), 2, torch.tensor([3.0, 1.0])).tolist() == [False, False]


@pytest.mark.parametrize(
    ("values", "k", "costs", "message"),
    [
        (torch.tensor([1.0, math.nan]), 1, None, "NaN or infinite"),
        (torch.tensor([1.0, math.inf]), 1, None, "NaN or infinite"),
        (torch.tensor([1, 2]), 1, None, "real floating-point"),
        (torch.tensor([]), 0, None, "empty"),
        (torch.ones(3), -1, None, "outside"),
        (torch.ones(3), 3.1, None, "outside"),
        (torch.ones(3), math.nan, None, "outside"),
        (torch.ones(3), 1, torch.ones(2), "shape"),
        (torch.ones(3), 1, torch.tensor([1.0, 0.0, 1.0]), "positive"),
        (torch.ones(3), 1, torch.tensor([1.0, math.inf, 1.0]), "positive and finite"),
    ],
)
def test_bad_input(values: Tensor, k: float, costs: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hard_topk(values, k, costs)
