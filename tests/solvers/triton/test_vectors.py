"""Vectors of units by kernels: random numbers however weights lie, and probabilities within a budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spartan.problem import problem as problem_module
from spartan.problem.schedules import Moment
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton.single import TritonSolver
from tests.solvers.building import build, problem_of
from tests.solvers.triton import DEVICE

SIZES = [(40, 30), (7, 11, 3, 3), (1, 1), (500, 9)]


def tensors(channels_last: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(size, device=DEVICE) for size in SIZES]
    if channels_last:
        found[1] = found[1].to(memory_format=torch.channels_last)
    return found


def solver(channels_last: bool = False, **options: object) -> TritonSolver:
    problem = problem_of(tensors(channels_last), **options)  # type: ignore[arg-type]
    return build(TritonSolver, problem)


def test_random_numbers_are_uniform_and_belong_to_a_step() -> None:
    x = solver()
    first, again, next_one = (x.random(Moment(step, 10, 0, 10, seed=3)) for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, next_one)
    assert bool(((first >= 0) & (first < 1)).all())
    counts = torch.histc(first, 10, 0.0, 1.0)
    expected = first.numel() / 10
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9  # χ² with 9 degrees of freedom, p = 0.001
    assert first.unique().numel() > 0.99 * first.numel()


def test_random_numbers_are_those_of_a_unit_however_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "stands_by_memory", lambda target: True)  # as on a GPU
    at = Moment(1, 10, 0, 10, seed=3)
    plain, turned = solver(), solver(channels_last=True)
    assert turned.problem.by_memory
    here = slice(1200, 1200 + 7 * 11 * 9)
    one = plain.random(at)[here].view(7, 11, 3, 3)
    other = turned.random(at)[here].view(7, 3, 3, 11).permute(0, 3, 1, 2)
    assert torch.equal(one, other)


@pytest.mark.parametrize("prices", [[1.0] * 4, [1.0, 0.25, 3.0, 0.5]])
@pytest.mark.parametrize("owners", [[0, 0, 0, 0], [0, 0, 1, 1]])
@pytest.mark.parametrize("kind", ["ones", "uniform", "nearly binary", "wild", "inside"])
def test_within_budget(kind: str, owners: list[int], prices: list[float]) -> None:
    problem = problem_of(tensors(), prices=prices, owners=owners)
    fast, plain = build(TritonSolver, problem), build(TorchSolver, problem)
    n = fast.count
    s = {
        "ones": lambda: torch.ones(n),
        "uniform": lambda: torch.rand(n),
        "nearly binary": lambda: (torch.rand(n) < 0.3).float() + 0.05 * torch.randn(n),
        "wild": lambda: 10 * torch.randn(n),
        "inside": lambda: 0.01 * torch.rand(n),
    }[kind]().to(DEVICE)
    for part in (0.1, 0.5, 1.0):
        fast.k = plain.k = [part * segment.total for segment in problem.segments]
        for _ in range(2):  # a second time from other memory
            found = fast.within_budget(s.clone())
            torch.testing.assert_close(found, plain.within_budget(s), rtol=0, atol=2e-6)
        assert bool(((found >= 0) & (found <= 1)).all())


@pytest.mark.parametrize("channels_last", [False, True])
def test_samples_their_gradient_and_adam(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "stands_by_memory", lambda target: True)  # as on a GPU
    at, problem = Moment(1, 10, 0, 10, seed=3), problem_of(tensors(channels_last), owners=[0, 0, 1, 1])
    fast, plain = build(TritonSolver, problem), build(TorchSolver, problem)
    grads: list[Tensor | None] = [torch.randn_like(t.local) for t in problem.targets]
    grads[2] = None
    assert torch.equal(fast.random(at), plain.random(at))
    for x in (fast, plain):
        torch.manual_seed(1)
        s = torch.rand(x.count, device=x.device)
        s[::7], s[3::11] = 0.0, 1.0  # certain units stay so
        x.state.per_unit |= {"s": s, "mean": torch.randn_like(s), "square": torch.rand_like(s)}
    for x in (fast, plain):
        x.sample("s", "m", 2.5, at)
        x.sample_gradient("s", "m", "grad", 2.5, grads)
    for name, rtol, atol in (("m", 1e-4, 1e-6), ("grad", 1e-3, 1e-4)):  # in m(1 − m) a mask near one loses digits
        torch.testing.assert_close(fast.state.per_unit[name], plain.state.per_unit[name], rtol=rtol, atol=atol)
    certain = (fast.state.per_unit["s"] == 0) | (fast.state.per_unit["s"] == 1)
    assert torch.equal(fast.state.per_unit["m"][certain], fast.state.per_unit["s"][certain])
    before = fast.state.per_unit["s"]
    kept = before.clone()
    for x in (fast, plain):
        x.adam(("s", "mean", "square", "grad"), 1e-2, (0.9, 0.999), 1e-8, 3)
        assert "grad" not in x.state.per_unit
    assert torch.equal(before, kept)  # a failed step goes back to it
    for name in ("s", "mean", "square"):
        torch.testing.assert_close(fast.state.per_unit[name], plain.state.per_unit[name], rtol=1e-3, atol=1e-4)
