"""soft_topk: its budget, its gradient, its limits, and the paper's own iteration beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import expit
from torch import Tensor

from spartan import hard_topk, soft_topk

BETAS = [0.0, 1e-9, 1.0, 10.0, 320.0, 1e4, 1e6]
DISTRIBUTIONS = ["normal", "uniform", "heavy", "tied", "zeros", "equal", "two", "tiny", "signed"]


def draw(kind: str, n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g, dtype=torch.float64)
    return {
        "normal": x.abs() * 0.05,
        "uniform": torch.rand(n, generator=g, dtype=torch.float64),
        "heavy": (x.abs() ** 8).clamp(max=6e4),
        "tied": (x * 4).round().abs() / 4,
        "zeros": torch.where(x > 0, x, 0.0),
        "equal": torch.full((n,), 0.3, dtype=torch.float64),
        "two": (x > 1).double(),
        "tiny": x.abs() * 1e-20,
        "signed": x,
    }[kind]


@settings(deadline=None, max_examples=400)
@given(
    beta=st.sampled_from(BETAS) | st.floats(0, 1e6),
    density=st.floats(1e-3, 1.0),
    kind=st.sampled_from(DISTRIBUTIONS),
    n=st.sampled_from([1, 2, 3, 17, 400, 5000]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    costs=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(beta=10.0, density=0.001, kind="uniform", n=17, dtype=torch.float32, costs=True, seed=624)
def test_the_budget_is_met(
    beta: float, density: float, kind: str, n: int, dtype: torch.dtype, costs: bool, seed: int
) -> None:
    v = draw(kind, n, seed).to(dtype)
    c = torch.randint(1, 30, (n,), generator=torch.Generator().manual_seed(seed)).double() if costs else None
    k = density * (n if c is None else float(c.sum()))
    m, info = soft_topk(v, k, beta, c, return_info=True)
    spent = float((m.double() * (1.0 if c is None else c)).sum())
    assert abs(spent - k) <= 1e-6 * k
    assert info.residual <= (1e-12 if dtype == torch.float64 else 1e-6)
    assert m.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(((m >= 0) & (m <= 1)).all())
    u = v.to(m.dtype) if c is None else (v.to(m.dtype) / c)
    ordered = m[u.sort().indices]
    assert bool((ordered.diff() >= -1e-6).all()), "the mask grows with value per cost"


@settings(deadline=None, max_examples=150)
@given(
    beta=st.floats(1e-3, 1e3),
    density=st.floats(0.01, 0.99),
    kind=st.sampled_from(["normal", "uniform", "heavy", "tied", "zeros", "signed"]),
    n=st.sampled_from([2, 30, 500]),
    costs=st.booleans(),
    seed=st.integers(0, 100),
)
def test_agrees_with_brentq(beta: float, density: float, kind: str, n: int, costs: bool, seed: int) -> None:
    v = draw(kind, n, seed)
    c = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    c = c if costs else torch.ones_like(c)
    k = density * float(c.sum())
    m, info = soft_topk(v, k, beta, c if costs else None, return_info=True)
    z, cn = beta * (v / c).numpy(), c.numpy()
    reach = float(np.abs(z).max()) + 100.0
    mu = brentq(lambda mu: float((cn * expit(z + mu)).sum()) - k, -reach, reach, xtol=1e-14, rtol=1e-15)
    np.testing.assert_allclose(m.numpy(), expit(z + mu), rtol=1e-8, atol=1e-10)
    # Where the mask is flat around the solution, many μ are right; their masks agree above.
    if float((cn * expit(z + mu) * expit(-z - mu)).sum()) > 1e-3 * k:
        assert info.mu == pytest.approx(mu, rel=1e-7, abs=1e-6)


@pytest.mark.parametrize("n", [300_000, 1_000_003])
@pytest.mark.parametrize("beta", [1.0, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_few_passes_at_any_sharpness(n: int, beta: float, dtype: torch.dtype) -> None:
    v = draw("normal", n, 0).to(dtype)
    for density in (0.01, 0.05, 0.2, 0.9):
        m, info = soft_topk(v, density * n, beta, return_info=True)
        assert info.passes <= (8 if dtype == torch.float64 else 5), (density, info)
        assert abs(float(m.double().sum()) / (density * n) - 1) <= 1e-6


def implicit(v: Tensor, k: float, beta: float, c: Tensor) -> Tensor:
    """The mask with μ as an implicit function of v, by one differentiable Newton step at the solution."""
    with torch.no_grad():
        mu = torch.tensor(soft_topk(v, k, beta, c, return_info=True)[1].mu, dtype=torch.float64)
    z = beta * v / c
    f = (c * torch.sigmoid(z + mu)).sum()
    slope = (c * torch.sigmoid(z + mu) * torch.sigmoid(-z - mu)).sum().detach()
    return torch.sigmoid(z + mu - (f - k) / slope)


@pytest.mark.parametrize("beta", [0.5, 5.0, 40.0])
@pytest.mark.parametrize("with_costs", [False, True])
def test_the_gradient_is_that_of_the_solution(beta: float, with_costs: bool) -> None:
    torch.manual_seed(0)
    v = torch.rand(40, dtype=torch.float64, requires_grad=True)
    c = torch.rand(40, dtype=torch.float64) + 0.5 if with_costs else torch.ones(40, dtype=torch.float64)
    k, g = 0.3 * float(c.sum()), torch.randn(40, dtype=torch.float64)
    (got,) = torch.autograd.grad(soft_topk(v, k, beta, c if with_costs else None), v, g)
    (want,) = torch.autograd.grad(implicit(v, k, beta, c), v, g)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert torch.autograd.gradcheck(
        lambda x: soft_topk(x, k, beta, c if with_costs else None), (v,), eps=1e-6, atol=1e-6
    )


def test_the_gradient_of_half_and_single_precision_has_their_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        v = torch.rand(50).to(dtype).requires_grad_()
        m = soft_topk(v, 10, 5.0)
        assert m.dtype == torch.float32
        (g,) = torch.autograd.grad(m.square().sum(), v)
        assert g.dtype == dtype
        (exact,) = torch.autograd.grad(soft_topk(w := v.detach().double().requires_grad_(), 10, 5.0).square().sum(), w)
        torch.testing.assert_close(g.double(), exact, rtol=2e-2, atol=2e-3)


def test_the_limits_of_sharpness() -> None:
    torch.manual_seed(0)
    v = torch.rand(100, dtype=torch.float64)
    torch.testing.assert_close(soft_topk(v, 30, 0.0), torch.full((100,), 0.3, dtype=torch.float64), rtol=1e-15, atol=0)
    assert torch.equal(soft_topk(v, 30, math.inf), hard_topk(v, 30).double())
    torch.testing.assert_close(soft_topk(v, 30, 1e6), hard_topk(v, 30).double(), rtol=0, atol=1e-6)
    v.requires_grad_()
    assert torch.autograd.grad(soft_topk(v, 30, 0.0).sum(), v)[0].abs().max() == 0


def test_edges() -> None:
    v = torch.tensor([1.0, 2.0, 3.0])
    assert soft_topk(v, 0, 5.0).tolist() == [0, 0, 0]
    assert soft_topk(v, 3, 5.0).tolist() == [1, 1, 1]
    assert soft_topk(v, 3 + 1e-6, 5.0).tolist() == [1, 1, 1]
    assert soft_topk(torch.zeros(4), 1, 1e6).tolist() == [0.25] * 4
    assert soft_topk(torch.tensor(7.0), 0.25, 1e3).item() == pytest.approx(0.25)
    assert soft_topk(v.reshape(3, 1), 1, 1.0).shape == (3, 1)
    for k in (0, 3):
        (g,) = torch.autograd.grad(soft_topk(x := v.clone().requires_grad_(), k, 5.0).sum(), x)
        assert g.tolist() == [0, 0, 0]


@pytest.mark.slow
def test_a_hundred_million_entries() -> None:
    v = torch.rand(100_000_000)
    k = 5_000_000
    assert int(hard_topk(v, k).sum()) == k
    m, info = soft_topk(v, k, 10.0, return_info=True)
    assert info.residual <= 1e-6
    assert abs(float(m.sum(dtype=torch.float64)) - k) <= 1e-6 * k


def algorithm_4(
    v: Tensor, k: float, beta: float, c: Tensor, mu: float, steps: int, eps: float
) -> tuple[Tensor, float, int]:
    """The paper's listing, line by line."""
    z, m = beta * v / c, torch.ones_like(v)
    for t in range(1, steps + 1):  # noqa: B007
        nu = torch.log(c) - torch.log(1 + torch.exp(z + mu))
        mu = math.log(k) - math.log(float(torch.exp(z + nu).sum()))
        last, m = m, torch.exp(z + mu + nu - torch.log(c))
        if abs(float(v @ (m - last))) < eps * abs(float(v @ last)):
            break
    return m, mu, t


@pytest.mark.parametrize("beta", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("init", ["cold", "threshold", -3.0])
def test_sinkhorn_is_algorithm_4(beta: float, init: Any) -> None:
    torch.manual_seed(1)
    v, c = torch.rand(60, dtype=torch.float64), torch.rand(60, dtype=torch.float64) + 0.5
    k = 0.2 * float(c.sum())
    kept = hard_topk(v, k, c)
    mu0 = {"cold": 0.0, "threshold": -beta * float((v / c)[kept].min())}.get(init, init)
    m, info = soft_topk(v, k, beta, c, solver="sinkhorn", init=init, return_info=True)
    want, mu, passes = algorithm_4(v, k, beta, c, mu0, 100, 0.01)
    torch.testing.assert_close(m, want, rtol=1e-10, atol=1e-12)
    assert info.mu == pytest.approx(mu, abs=1e-9)
    assert info.passes == passes
    _, limited = soft_topk(v, k, beta, c, solver="sinkhorn", init=init, tol=0.0, max_iters=7, return_info=True)
    assert limited.passes == 7


def test_sinkhorn_converges_to_newton() -> None:
    v = torch.rand(200, dtype=torch.float64)
    m = soft_topk(v, 40, 8.0, solver="sinkhorn", tol=1e-15, max_iters=5000)
    torch.testing.assert_close(m, soft_topk(v, 40, 8.0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("init", ["cold", "threshold", None, -4.0, 1e9])
def test_newton_finds_the_same_mask_from_anywhere(init: Any) -> None:
    v = draw("normal", 3000, 5)
    torch.testing.assert_close(soft_topk(v, 100, 50.0, init=init), soft_topk(v, 100, 50.0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"beta": -1.0}, "beta=-1.0"),
        ({"beta": math.nan}, "beta=nan"),
        ({"k": -1}, "k=-1.0 is outside"),
        ({"k": 3.5}, "k=3.5 is outside"),
        ({"solver": "sinkorn"}, "solver='sinkorn'"),
        ({"init": "warm"}, "init='warm'"),
        ({"costs": torch.tensor([1.0, -1.0, 1.0])}, "costs must be positive"),
        ({"values": torch.tensor([1.0, math.nan, 1.0])}, "NaN or infinite"),
        ({"values": torch.tensor([1.0, -math.inf, 1.0])}, "NaN or infinite"),
    ],
)
def test_bad_input(kwargs: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"values": torch.ones(3), "k": 1, "beta": 2.0} | kwargs
    with pytest.raises(ValueError, match=message):
        soft_topk(**arguments)
