"""Tensors of any length at any address: everything moves, and nothing beside it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spartan.solvers.base import FINE
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton import gradient, powers, weights
from spartan.solvers.triton.launch import DTYPES
from spartan.solvers.triton.single import TritonSolver
from spartan.solvers.triton.tables import Addresses, Pieces
from tests.solvers.building import build, problem_of, weights_of
from tests.solvers.triton import DEVICE
from tests.solvers.triton.test_powers import FORMS

SIZES = (0, 1, 7, 8, 9, 1025, 2047, 2048, 2056, 4095, 4096, 4097, 6151)
KINDS = [torch.float32, torch.bfloat16, torch.float16]
AROUND = 64  # entries before and after each tensor, which nobody may touch


class Views:
    """A tensor of every size, each at so many entries from a multiple of 16 bytes, in memory that is 9 all around."""

    def __init__(self, dtype: torch.dtype, shift: int) -> None:
        torch.manual_seed(shift)
        self.rooms = [torch.full((n + 2 * AROUND,), 9.0, dtype=dtype, device=DEVICE) for n in SIZES]
        first = AROUND + shift
        self.tensors = [room[first : first + n] for room, n in zip(self.rooms, SIZES, strict=True)]
        for x in self.tensors:
            x.copy_(torch.randn(x.shape))
        self.table = Addresses(DEVICE).of(self.tensors)

    def untouched(self) -> bool:
        """Whether all around is as it was."""
        outside = [room.clone() for room in self.rooms]
        for room, x, view in zip(outside, self.tensors, self.rooms, strict=True):
            first = x.storage_offset() - view.storage_offset()
            room[first : first + len(x)] = 9.0
        return all(bool((room == 9.0).all()) for room in outside)


def run(kernel: object, *arguments: object, **kinds: object) -> None:
    table = Pieces(SIZES, [1.0] * len(SIZES), [1.0] * len(SIZES), DEVICE).table
    kernel[(len(table),)](*(table if x is None else x for x in arguments), BLOCK=2048, num_warps=8, **kinds)  # type: ignore[index]


@pytest.mark.parametrize("shifts", [(0, 0), (8, 1), (1, 8), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", KINDS)
def test_put_and_take(dtype: torch.dtype, shifts: tuple[int, int]) -> None:
    theta, parameter = (Views(dtype, shift) for shift in shifts)
    run(weights.put, parameter.table, theta.table, None, DTYPE=DTYPES[dtype])
    assert all(torch.equal(a, b) for a, b in zip(parameter.tensors, theta.tensors, strict=True))
    for x in parameter.tensors[1:]:
        x.mul_(2.0)
        x[-1] = math.inf  # stays as it was
    bad = torch.full((2,), FINE, dtype=torch.int32, device=DEVICE)
    numbers = torch.arange(len(SIZES), dtype=torch.int32, device=DEVICE)
    before = [x.clone() for x in theta.tensors]
    run(weights.take, parameter.table, theta.table, None, bad, numbers, FINE=FINE, DTYPE=DTYPES[dtype])
    for now, was in zip(theta.tensors, before, strict=True):
        assert torch.equal(now[:-1], 2.0 * was[:-1])
        assert torch.equal(now[-1:], was[-1:])
    assert bad.tolist() == [FINE, 1]
    assert theta.untouched()
    assert parameter.untouched()


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("dtype", KINDS)
def test_check_sees_the_last_entry_and_none_beyond(dtype: torch.dtype, shift: int) -> None:
    numbers = torch.arange(len(SIZES), dtype=torch.int32, device=DEVICE)
    for wrong in (1, 4, 9, 12):
        grads = Views(dtype, shift)
        for room, x in zip(grads.rooms, grads.tensors, strict=True):
            room[: AROUND + shift] = math.nan
            room[AROUND + shift + len(x) :] = math.nan
        bad = torch.full((2,), FINE, dtype=torch.int32, device=DEVICE)
        run(gradient.check, grads.table, None, bad, numbers, GRAD=DTYPES[dtype])
        assert bad[0] == FINE
        grads.tensors[wrong][-1] = math.nan
        run(gradient.check, grads.table, None, bad, numbers, GRAD=DTYPES[dtype])
        assert bad[0] == wrong
    grads = Views(dtype, shift)
    run(gradient.clear, grads.table, None, bad, FINE=FINE, GRAD=DTYPES[dtype])
    assert not any(x.any() for x in grads.tensors)
    assert grads.untouched()


@pytest.mark.parametrize("shifts", [(0, 0), (1, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("grad", KINDS)
def test_gradients_of_another_type(grad: torch.dtype, shifts: tuple[int, int]) -> None:
    theta, grads = Views(torch.bfloat16, shifts[0]), Views(grad, shifts[1])
    before = [g.clone() for g in grads.tensors]
    run(powers.times_slope, grads.table, theta.table, None, GRAD=DTYPES[grad], DTYPE=DTYPES[torch.bfloat16], POWER=2.0)
    for g, was, x in zip(grads.tensors, before, theta.tensors, strict=True):
        # The interpreter cuts bfloat16 off.
        torch.testing.assert_close(g, (was.float() * 2.0 * x.float().abs()).to(grad), rtol=2**-7, atol=0)
    assert grads.untouched()


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, 1, device=DEVICE) for n in SIZES[1:]]


@pytest.mark.parametrize("name", ["spartan", "imp", "feather", "paced", "topkast"])
def test_forms_over_odd_and_even_weights(name: str) -> None:
    """The same weights and gradients as plain torch's, from one launch over lengths of every kind."""
    found, form = [], FORMS[name]
    if form.damp is not None:
        form = form._replace(damp=torch.full((len(SIZES) - 1,), 0.25, dtype=torch.float64, device=DEVICE))
    for kind in (TritonSolver, TorchSolver):
        solver = build(kind, problem_of(tensors()))
        solver.solve(
            [0.3 * segment.total for segment in solver.problem.segments], [20.0] if name == "spartan" else None
        )
        solver.write(form)
        torch.manual_seed(1)
        turned = solver.turn(form, [torch.randn_like(w) for w in weights_of(solver)])
        if form.decay is not None:
            solver.add_decay(form, turned)
        if form.pace is not None:
            solver.pace(form, range(len(turned)))
        found.append([*weights_of(solver), *turned])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert a is not None
        assert b is not None
        assert torch.equal(a == 0, b == 0)
