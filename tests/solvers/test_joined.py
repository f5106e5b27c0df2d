"""Targets worked on as one tensor train as separate ones do. Accelerators use it; here it is forced."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from spartan import Sparsifier
from spartan.methods import as_method
from spartan.problem import problem
from tests.contract.cases import METHODS, STEPS, Net, backward, begin

STATEFUL = {"sampled": "draws its noise in the order of units, which channels_last changes"}


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> Any:
    def switch(on: bool) -> None:
        monkeypatch.setattr(problem, "stands_by_memory", lambda target: on)

    return switch


@pytest.fixture(
    params=[torch.contiguous_format, torch.channels_last], autouse=True, ids=["contiguous", "channels_last"]
)
def memory_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test here runs with weights in both orders of memory."""
    monkeypatch.setitem(globals(), "MEMORY_FORMAT", request.param)
    return request.param


MEMORY_FORMAT = torch.contiguous_format


def build(method: Any, optimizers: int = 1) -> tuple[Net, list[torch.optim.Optimizer], Sparsifier]:
    torch.manual_seed(0)
    model = Net().double().to(memory_format=MEMORY_FORMAT)  # type: ignore[call-overload]
    split = list(model.conv.parameters()) + list(model.norm.parameters())
    rest = list(model.hidden.parameters()) + list(model.head.parameters())
    parts = [split, rest] if optimizers == 2 else [split + rest]
    found = [torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3) for p in parts]
    method = as_method(method)
    begin(model, method, 0.7)
    # What is fixed from the first step would have no flat tensor to look at.
    finetune = 0.25 if method.keeps_zeros else None
    sparsifier = Sparsifier(model, 0.7, STEPS, method, budget="global", finetune=finetune).attach(*found)
    return model, found, sparsifier  # type: ignore[return-value]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_one_tensor_is_separate_ones(method: str, optimizers: int, fuse: Any) -> None:
    if method in STATEFUL and torch.channels_last == MEMORY_FORMAT:
        pytest.skip(STATEFUL[method])
    fuse(False)
    one, optimizers_one, a = build(METHODS[method], optimizers)
    fuse(True)
    two, optimizers_two, b = build(METHODS[method], optimizers)
    if not METHODS[method].identity:
        assert b._run.weights.solving[0].joined
    assert not a._run.weights.solving[0].joined
    for step in range(STEPS + 2):
        train(one, optimizers_one, range(step, step + 1))
        train(two, optimizers_two, range(step, step + 1))
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)
        for name, mask in a.masks().items():
            assert torch.equal(mask, b.masks()[name])
        x, y = a.stats, b.stats
        assert (x.step, x.phase, x.density, x.cost, x.beta) == (y.step, y.phase, y.density, y.cost, y.beta)
        assert [layer.kept for layer in a.layers()] == [layer.kept for layer in b.layers()]
        assert a.mask_histogram() == b.mask_histogram()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [4, 11])
def test_a_run_over_one_tensor_resumes(method: str, stop: int, fuse: Any) -> None:
    fuse(True)
    model, optimizers, sparsifier = build(METHODS[method])
    train(model, optimizers, range(stop))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizers[0].state_dict(), sparsifier.state_dict()], file)
    train(model, optimizers, range(stop, STEPS))
    file.seek(0)
    again, optimizers_again, sparsifier_again = build(METHODS[method])
    parts = (again, optimizers_again[0], sparsifier_again)
    for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    train(again, optimizers_again, range(stop, STEPS))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("method", ["spartan", "topkast", "imp", "static", "rigl-often", "set-often", "acdc"])
@pytest.mark.parametrize("stop", [4, 11])
@pytest.mark.parametrize("on", [True, False], ids=["to separate", "to one"])
def test_a_run_moves_between_the_two(method: str, stop: int, on: bool, fuse: Any) -> None:
    """A state is by parameter name, so a run may move between an accelerator and a CPU."""
    fuse(on)
    model, optimizers, sparsifier = build(METHODS[method])
    train(model, optimizers, range(stop))
    states = copy.deepcopy((model.state_dict(), optimizers[0].state_dict(), sparsifier.state_dict()))
    fuse(not on)
    again, optimizers_again, sparsifier_again = build(METHODS[method])
    for part, state in zip((again, optimizers_again[0], sparsifier_again), states, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    train(model, optimizers, range(stop, STEPS))
    train(again, optimizers_again, range(stop, STEPS))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("on", [True, False], ids=["to separate", "to one"])
def test_learned_values_move_between_the_two(on: bool, fuse: Any) -> None:
    """What the method learned moves too, by the names of its targets."""
    fuse(on)
    model, optimizers, sparsifier = build("movement")
    train(model, optimizers, range(6))
    fuse(not on)
    again, _, sparsifier_again = build("movement")
    again.load_state_dict(model.state_dict())
    sparsifier_again.load_state_dict(sparsifier.state_dict())
    for name, mask in sparsifier.masks().items():
        assert torch.equal(mask, sparsifier_again.masks()[name])
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("method", ["spartan", "topkast", "imp"])
def test_missing_gradients(method: str, fuse: Any) -> None:
    found = []
    for on in (False, True):
        fuse(on)
        model, optimizers, sparsifier = build(method)
        train(model, optimizers, range(3))
        backward(model, 3)
        model.hidden.weight.grad = None
        sparsifier.backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
