"""The kernels of finetuning against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spartan.solvers.base import FINE
from spartan.solvers.frozen import FrozenSolver, kept_entries
from spartan.solvers.triton.frozen import FrozenTritonSolver
from tests.solvers.building import build, problem_of, weights_of
from tests.solvers.triton import DEVICE

SHAPES = [(5, 3, 2, 2), (4097, 3), (1, 1), (7, 300), (3, 2)]
DENSITY = [0.3, 0.05, 1.0, 1.0, 0.0]


def both(any_order: bool, dtype: torch.dtype, long: bool = False) -> tuple[FrozenSolver, FrozenTritonSolver]:
    """The same fixed masks twice, plain and with kernels."""
    rng = torch.Generator().manual_seed(0)
    theta = [torch.randn(shape, generator=rng).to(DEVICE, dtype) for shape in SHAPES]
    keep = [(torch.rand(shape, generator=rng) < d).to(DEVICE) for shape, d in zip(SHAPES, DENSITY, strict=True)]
    mask = [torch.rand(shape, generator=rng).to(DEVICE) for shape in SHAPES]
    if any_order:  # as it lies, whatever the order
        theta[0] = theta[0].to(memory_format=torch.channels_last)
    found: list[Any] = []
    for kind in (FrozenSolver, FrozenTritonSolver):
        problem = problem_of(theta)
        kept = [kept_entries(problem, i, *of) for i, of in enumerate(zip(theta, keep, mask, strict=True))]
        if long:
            kept = [(x, m, index.long()) for x, m, index in kept]
        found.append(build(kind, problem, kept))
    return found[0], found[1]


def assert_same(a: Tensor, b: Tensor) -> None:
    """Bit for bit; Triton's interpreter rounds to bf16 towards zero."""
    last_digit = 2.0**-7 if a.dtype == torch.bfloat16 and DEVICE.type == "cpu" else 0.0
    torch.testing.assert_close(a, b, rtol=last_digit, atol=0.0)


EVERY = range(len(SHAPES))


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_move(any_order: bool, dtype: torch.dtype) -> None:
    plain, fast = both(any_order, dtype, long=dtype == torch.float16)
    version = weights_of(fast)[0]._version
    fast.write(None)
    assert fast.problem.targets[0].parameter._version > version
    plain.write(None)
    for a, b, c in zip(weights_of(fast), weights_of(plain), plain.weights(None), strict=True):
        assert_same(a, b)
        assert torch.equal(b, c)
        assert not (torch.signbit(a) & (a == 0)).any()
    for some in ([1, 3], EVERY):  # of some targets, and of all
        for solver in (plain, fast):
            solver.put(some)
        for i, (a, b) in enumerate(zip(weights_of(fast), weights_of(plain), strict=True)):
            assert torch.equal(a, b) if i in some else True
    # The optimizer moves everything, what is gone as well.
    with torch.no_grad():
        for solver in (plain, fast):
            for w in weights_of(solver):
                w.mul_(1.5).add_(0.25)
            solver.take([0, 1, 2])
    for i, (a, b) in enumerate(zip(fast.thetas, plain.thetas, strict=True)):
        assert torch.equal(a, b), i
    for solver in (plain, fast):
        solver.take(EVERY)
        solver.write(None)
    for a, b in zip(fast.thetas, plain.thetas, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(weights_of(fast), weights_of(plain), strict=True):
        assert_same(a, b)
    assert fast.flags.bad.tolist() == [FINE, FINE]


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(any_order: bool, dtype: torch.dtype) -> None:
    plain, fast = both(any_order, dtype)
    grads: list[Tensor | None] = [torch.randn_like(w) for w in weights_of(fast)]
    grads[3] = None
    expected = plain.turn(None, [None if g is None else g.clone() for g in grads])
    for g, e in zip(fast.turn(None, grads), expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None and e is not None:
            assert_same(g, e)


def test_what_is_not_finite_stays_out() -> None:
    _, fast = both(True, torch.float32)
    fast.write(None)
    fast.put(EVERY)
    before = [theta.clone() for theta in fast.thetas]
    with torch.no_grad():
        weights_of(fast)[3].view(-1)[5] = float("nan")
        weights_of(fast)[3].view(-1)[6] = 7.0
    fast.take(EVERY)
    assert fast.flags.bad.tolist() == [FINE, 3]
    assert fast.thetas[3][5] == before[3][5]  # the fourth keeps everything
    assert fast.thetas[3][6] == 7.0
    assert all(torch.isfinite(theta).all() for theta in fast.thetas)
    # A gradient that is not finite stops everything.
    grads = [torch.ones_like(w) for w in weights_of(fast)]
    grads[1][0, 0] = float("inf")
    fast.check_gradients(grads)
    assert fast.flags.bad.tolist() == [1, 3]
    assert not any(g.any() for g in grads)
    held = [theta.clone() for theta in fast.thetas]
    with torch.no_grad():
        weights_of(fast)[3].fill_(3.0)
    fast.take(EVERY)
    assert all(torch.equal(a, b) for a, b in zip(fast.thetas, held, strict=True))
