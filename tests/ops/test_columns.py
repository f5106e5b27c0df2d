"""Small budgets with rows as columns, against those of `rows`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from spartan.ops import columns, rows

SIZES = [(1, 2), (1, 4), (2, 4), (3, 4), (3, 5), (2, 8), (7, 8), (4, 16), (5, 32), (31, 32)]
KINDS = ["small", "ties", "zeros", "large", "apart"]


def sample(kind: str, m: int, dtype: torch.dtype) -> Tensor:
    """Magnitudes, m × rows."""
    u = torch.randn(m, 1001, generator=torch.Generator().manual_seed(0), dtype=dtype).abs()
    if kind == "ties":
        return (4 * u).round() / 4
    if kind == "zeros":
        return u.mul_(torch.rand(u.shape, generator=torch.Generator().manual_seed(1)) > 0.6)
    return {"small": 0.02 * u, "large": 10 * u, "apart": u**8}[kind]


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 11])
def test_every_row_of_zeros_and_ones_comes_in_order(m: int) -> None:
    """What orders these orders everything; with few places wanted, these are in order."""
    u = torch.tensor(list(itertools.product([0.0, 1.0], repeat=m))).t().contiguous()
    given, want = u.clone(), u.sort(0, descending=True).values
    for wanted in [range(m), *([i, i + 1] for i in range(m - 1))]:
        room = columns.Room(m, u.shape[1], u.dtype)
        found = columns.ordered(u, wanted, room)
        assert all(torch.equal(found[i], want[i]) for i in wanted)
    assert torch.equal(u, given)
    assert len(columns.comparators(m, frozenset([0]))) == m - 1  # the largest alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), [*SIZES, (4, 4), (0, 4)])
def test_what_is_kept_is_the_same_to_the_bit(n: int, m: int, kind: str, dtype: torch.dtype) -> None:
    u = sample(kind, m, dtype)
    room, below = columns.Room(m, u.shape[1], dtype), torch.empty(u.shape[1], dtype=dtype)
    found = columns.keep(u, n, room, room.blocks[0], below)
    assert torch.equal(found == 1, rows.top(u.t(), n).t())
    assert torch.equal(found == 0, found != 1)
    if n:
        assert torch.equal(below, rows.below(u.t(), n).squeeze(1).clamp(min=0.0))
    kept = columns.only(-u, found, torch.empty_like(u))
    assert torch.equal(kept, torch.where(found == 1, -u, 0.0))
    assert not kept[found == 0].signbit().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0, 20.0, 1e4, 1e30])
@pytest.mark.parametrize(("n", "m"), [*SIZES, (4, 4)])
def test_soft_masks_meet_every_budget(n: int, m: int, beta: float, dtype: torch.dtype) -> None:
    for kind in KINDS:
        u = sample(kind, m, dtype)
        room = columns.Room(m, u.shape[1], dtype)
        center, offset = torch.empty(2, u.shape[1], dtype=dtype).unbind()
        columns.solve(u, n, beta, room, center, offset)
        found = columns.soft(u, center, offset, beta, room.blocks[0])
        off = (found.double().sum(0) - n).abs().max() / n
        assert off <= (1e-6 if dtype == torch.float32 else 1e-13)
        center, offset = rows.solve(u.t(), n, beta)
        want = ((u - center) * beta + offset).sigmoid()
        torch.testing.assert_close(found, want, rtol=0, atol=2e-5 if dtype == torch.float32 else 2e-11)


def test_rows_that_need_many_steps_are_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    u = sample("apart", 8, torch.float64)
    monkeypatch.setattr(columns, "PASSES", 1)
    room, (center, offset) = columns.Room(8, u.shape[1], u.dtype), torch.empty(2, u.shape[1], dtype=u.dtype).unbind()
    columns.solve(u, 2, 5.0, room, center, offset)
    found = columns.soft(u, center, offset, 5.0, room.blocks[0])
    torch.testing.assert_close(found.sum(0), torch.full_like(center, 2.0), rtol=1e-13, atol=0)
