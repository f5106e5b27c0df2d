"""No solver exceeds a budget, with costs over twelve orders of magnitude: counted in exact fractions."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spartan import IMP, Sparsifier, Spartan, TopKAST, prune
from spartan.methods import SET, Movement, RigL  # type: ignore[attr-defined]
from spartan.methods.base import Method
from spartan.ops.parts import Part
from spartan.ops.select import select
from spartan.problem.problem import make_problem
from spartan.solvers.chunks import masks as chunk_masks
from spartan.solvers.chunks.solver import ChunkSolver
from spartan.solvers.sharded import ShardedSolver
from spartan.solvers.torch import TorchSolver
from tests.solvers.building import build, problem_of

SIZES = (30, 7, 1, 15, 20)
prices = st.one_of(
    st.floats(-6, 6).map(lambda power: 10.0**power), st.sampled_from([1e-6, 0.1, 1.0, 3.0, 1e6]), st.floats(0.5, 2)
)


def allowed(k: float, costs: Sequence[float]) -> Fraction:
    """The documented rule."""
    alike = len(set(costs)) == 1
    return Fraction(k) + Fraction(1e-9 * min(costs)) + (Fraction(1e-15 * k) if alike else 0)


def check(order: list[int], costs: Sequence[float], kept: list[bool], k: float, total: float) -> None:
    """What is kept is a prefix of the order, it fits, and one more would not."""
    count, exact = sum(kept), [Fraction(costs[i]) for i in order]
    assert sorted(order[:count]) == [i for i, keep in enumerate(kept) if keep]
    if k >= total:  # however their sum is rounded
        assert count == len(order)
        return
    assert sum(exact[:count], Fraction(0)) <= allowed(k, costs)
    assert count == len(order) or sum(exact[: count + 1]) > allowed(k, costs) * (1 - Fraction(1e-15))


def budgets(order: list[int], costs: Sequence[float], total: float, fraction: float, at: int) -> list[float]:
    """Any, and those that a prefix just meets or just misses."""
    prefix = float(sum((Fraction(costs[i]) for i in order[: at % (len(order) + 1)]), Fraction(0)))
    near = [prefix, math.nextafter(prefix, 0.0), math.nextafter(prefix, math.inf)]
    return [k for k in (fraction * total, 0.0, *near) if 0 <= k <= total]


def drawn(seed: int, tied: bool) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    found = [torch.rand(n, 1, generator=rng) + 0.1 for n in SIZES]
    return [(4 * x).round() / 4 + 0.25 for x in found] if tied else found


def kept_by(solver: Any, k: float) -> list[bool]:
    solver.solve([k])
    return torch.cat([x.reshape(-1) for x in solver.spread(solver.pools.keep(solver.scores(), solver.a))]).tolist()


# Ranks by magnitude, so that dear and cheap units mix: with a value power of 1 that is u = |θ|.
@pytest.mark.parametrize("kind", [TorchSolver, ChunkSolver, ShardedSolver])
@settings(deadline=None, max_examples=60)
@given(
    costs=st.lists(prices, min_size=len(SIZES), max_size=len(SIZES)),
    fraction=st.floats(0, 1),
    at=st.integers(0, sum(SIZES)),
    seed=st.integers(0, 1000),
    tied=st.booleans(),
)
def test_no_solver_exceeds_a_budget(
    kind: type[Any], costs: list[float], fraction: float, at: int, seed: int, tied: bool
) -> None:
    tensors = drawn(seed, tied)
    problem = problem_of(tensors, prices=costs)
    solver = build(kind, problem)
    each = [price for price, n in zip(costs, SIZES, strict=True) for _ in range(n)]
    u = torch.cat([x.reshape(-1) for x in tensors])
    order = u.argsort(descending=True, stable=True).tolist()
    total = problem.segments[0].total
    for k in budgets(order, each, total, fraction, at):  # chunks start from the last threshold
        check(order, each, kept_by(solver, k), k, total)


@settings(deadline=None, max_examples=40 if torch.cuda.is_available() else 2)  # the interpreter is slow
@given(
    costs=st.lists(prices, min_size=len(SIZES), max_size=len(SIZES)),
    fraction=st.floats(0, 1),
    at=st.integers(0, sum(SIZES)),
    seed=st.integers(0, 1000),
    tied=st.booleans(),
)
def test_kernels_do_not_exceed_a_budget(costs: list[float], fraction: float, at: int, seed: int, tied: bool) -> None:
    pytest.importorskip("triton")
    from spartan.solvers.triton.topk import TopK
    from tests.solvers.triton import DEVICE

    tensors = [x.reshape(-1) for x in drawn(seed, tied)]
    topk = TopK(SIZES, costs, [1.0] * len(SIZES), DEVICE)
    each = [price for price, n in zip(costs, SIZES, strict=True) for _ in range(n)]
    order = torch.cat(tensors).argsort(descending=True, stable=True).tolist()
    for k in budgets(order, each, topk.costs[0], fraction, at)[2:]:
        for asked in ([k], torch.tensor([k], dtype=torch.float64, device=DEVICE))[at % 2 :]:
            topk.solve([x.to(DEVICE) for x in tensors], asked, None)
            value, cut = (x.item() for x in topk.states.selection().decisive())
            u = torch.cat(tensors)
            kept = (u > value) | ((u == value) & (torch.arange(len(u)) < cut))
            check(order, each, kept.tolist(), k, topk.costs[0])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 1), st.booleans())
def test_a_window_of_a_long_vector_is_exact(seed: int, at: int, fraction: float, tied: bool) -> None:
    """Above the window costs are added up in another way than inside it."""
    rng = torch.Generator().manual_seed(seed)
    u, c = torch.rand(1000, generator=rng), 10 ** (12 * torch.rand(1000, generator=rng, dtype=torch.float64) - 6)
    u = (20 * u).round() if tied else u
    order, costs = u.argsort(descending=True, stable=True).tolist(), c.tolist()
    total = math.fsum(costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spartan.ops.select.SORT_ALL", 100)
        patch.setattr("spartan.ops.select.SAMPLE", 300)
        patch.setattr("spartan.ops.select.COSTED", 300)
        for k in budgets(order, costs, total, fraction, at):
            kept = select([Part(u, c)], k).keep(u).tolist()
            check(order, costs, kept, k, float(c.sum()))


def test_sums_that_float64_cannot_hold_are_exact() -> None:
    """Cheap units that a sum of a million dear ones would swallow are counted nevertheless."""
    dear, cheap = 1e6 / 3, 1e-6 / 3
    parts = [Part(torch.full((1 << 20,), 2.0), dear), Part(torch.ones(1000), cheap), Part(torch.zeros(9), dear)]
    for k in (float((1 << 20) * Fraction(dear)), math.nextafter((1 << 20) * dear, math.inf)):
        chosen = select(parts, k)
        kept = chosen.keep(parts[0].u).sum().item(), chosen.keep(parts[1].u, 1 << 20).sum().item()
        fits = math.floor((Fraction(k) - (1 << 20) * Fraction(dear)) / Fraction(cheap) + Fraction(1e-9))
        assert kept == (1 << 20, fits)
        assert fits < 1000


@pytest.mark.parametrize(
    "method", [Spartan(), IMP(), TopKAST(), RigL(every=2), SET(every=2), Movement()], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_run_with_costs_far_apart_stays_within_its_budget(
    method: Method, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_masks, "WORTH", 100)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20), nn.Linear(20, 10), nn.Linear(10, 3))
    costs = {"0.*": 1e-6 / 3, "1.*": 0.7, "2.*": 1e6 / 3, "3.*": 123.456}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"sparsity": 0.6, "total_steps": 12, "warmup": 0.3, "finetune": 0.2, "budget": "global"}
    sparsifier = Sparsifier(model, method=method, cost=costs, kernels=kernels, **settings).attach(optimizer)
    problem = make_problem(copy.deepcopy(model), 0.6, cost=costs)
    (k,) = problem.budgets(1.0)
    for step in range(1, 13):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        kept = [int(model.get_parameter(target.name).count_nonzero()) for target in problem.targets]
        exact = sum((n * Fraction(c) for n, c in zip(kept, problem.unit_costs, strict=True)), Fraction(0))
        if step >= 4:
            assert exact <= allowed(k, problem.unit_costs)
    sparsifier.finalize()


def test_layers_at_their_least_density_are_within_the_budget() -> None:
    """What they keep and what the others share is rounded, but not up."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(4)))
    costs = {"0.*": 1e-6 / 3, "1.*": 0.7, "2.*": 1e6 / 3, "3.*": 123.456}
    problem = make_problem(model, 0.5, cost=costs, min_density={"0.*": 0.3, "1.*": 0.2, "3.*": 0.1})
    (k,) = problem.budgets(1.0)
    problem.set_apart([0, 1, 3])
    shared, *_ = problem.budgets(1.0)
    least = sum((Fraction(problem.least(i)) for i in (0, 1, 3)), Fraction(0))
    assert Fraction(shared) + least <= Fraction(k)


def test_pruning_with_costs_far_apart_stays_within_its_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 20, bias=False))
    prune(model, 0.5, cost={"0.*": 1e-6 / 3, "1.*": 1e6 / 3})
    kept = [int(p.count_nonzero()) for p in model.parameters()]
    prices = [Fraction(1e-6 / 3), Fraction(1e6 / 3)]
    total = math.fsum(600 * float(price) for price in prices)
    exact = sum((n * price for n, price in zip(kept, prices, strict=True)), Fraction(0))
    assert exact <= allowed(0.5 * total, [1e-6 / 3, 1e6 / 3])
