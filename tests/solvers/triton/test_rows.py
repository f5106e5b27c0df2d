"""The kernels of N:M, one by one, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spartan import NM
from spartan.ops import rows
from spartan.solvers.base import FINE
from spartan.solvers.choose import solver_for
from spartan.solvers.forms import KEPT, VJP, Form, Mask
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton import nm
from spartan.solvers.triton.rows import RowSolver, on_words
from tests.solvers.building import build, problem_of, weights_of
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)


def in_order(x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The same tensor with its axes in another order in memory, the last one fastest."""
    if order is None:
        return x.clone()
    back = sorted(range(x.ndim), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def weights(m: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A single run, more runs than a tile, kernels, and every order of memory: rows, columns, channels last, and none."""
    rng = torch.Generator().manual_seed(0)
    shapes: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
        ((1, m), None),
        ((1024 // m + 10, 4 * m), None),
        ((7, 2 * m), (1, 0)),
        ((5, 2 * m, 3, 3), None),
        ((5, 2 * m, 3, 3), (0, 2, 3, 1)),
        ((2, m, 2, 3), (3, 1, 0, 2)),
        ((2, m, 5), None),
    ]
    return [in_order(torch.randn(shape, generator=rng), order).to(DEVICE, dtype) for shape, order in shapes]


def both(pattern: NM, thetas: list[Tensor]) -> tuple[TorchSolver, RowSolver]:
    """The same problem twice, plain and with kernels."""
    prices = [1.0 + 0.5 * i for i in range(len(thetas))]
    problems = [problem_of(thetas, pattern, prices, sparsity=pattern.sparsity) for _ in range(2)]
    assert RowSolver.why_not(problems[1], "triton") == ""
    return build(TorchSolver, problems[0]), build(RowSolver, problems[1])


def check(pattern: NM, thetas: list[Tensor], n: int, beta: float | None) -> None:
    """Weights and gradients of n of every m, with a soft mask or without, by the kernels and in plain torch."""
    plain, fast = both(pattern, thetas)
    form = Form(Mask.ONE, KEPT) if beta is None else Form(Mask.SOFT, VJP.THROUGH)
    for solver in (plain, fast):
        solver.solve([plain.problem.total * n / pattern.m], None if beta is None else [beta])
    assert fast.solution() == plain.solution()
    half = thetas[0].dtype != torch.float32
    close: dict[str, Any] = {"rtol": 2e-2, "atol": 1e-2} if half else {"rtol": 2e-5, "atol": 2e-6}
    assert fast.serves(form)
    fast.write(form)
    for w, found in zip(plain.weights(form), weights_of(fast), strict=True):
        torch.testing.assert_close(found, w, **close)
        assert torch.equal(found == 0, w == 0)
        assert torch.equal(torch.signbit(found), torch.signbit(w))
    rng = torch.Generator().manual_seed(1)
    grads: list[Tensor | None] = [torch.empty_like(t).copy_(torch.randn(t.shape, generator=rng)) for t in thetas]
    if len(grads) > 2:
        grads[2] = None  # one that the loss did not reach
    mine = [None if g is None else g.clone(memory_format=torch.preserve_format) for g in grads]
    expected, turned = plain.turn(form, grads), fast.turn(form, mine)
    if beta:  # the slope of a mask of float32 is known to ε/(m(1−m)), and β goes with it
        close["atol"] *= 1.0 + beta
    for g, e in zip(turned, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None and e is not None:
            torch.testing.assert_close(g, e, **close)


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(3, 7), NM(5, 64)], ids=repr)
@pytest.mark.parametrize("beta", [None, 6.0])
def test_every_shape_and_order_of_memory(pattern: NM, beta: float | None) -> None:
    check(pattern, weights(pattern.m), pattern.n, beta)


@pytest.mark.parametrize("skip", [0, 1, 4])
def test_words_of_16_bytes(skip: int) -> None:
    """Runs side by side are read by the word, unless a tensor begins within one."""
    thetas = [torch.randn(40 + skip, device=DEVICE)[skip:].view(5, 8) for _ in range(2)]
    assert both(NM(2, 4), thetas)[1]._side_by_side
    assert on_words(thetas) == (skip != 1)
    for beta in (None, 6.0):
        check(NM(2, 4), thetas, 2, beta)
    three = [torch.randn(4, 9, device=DEVICE)]
    assert not both(NM(2, 3), three)[1]._side_by_side


@pytest.mark.parametrize("beta", [None, 6.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, beta: float | None) -> None:
    """Ties are the rule there, and are cut alike."""
    check(NM(2, 4), weights(4, dtype), 2, beta)
    check(NM(3, 7), [(8 * w).round() / 8 for w in weights(7, dtype)], 3, beta)


@pytest.mark.parametrize("beta", [None, 0.0, 1e-3, 50.0])
def test_ties_are_cut_by_position(beta: float | None) -> None:
    for w in ([torch.zeros(3, 8)], [torch.full((2, 8), -0.25)], [(2 * x).round() / 2 for x in weights(4)[1:3]]):
        for n in (1, 2, 3):
            check(NM(1, 4), [x.to(DEVICE) for x in w], n, beta)


def test_all_and_nothing() -> None:
    for beta in (None, 0.0, 5.0):
        check(NM(1, 4), weights(4)[2:4], 4, beta)
    plain, fast = both(NM(1, 4), weights(4)[2:4])
    plain.solve([0.0])
    fast.solve([0.0])
    fast.write(Form())
    assert not any(w.any() for w in weights_of(fast))
    assert fast.solution() == plain.solution()


@triton.jit  # type: ignore[untyped-decorator]
def masks(values, kept, soft, numbers, runs, M: tl.constexpr, R: tl.constexpr, LANES: tl.constexpr):
    """The hard and the soft mask of some runs, written out."""
    run, lane = tl.arange(0, R)[:, None], tl.arange(0, LANES)[None, :]
    beta, n = tl.load(numbers + nm.BETA).to(tl.float32), tl.load(numbers + nm.N).to(tl.int32)
    inside = (run < runs) & (lane < M)
    u = nm.value_of(tl.load(values + run * M + lane, mask=inside, other=0.0), 1.0, M, LANES)
    keep = nm.kept_of(u, n, M, LANES)
    tl.store(kept + run * M + lane, keep, mask=inside)
    tl.store(soft + run * M + lane, nm.soft_of(u, keep, n, beta, M, LANES, 8), mask=inside)


def masks_of(u: Tensor, n: int, beta: float) -> tuple[Tensor, Tensor]:
    """By the kernels' own functions, of runs × m."""
    runs, m = u.shape
    there, numbers = u.to(DEVICE), torch.tensor([beta, n], dtype=torch.float64).to(DEVICE)
    kept, soft = torch.empty_like(there, dtype=torch.bool), torch.empty_like(there)
    tiles = {"R": 1 << (runs - 1).bit_length(), "LANES": 1 << (m - 1).bit_length()}
    masks[(1,)](there, kept, soft, numbers, runs, M=m, **tiles)
    return kept.cpu(), soft.cpu()


def check_masks(u: Tensor, n: int, beta: float) -> None:
    kept, soft = masks_of(u, n, beta)
    assert torch.equal(kept, rows.top(u, n))
    center, offset = rows.solve(u, n, beta)
    expected = torch.sigmoid((u - center[:, None]) * beta + offset[:, None])
    torch.testing.assert_close(soft, expected, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(soft.sum(1), torch.full((len(u),), float(n)), rtol=4e-6, atol=0)


@pytest.mark.parametrize("beta", [0.0, 1e-4, 1.0, 1e3, 1e10])
@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (1, 64), (63, 64), (3, 7), (5, 24)])
def test_masks_meet_their_budget_at_any_sharpness(n: int, m: int, beta: float) -> None:
    rng = torch.Generator().manual_seed(m)
    for scale in (1.0, 1e4):
        check_masks(scale * torch.randn(60, m, generator=rng).abs(), n, beta)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_run(data: st.DataObject) -> None:
    m = data.draw(st.integers(2, 9))
    n, runs = data.draw(st.integers(1, m)), data.draw(st.integers(1, 3))
    value = st.floats(0, 1e3, width=32) | st.sampled_from([0.0, 1.0, 1.0 + 2**-23, 1e-42])
    u = torch.tensor(data.draw(st.lists(value, min_size=runs * m, max_size=runs * m))).view(runs, m)
    check_masks(u, n, data.draw(st.sampled_from([0.0, 0.5, 7.0, 1e4, 1e8])))


def test_theta_in_and_out_of_the_parameters() -> None:
    thetas = weights(4)
    _, fast = both(NM(2, 4), thetas)
    every = range(len(thetas))
    with torch.no_grad():
        for w in weights_of(fast):
            w.mul_(2.0)
    version = fast.problem.targets[0].parameter._version
    fast.take(every)
    for theta, old in zip(fast.theta.views, thetas, strict=True):
        assert torch.equal(theta, 2.0 * old)
    with torch.no_grad():
        for w in weights_of(fast):
            w.zero_()
    fast.put(every)
    for theta, w in zip(fast.theta.views, weights_of(fast), strict=True):
        assert torch.equal(theta, w)
    assert fast.problem.targets[0].parameter._version > version
    grads: list[Tensor | None] = [torch.ones_like(w) for w in weights_of(fast)]
    fast.check_gradients(grads)
    assert fast.flags.bad.tolist() == [FINE, FINE]
    grads[4][0, 1, 2, 0] = float("nan")  # type: ignore[index]
    fast.check_gradients(grads)
    assert fast.flags.bad.tolist() == [4, FINE]
    assert not any(g.any() for g in grads if g is not None)


def test_nothing_as_large_as_the_weights_is_stored() -> None:
    thetas = [torch.randn(128, 128, device=DEVICE)]
    _, fast = both(NM(2, 4), thetas)
    fast.solve([0.5 * fast.problem.total], [3.0])
    fast.write(Form(Mask.SOFT, VJP.THROUGH))
    assert fast.dual is not None
    assert not fast.dual.solved
    held: list[Tensor] = []
    for owner in (fast, fast.kernels, fast.kernels.pieces, fast.ranked, fast.flags, fast.dual, fast.a):
        held += [x for x in vars(owner).values() if isinstance(x, Tensor)]
    assert len(held) > 5
    assert sum(x.numel() for x in held) < thetas[0].numel() / 50


def test_what_plain_torch_is_left_with() -> None:
    def path(weight: Tensor, pattern: NM) -> str:
        problem = problem_of([weight], pattern, sparsity=pattern.sparsity)
        problem.targets[0].parameter.data = weight  # with its gaps
        solver = solver_for(problem, build(TorchSolver, problem).flags, "triton")
        return solver.path(None)

    assert path(torch.zeros(2, 128, device=DEVICE), NM(1, 128)) == "torch (no kernels for NM(1, 128))"
    assert path(torch.zeros(4, 8, device=DEVICE)[:, :4], NM(1, 4)) == "torch (w0 has gaps in its memory)"
