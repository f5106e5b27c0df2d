"""The kernels of blocks, rows and columns, one by one, against plain torch on odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import Block, Channel, Spartan
from spartan.fast import engine_for
from spartan.groups import Group
from spartan.kernels.unit_engine import UnitEngine
from spartan.patterns import Pattern
from spartan.schedules import Moment
from spartan.targets import Target
from tests.kernels import DEVICE

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


def groups(pattern: Pattern, dtype: torch.dtype) -> tuple[Group, Group, list[Tensor]]:
    """The same group twice, plain and with kernels, and θ."""
    rng = torch.Generator().manual_seed(0)
    thetas = [torch.randn(shape, generator=rng).to(DEVICE, dtype) for shape in SHAPES[pattern]]
    prices = [1.0 + 0.5 * i for i in range(len(thetas))]

    def group() -> Group:
        targets = [Target((f"w{i}",), nn.Parameter(t.clone()), nn.Identity(), "weight") for i, t in enumerate(thetas)]
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
    plain, fast, thetas = groups(pattern, dtype)
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
        grads: list[Tensor | None] = [torch.randn(t.shape, generator=rng).to(t) for t in thetas]
        grads[1] = None  # one that the loss did not reach
        mine = [None if g is None else g.clone() for g in grads]
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
