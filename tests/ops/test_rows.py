"""Row-wise top-n: hard and soft masks of many rows at once, against the masks of each row by itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spartan import hard_topk, soft_topk
from spartan.ops import rows
from tests.ops.test_soft_topk import BETAS, DISTRIBUTIONS, draw

SIZES = [2, 3, 4, 8, 16, 17, 64, 256]


def near(n: int, seed: int) -> Tensor:
    """Values a few units in the last place of float32 apart, where centers cannot be halved."""
    return 100.0 + 1e-5 * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sample(kind: str, m: int, dtype: torch.dtype, seed: int, count: int = 20) -> Tensor:
    u = near(count * m, seed) if kind == "near" else draw(kind, count * m, seed)
    return u.to(dtype).reshape(count, m)


def masks(u: Tensor, n: int, beta: float) -> Tensor:
    center, offset = rows.solve(u, n, beta)
    return torch.sigmoid((u - center[:, None]) * beta + offset[:, None])


def gradient(u: Tensor, n: int, beta: float, g: Tensor) -> Tensor:
    """∂(g·m)/∂u of every row, as solvers have it: βm(1−m)(g − a₁/a₂)."""
    m = masks(u, n, beta)
    slope = m - m * m
    return beta * slope * (g - rows.pull(g, slope))


cases = given(
    m=st.sampled_from(SIZES),
    part=st.floats(0, 1),
    kind=st.sampled_from([*DISTRIBUTIONS, "near"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 1000),
)


@settings(deadline=None, max_examples=200)
@cases
def test_hard_masks_are_those_of_each_row(m: int, part: float, kind: str, dtype: torch.dtype, seed: int) -> None:
    u, n = sample(kind, m, dtype, seed), round(part * m)
    keep = rows.top(u, n)
    assert (keep.sum(1) == n).all()
    for row, kept in zip(u, keep, strict=True):
        assert torch.equal(kept, hard_topk(row, n))


def test_both_ways_of_ranking_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    u = torch.randint(4, (500, 8), generator=torch.Generator().manual_seed(0)).float()
    u[0] = -math.inf  # what may not be chosen is ranked so
    for n in range(9):
        compared = rows.top(u, n)
        monkeypatch.setattr(rows, "COMPARE_ALL", 0)
        assert torch.equal(rows.top(u, n), compared)
        monkeypatch.undo()


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (4, 4), (5, 17)])
def test_the_largest_below_what_is_kept(n: int, m: int, kind: str) -> None:
    u = sample(kind, m, torch.float32, 0)
    for row, found in zip(u, rows.below(u, n), strict=True):
        least = row.sort(descending=True).values[n - 1]
        others = [x for x in row.tolist() if x < float(least)]
        assert found.tolist() == [max(others, default=-math.inf)]


@settings(deadline=None, max_examples=600)
@given(beta=st.sampled_from(BETAS) | st.floats(0, 1e6), data=st.data())
def test_every_row_meets_its_budget(beta: float, data: st.DataObject) -> None:
    m = data.draw(st.sampled_from(SIZES))
    n = data.draw(st.integers(1, m))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    u = sample(data.draw(st.sampled_from([*DISTRIBUTIONS, "near"])), m, dtype, data.draw(st.integers(0, 1000)))
    mask = masks(u, n, beta)
    assert bool(((mask >= 0) & (mask <= 1)).all())
    assert float(((mask.double().sum(1) - n).abs() / n).max()) <= (1e-13 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("beta", [1.0, 10.0, 320.0])
@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (1, 4), (3, 4), (4, 16)])
def test_soft_masks_are_those_of_each_row(n: int, m: int, beta: float, kind: str) -> None:
    u = sample(kind, m, torch.float64, 0)
    want = torch.stack([soft_topk(row, n, beta) for row in u])
    torch.testing.assert_close(masks(u, n, beta), want, rtol=0, atol=1e-11)


def test_edges() -> None:
    u = torch.tensor([[0.3, 0.1, 0.2, 0.4], [0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    assert torch.equal(masks(u, 4, 10.0), torch.ones(3, 4))
    torch.testing.assert_close(masks(u, 1, 0.0), torch.full((3, 4), 0.25))
    for beta in (1.0, 1e3, 1e30):
        torch.testing.assert_close(masks(u[1:], 3, beta), torch.full((2, 4), 0.75))
    assert torch.equal(masks(u[:1], 2, 1e30), rows.top(u[:1], 2).float())  # the hard mask, where nothing is tied
    huge = torch.tensor([[3e38, 3e38, 1.0, 0.0]])
    assert torch.equal(masks(huge, 2, 1.0), torch.tensor([[1.0, 1.0, 0.0, 0.0]]))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    u = torch.rand(1000, 4, generator=torch.Generator().manual_seed(0))
    whole = rows.solve(u, 2, 10.0)
    monkeypatch.setattr(rows, "CHUNK", 64)
    for a, b in zip(whole, rows.solve(u, 2, 10.0), strict=True):
        assert torch.equal(a, b)


def implicit(u: Tensor, n: int, beta: float, g: Tensor) -> Tensor:
    """∂(g·m)/∂u of one row by implicit differentiation: Σ m(u, μ) = n gives dμ = −β Σ m(1−m) du / Σ m(1−m)."""
    u = u.clone().requires_grad_()
    center, offset = (x.item() for x in rows.solve(u.detach()[None], n, beta))
    mu = torch.tensor(offset - beta * center, dtype=u.dtype, requires_grad=True)
    m = torch.sigmoid(beta * (u - center) + (mu + beta * center))
    in_u, in_mu = torch.autograd.grad(m.sum(), [u, mu], retain_graph=True)
    direct, through = torch.autograd.grad((g * m).sum(), [u, mu])
    return direct - through * in_u / in_mu


@settings(deadline=None, max_examples=100)
@given(
    nm=st.sampled_from([(1, 2), (2, 4), (1, 4), (7, 8), (4, 17)]),
    beta=st.floats(0.01, 200),
    seed=st.integers(0, 1000),
)
def test_the_gradient_is_that_of_the_solution(nm: tuple[int, int], beta: float, seed: int) -> None:
    (n, m), rng = nm, torch.Generator().manual_seed(seed)
    u = (0.1 * torch.randn(6, m, generator=rng, dtype=torch.float64)).abs()
    g = torch.randn(6, m, generator=rng, dtype=torch.float64)
    want = torch.stack([implicit(row, n, beta, one) for row, one in zip(u, g, strict=True)])
    torch.testing.assert_close(gradient(u, n, beta, g), want, rtol=1e-8, atol=1e-11)


def test_the_gradient_by_differences() -> None:
    u = torch.tensor([[0.31, 0.12, 0.27, 0.4], [0.3, 0.3, 0.1, 0.2]], dtype=torch.float64)
    eps = 1e-7
    for i in range(u.numel()):
        step = eps * torch.eye(u.numel(), dtype=torch.float64)[i].view_as(u)
        difference = (masks(u + step, 2, 9.0) - masks(u - step, 2, 9.0)) / (2 * eps)
        for j in range(u.numel()):
            g = torch.eye(u.numel(), dtype=torch.float64)[j].view_as(u)
            got = gradient(u, 2, 9.0, g).view(-1)[i]
            torch.testing.assert_close(got, difference.view(-1)[j], rtol=1e-3, atol=1e-6)


def test_a_flat_mask_pulls_nothing_back() -> None:
    zero = torch.zeros(1, 4)
    assert torch.equal(rows.pull(torch.ones(1, 4), zero), torch.zeros(1, 1))
