from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spartan.ops.parts import Part
from spartan.ops.select import Threshold, boundary
from spartan.ops.soft_topk import residual_at, solve
from spartan.solvers.triton import topk
from spartan.solvers.triton.state import CUT, HARD_DONE, PASSES, SOFT_DONE, TIES
from spartan.solvers.triton.tables import Pieces
from spartan.solvers.triton.topk import TopK
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)


@pytest.fixture(autouse=True, params=[False, True], ids=["all", "samples first"])
def sampled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a threshold of which nothing is known is first sought in samples, as in large tensors."""
    monkeypatch.setattr(topk, "SAMPLED_FROM", 0 if request.param else 1 << 18)


class Case:
    """One problem after another over tensors of the same sizes, by the kernels and in plain torch."""

    def __init__(self, tensors: list[Tensor], costs: list[float] | None = None, absolute: bool = True) -> None:
        self.costs = costs or [1.0] * len(tensors)
        factors = [1.0] * len(tensors) if absolute else None
        self.absolute = absolute
        self.topk = TopK([t.numel() for t in tensors], self.costs, factors, DEVICE)
        self.states = self.topk.states

    def check(
        self,
        tensors: list[Tensor],
        k: float,
        beta: float | None = None,
        tol: float = 1e-6,
        there: list[Tensor] | None = None,
    ) -> int:
        """Solve, compare, and tell how many passes it took."""
        there = there or [t.to(DEVICE) for t in tensors]
        self.topk.solve(there, [k], None if beta is None else [beta])
        parts = []
        for t, c in zip(tensors, self.costs, strict=True):
            u = t.reshape(-1).float()
            parts.append(Part(u.abs() if self.absolute else u, c))
        edge, found = boundary(parts, k), self.states.selection().saved()[0]
        mine = Threshold(found["value"], int(found["cut"]), found["cost"])
        start, cost = 0, 0.0
        for part in parts:
            kept = mine.keep(part.u.to(DEVICE), start).cpu()
            assert torch.equal(kept, edge.threshold.keep(part.u, start))
            start, cost = start + kept.numel(), cost + int(kept.sum()) * float(part.c)
        assert mine.cost == pytest.approx(cost, rel=1e-12, abs=1e-9)
        if beta is not None:
            (dual,) = self.states.duals([beta]).each()
            expected = solve(parts, k, beta, start=edge)
            assert residual_at(dual, parts, k) <= max(tol, 2 * expected.residual)
            if 0 < k < sum(c * p.u.numel() for p, c in zip(parts, self.costs, strict=True)):
                assert dual.mu == pytest.approx(expected.mu, rel=1e-4, abs=1e-4)
            else:
                assert dual.mu == expected.mu
        return int(self.states.ints[0, PASSES.value])


def odd(seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for shape in ((333, 7), (4097,), (1,), (0,), (50, 3))]


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 10.0, 100.0])
def test_from_nothing_and_from_the_last_solution(beta: float | None) -> None:
    tensors = odd()
    case = Case(tensors)
    case.check(tensors, 1000.0, beta)
    for step in range(1, 4):
        tensors = [t + 1e-3 * torch.randn_like(t) for t in tensors]
        assert case.check(tensors, 1000.0 - 7.5 * step, beta) <= 3


@pytest.mark.parametrize("beta", [1e4, 1e6, 1e8])
def test_sharp_masks(beta: float) -> None:
    """Where the mask is all but hard the sums see single weights: k = 1,000 allows half of one, 5e-4."""
    case = Case(odd())
    case.check(odd(), 1000.0, beta, tol=5e-4)
    case.check([t * 1.01 for t in odd()], 1000.0, beta, tol=5e-4)


def test_a_jump_is_followed() -> None:
    """Values that have nothing to do with the last ones: the window misses, on both sides."""
    case = Case(odd())
    for factor in (1.0, 1e-3, 1e4, 1e-30, 1.0):
        case.check([t * factor for t in odd(1)], 500.0)


def test_costs_per_tensor() -> None:
    for k in (1000.0, 1001.3, 4000.0):
        case = Case(odd(), [1.0, 2.5, 3.0, 7.0, 0.25])
        case.check(odd(), k, 5.0)


@pytest.mark.parametrize("costs", [None, [1.0, 2.0, 3.0, 1.0, 5.0], [0.1, 0.2, 0.3, 0.1, 0.7]])
@pytest.mark.parametrize("k", [0.0, 1.0, 7.0, 1000.0, 1001.7, 3000.0])
def test_ties_are_cut_by_position(costs: list[float] | None, k: float) -> None:
    tensors = [(t * 4).round() / 4 for t in odd()]
    total = sum((costs or [1.0] * 5)[i] * t.numel() for i, t in enumerate(tensors))
    Case(tensors, costs).check(tensors, min(k, total))


def test_edges() -> None:
    zeros = [torch.zeros(10), torch.zeros(5)]
    for tensors in (zeros, [torch.full((10,), 0.3), torch.full((5,), -0.3)], [torch.ones(1), torch.tensor([2.0])]):
        n = sum(t.numel() for t in tensors)
        for k in (0.0, 0.5, n - 1.0, float(n)):
            Case(tensors).check(tensors, k, 3.0)


def test_values_of_any_sign() -> None:
    """Scores as they are: negative ones, both zeros, and −inf for what may not be kept."""
    a, b = torch.randn(100), -torch.rand(50)
    a[:20], b[:20], b[30:] = 0.0, -0.0, -math.inf
    for k in (1, 50, 80.5, 100, 129, 140):
        Case([a, b], absolute=False).check([a, b], float(k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in odd()]
    for beta in (None, 10.0, 1000.0):
        case = Case(tensors)
        case.check(tensors, 1000.0, beta, tol=1e-3 if beta == 1000.0 else 1e-6)


def test_a_saved_solution_goes_on_as_if_never_stopped() -> None:
    tensors, moved = odd(), [t * 1.001 for t in odd()]
    case = Case(tensors)
    case.check(tensors, 900.0, 10.0)
    saved = case.states.selection().saved(), case.states.duals([10.0]).each()
    again = Case(tensors)
    again.topk.cold = False
    again.states.set(*saved)
    case.check(moved, 890.0, 11.0)
    again.check(moved, 890.0, 11.0)
    assert torch.equal(case.states.floats, again.states.floats)
    # How far the threshold had moved is not saved: only where it is looked for first differs.
    for place in (CUT, TIES, HARD_DONE, SOFT_DONE):
        assert case.states.ints[0, place.value] == again.states.ints[0, place.value]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    value = st.floats(-1e3, 1e3, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-42])
    tensors = [torch.tensor(data.draw(st.lists(value, min_size=n, max_size=n)), dtype=torch.float32) for n in sizes]
    costs = data.draw(st.lists(st.sampled_from([1.0, 2.0, 0.3]), min_size=len(sizes), max_size=len(sizes)))
    total = math.fsum(c * n for c, n in zip(costs, sizes, strict=True))
    k = data.draw(st.floats(0, 1)) * total
    Case(tensors, costs, absolute=data.draw(st.booleans())).check(tensors, k)


def test_ties_far_into_a_long_piece() -> None:
    """More of them than fit, in each of many pieces: the cut is found there, whichever piece it is in."""
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randint(1, 4, (n,), generator=rng).float() for n in (30_011, 70_001)]
    case = Case(tensors)
    for k in (1, 5_000, 20_000, 33_333, 40_000, 66_667, 99_999):
        case.check(tensors, float(k))


def test_tensors_that_are_not_aligned() -> None:
    """Slices start anywhere; the same problem, aligned again, is then solved by other instructions."""
    rng = torch.Generator().manual_seed(0)
    whole = [torch.randn(n + 3, generator=rng) for n in (5_000, 2_047)]
    case, there = Case([t[:-3] for t in whole]), [t.to(DEVICE) for t in whole]
    for first in (1, 0, 3):
        mine = [slice(first, len(t) - 3 + first) for t in whole]
        case.check(
            [t[part] for t, part in zip(whole, mine, strict=True)],
            700.0,
            10.0,
            there=[t[part] for t, part in zip(there, mine, strict=True)],
        )


@pytest.mark.parametrize("factor", [1.001, 1.01, 0.9, 30.0, 1e-12, 1e12])
def test_a_threshold_that_is_no_longer_near(factor: float) -> None:
    tensors = odd()
    case = Case(tensors)
    case.check(tensors, 1000.0, 10.0)
    case.check([factor * t for t in tensors], 1000.0, 10.0 / factor)


def test_shares_are_even_and_whole() -> None:
    """Every entry lies in one piece, and every program has as many of them, to within what a tensor's end leaves."""
    sizes = [100_000, 1, 0, 33_333, 2_500_000, 1_025]
    pieces = Pieces(sizes, [1.0] * 6, [1.0] * 6, DEVICE, programs=40)
    rows, shares = pieces.table.tolist(), pieces.shares.tolist()
    assert shares[0] == 0
    assert shares[-1] == len(rows)
    assert len(shares) <= 41
    for tensor, size in enumerate(sizes):
        mine = [(start, length) for which, start, length, _ in rows if which == tensor]
        assert all(start % 1024 == 0 for start, _ in mine)
        assert [start for start, _ in mine] == [sum(n for _, n in mine[:i]) for i in range(len(mine))]
        assert sum(length for _, length in mine) == size
    work = [sum(row[2] for row in rows[a:b]) for a, b in itertools.pairwise(shares)]
    assert max(work) <= sum(sizes) / 40 + 2 * 1024
    assert min(work[:-1]) >= sum(sizes) / 40 - 1024


def test_one_pass_is_enough_for_a_threshold_that_hardly_moves() -> None:
    tensors = odd()
    case = Case(tensors)
    case.check(tensors, 1000.0, 10.0)
    passes = [case.check([t * (1.0 + 1e-6 * i) for t in tensors], 1000.0, 10.0) for i in range(4)]
    assert passes[1:] == [1, 1, 1]


@pytest.mark.parametrize("costs", [None, [1.0, 2.5, 3.0, 7.0, 0.25]])
def test_budgets_that_are_on_the_device(costs: list[float] | None) -> None:
    """The same selection as with budgets that the host knows, whole units at the edge included."""
    tensors = odd()
    case, there = Case(tensors, costs, absolute=False), [t.to(DEVICE) for t in tensors]
    for k in (0.0, 7.0, (1 - 0.9) * 1000, 1000.0, 1001.7, 1e9):
        total = case.topk.costs[0]
        expected, _ = case.topk.solve_anew(there, [min(k, total)])
        found, duals = case.topk.solve_anew(there, torch.tensor([k], dtype=torch.float64, device=DEVICE))
        assert duals is None
        assert found.saved() == expected.saved()
