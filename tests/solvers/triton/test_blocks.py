"""The kernels of blocks, rows and columns, one by one, against plain torch on odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spartan import Block, Channel, Spartan
from spartan.problem.patterns import Pattern
from spartan.solvers.forms import KEPT, VJP, Form, Mask
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton.blocks import BlockSolver, grid_of
from tests.solvers.building import build, problem_of, set_theta, weights_of
from tests.solvers.triton import DEVICE, test_runs

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


def other_order(x: Tensor) -> Tensor:
    """The same with its memory in another order: channels last, column after column, or all dimensions backwards."""
    if x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))


def both(
    pattern: Pattern, dtype: torch.dtype, any_order: bool = False, split: bool = False
) -> tuple[TorchSolver, BlockSolver]:
    """The same problem twice, plain and with kernels; `split` divides the targets among two segments."""
    rng = torch.Generator().manual_seed(0)
    thetas = [torch.randn(shape, generator=rng).to(DEVICE, dtype) for shape in SHAPES[pattern]]
    if any_order:  # of all but the first
        thetas = [t if i == 0 and t.ndim < 3 else other_order(t) for i, t in enumerate(thetas)]
    prices = [1.0 + 0.5 * i for i in range(len(thetas))]
    owners = [int(split and i > 0) for i in range(len(thetas))]
    problems = [problem_of(thetas, pattern, prices, value_power=0.5, owners=owners) for _ in range(2)]
    assert BlockSolver.why_not(problems[1], "triton") == ""
    return build(TorchSolver, problems[0]), build(BlockSolver, problems[1])


@pytest.mark.parametrize("pattern", list(SHAPES), ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_units_agree(pattern: Pattern, dtype: torch.dtype) -> None:
    agree(pattern, dtype)


@pytest.mark.parametrize("pattern", list(SHAPES), ids=repr)
def test_units_agree_in_any_order_of_memory(pattern: Pattern) -> None:
    agree(pattern, torch.float32, any_order=True)


@pytest.mark.parametrize("pattern", list(SHAPES), ids=repr)
def test_units_agree_in_several_segments(pattern: Pattern) -> None:
    agree(pattern, torch.float32, split=True)


def agree(pattern: Pattern, dtype: torch.dtype, any_order: bool = False, split: bool = False) -> None:
    """Scores, thresholds, weights and gradients by the kernels and in plain torch."""
    plain, fast = both(pattern, dtype, any_order, split)
    k, soft = [0.4 * s.total for s in plain.problem.segments], Form(Mask.SOFT, VJP.THROUGH)
    for solver in (plain, fast):
        solver.solve(k, [6.0] * len(k))
    torch.testing.assert_close(fast.scores(), plain.scores(), rtol=1e-6, atol=0)
    assert torch.equal(fast.kept(soft), plain.kept(soft))
    assert fast.dual.mus() == pytest.approx(plain.dual.mus(), rel=1e-5, abs=1e-5)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    for form in (soft, Form(Mask.ONE, KEPT)):
        assert fast.serves(form)
        fast.write(form)
        for w, found in zip(plain.weights(form), weights_of(fast), strict=True):
            torch.testing.assert_close(found, w, **close)
            assert torch.equal(found == 0, w == 0)
            assert not (torch.signbit(found) & (found == 0)).any()
        rng, views = torch.Generator().manual_seed(1), plain.theta.views
        grads: list[Tensor | None] = [torch.empty_like(t).copy_(torch.randn(t.shape, generator=rng)) for t in views]
        grads[1] = None  # one that the loss did not reach
        mine = [None if g is None else g.clone(memory_format=torch.preserve_format) for g in grads]
        if form is soft:
            expected = plain._through_mask(form, grads)
            fast.through_mask(form, mine)
        else:
            expected = plain._where(form, KEPT, grads)
            fast.where(form, mine)
        for i, (g, e) in enumerate(zip(mine, expected, strict=True)):
            assert (g is None) == (i == 1)
            if g is not None and e is not None:
                torch.testing.assert_close(g, e, **close)
    if dtype == torch.float32:
        assert float(fast.flags.residuals[:, 1].max()) < 1e-5


@pytest.mark.parametrize("pattern", [Block(3, 5), Channel("in")], ids=repr)
def test_ties_and_edges(pattern: Pattern) -> None:
    """Units all alike, or all zero, are cut by position; nothing and everything are budgets too."""
    for fill in (0.0, 0.25):
        plain, fast = both(pattern, torch.float32)
        for solver in (plain, fast):
            set_theta(solver, [torch.full_like(t, fill) for t in solver.theta.views])
        for share in (0.0, 0.3, 1.0):
            k = share * plain.problem.total
            plain.solve([k])
            fast.solve([k])
            if pattern == Block(3, 5):  # all of one size: the sums are the same whatever their order
                assert torch.equal(plain.kept(Form()), fast.kept(Form()))
            cost = float(fast.cost_of(fast.kept(Form())))
            assert cost <= k * (1 + 1e-9)
            assert share < 1.0 or cost == pytest.approx(plain.problem.total)


def test_theta_in_and_out_in_any_order_of_memory() -> None:
    _, fast = both(Channel("in"), torch.float32, any_order=True)
    targets = range(len(fast.problem.targets))
    with torch.no_grad():
        for w in weights_of(fast):
            w.mul_(2.0)
    fast.take(targets)
    fast.put(targets)
    for theta, w in zip(fast.theta.views, weights_of(fast), strict=True):
        assert theta.stride() == w.stride()
        assert torch.equal(theta, w)


@pytest.mark.parametrize("pattern", [Block(4, 8), Channel("in"), Channel()], ids=repr)
def test_a_run_with_channels_last(pattern: Pattern) -> None:
    assert "by triton\n" in repr(test_runs.same(Spartan(), channels_last=True, steps=3, pattern=pattern))
    sparsifier = test_runs.same(test_runs.METHODS["imp"], channels_last=True, pattern=pattern)
    assert sparsifier.stats.phase == "finetune"


def test_rows_that_are_units_are_read_as_they_lie() -> None:
    """Whatever the order within a row: no table of columns, which for one row is as long as the weight."""
    w = torch.empty(6, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    assert grid_of(w, 1, 36).columns is None
    columns = grid_of(w, 2, 9).columns
    assert columns is not None
    assert columns[:10].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32, 1]
    assert grid_of(torch.empty(5, 6).t(), 2, 1)[:5] == (3, 2, 5, 1, 1)
