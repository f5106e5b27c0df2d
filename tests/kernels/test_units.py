"""The kernels of blocks, rows and columns, one by one, against plain torch on odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import Block, Channel, Spartan
from spartan.fast import engine_for
from spartan.groups import Group
from spartan.kernels.unit_engine import UnitEngine, grid_of
from spartan.problem.patterns import Pattern
from spartan.problem.schedules import Moment
from spartan.problem.targets import Target
from tests.kernels import DEVICE, test_engine

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

# Rows and columns that are no powers of two, one row, one column, more units than a tile and a unit longer than one.
SHAPES: dict[Pattern, list[tuple[int, ...]]] = {
    Block(3, 5): [(6, 15), (9, 5, 3), (3, 5), (3, 3080)],
    Block(2, 1): [(2, 1), (6, 701), (4, 3, 3)],
    Block(1, -1): [(5, 7), (1, 2100), (3, 2, 2, 3), (3, 1)],
    Block(-1, 1): [(5, 7), (1, 33), (3, 2, 2, 3)],
    Block(-1, -1): [(5, 7), (1, 2), (3, 700)],
    Channel("in"): [(5, 7, 3, 3), (6, 5), (1, 1)],
}
AT = Moment.start(10, 0.0, 0.0, seed=0)


def other_order(x: Tensor) -> Tensor:
    """The same with its memory in another order: channels last, column after column, or all dimensions backwards."""
    if x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))


def groups(pattern: Pattern, dtype: torch.dtype, any_order: bool = False) -> tuple[Group, Group, list[Tensor]]:
    """The same group twice, plain and with kernels, and θ."""
    rng = torch.Generator().manual_seed(0)
    thetas = [torch.randn(shape, generator=rng).to(DEVICE, dtype) for shape in SHAPES[pattern]]
    if any_order:  # of all but the first
        thetas = [t if i == 0 and t.ndim < 3 else other_order(t) for i, t in enumerate(thetas)]
    prices = [1.0 + 0.5 * i for i in range(len(thetas))]

    def group() -> Group:
        tensors = [t.clone(memory_format=torch.preserve_format) for t in thetas]
        targets = [Target((f"w{i}",), nn.Parameter(t), nn.Identity(), "weight") for i, t in enumerate(tensors)]
        return Group(targets, pattern, prices, 0.5, 0.5)

    plain, fast = group(), group()
    flags = torch.full((2,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    fast.engine, path = engine_for(fast, thetas, flags, 0, out, "triton")
    assert path == "triton kernels"
    return plain, fast, thetas


@pytest.mark.parametrize("pattern", list(SHAPES), ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_units_agree(pattern: Pattern, dtype: torch.dtype) -> None:
    agree(pattern, dtype)


@pytest.mark.parametrize("pattern", list(SHAPES), ids=repr)
def test_units_agree_in_any_order_of_memory(pattern: Pattern) -> None:
    agree(pattern, torch.float32, any_order=True)


def agree(pattern: Pattern, dtype: torch.dtype, any_order: bool = False) -> None:
    """Scores, thresholds, weights and gradients by the kernels and in plain torch."""
    plain, fast, thetas = groups(pattern, dtype, any_order)
    engine, k, beta, spartan = fast.engine, 0.4 * plain.total, 6.0, Spartan()
    assert isinstance(engine, UnitEngine)
    fast.threshold, fast.dual = fast.soft_top(thetas, k, beta)
    plain.threshold, plain.dual = plain.soft_top(thetas, k, beta)
    for u, v in zip(plain.scores(thetas), fast.scores(thetas), strict=True):
        torch.testing.assert_close(u, v, rtol=1e-6, atol=0)
    keep = plain.keep(plain.scores(thetas), plain.threshold)
    for a, b in zip(keep, fast.keep(fast.scores(thetas), fast.threshold), strict=True):
        assert torch.equal(a, b)
    assert float(fast.dual.mu) == pytest.approx(float(plain.dual.mu), rel=1e-5, abs=1e-5)  # type: ignore[arg-type]
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}

    for soft, dual in ((True, plain.dual), (False, None)):
        engine.project(soft=soft)
        plain.dual = dual
        for w, target in zip(spartan.weights(plain, thetas, AT), fast.targets, strict=True):
            torch.testing.assert_close(target.parameter.detach(), w, **close)
            assert torch.equal(target.parameter == 0, w == 0)
            assert not (torch.signbit(target.parameter) & (target.parameter == 0)).any()
        rng = torch.Generator().manual_seed(1)
        grads: list[Tensor | None] = [torch.empty_like(t).copy_(torch.randn(t.shape, generator=rng)) for t in thetas]
        grads[1] = None  # one that the loss did not reach
        mine = [None if g is None else g.clone(memory_format=torch.preserve_format) for g in grads]
        expected = spartan.gradient(plain, thetas, grads, AT)
        engine.through_mask(mine) if soft else engine.where_kept(mine)
        for i, (g, e) in enumerate(zip(mine, expected, strict=True)):
            assert (g is None) == (i == 1)
            if g is not None and e is not None:
                torch.testing.assert_close(g, e, **close)
    if dtype == torch.float32:
        assert engine.out[1].item() < 1e-5


@pytest.mark.parametrize("pattern", [Block(3, 5), Channel("in")], ids=repr)
def test_ties_and_edges(pattern: Pattern) -> None:
    """Units all alike, or all zero, are cut by position; nothing and everything are budgets too."""
    for fill in (0.0, 0.25):
        plain, fast, thetas = groups(pattern, torch.float32)
        for theta in thetas:
            theta.fill_(fill)
        for share in (0.0, 0.3, 1.0):
            k = share * plain.total
            scores = plain.scores(thetas)
            if pattern == Block(3, 5):  # all of one size: the sums are the same whatever their order
                expected = plain.keep(scores, plain.top(thetas, k))
                for a, b in zip(expected, fast.keep(fast.scores(thetas), fast.top(thetas, k)), strict=True):
                    assert torch.equal(a, b)
            kept = [int(x.sum()) for x in fast.keep(fast.scores(thetas), fast.top(thetas, k))]
            cost = sum(n * c for n, c in zip(kept, fast.unit_costs, strict=True))
            assert cost <= k * (1 + 1e-9)
            assert share < 1.0 or cost == pytest.approx(plain.total)


def test_scores_have_the_gradient_of_the_plain_ones() -> None:
    """A method of its own may differentiate them: the kernels' rounding, and the gradient of the sum."""
    plain, fast, thetas = groups(Block(3, 5), torch.float32)
    leaves = [t.detach().requires_grad_() for t in thetas]
    for u, v in zip(fast.scores(leaves), fast.scores(thetas), strict=True):
        assert torch.equal(u, v)
    found = torch.autograd.grad([u.sum() for u in fast.scores(leaves)], leaves)
    expected = torch.autograd.grad([u.sum() for u in plain.scores(leaves)], leaves)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_theta_in_and_out_in_any_order_of_memory() -> None:
    _, fast, thetas = groups(Channel("in"), torch.float32, any_order=True)
    engine = fast.engine
    assert isinstance(engine, UnitEngine)
    with torch.no_grad():
        for target in fast.targets:
            target.parameter.mul_(2.0)
    engine.take()
    engine.put()
    for t, target in zip(thetas, fast.targets, strict=True):
        assert t.stride() == target.parameter.stride()
        assert torch.equal(t, target.parameter)


@pytest.mark.parametrize("pattern", [Block(4, 8), Channel("in"), Channel()], ids=repr)
def test_a_run_with_channels_last(pattern: Pattern) -> None:
    assert "by triton kernels" in repr(test_engine.same(Spartan(), channels_last=True, steps=3, pattern=pattern))
    sparsifier = test_engine.same(test_engine.METHODS["imp"], channels_last=True, pattern=pattern)
    assert sparsifier.stats.phase == "finetune"


def test_rows_that_are_units_are_read_as_they_lie() -> None:
    """Whatever the order within a row: no table of columns, which for one row is as long as the weight."""
    w = torch.empty(6, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    assert grid_of(w, 1, 36).columns is None
    columns = grid_of(w, 2, 9).columns
    assert columns is not None
    assert columns[:10].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32, 1]
    assert grid_of(torch.empty(5, 6).t(), 2, 1)[:5] == (3, 2, 5, 1, 1)
