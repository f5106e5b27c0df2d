"""Whole runs of every method on blocks, channels and N:M: by kernels against plain torch, and saved and continued."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from spartan import NM, Block, Channel, Sparsifier, TopKAST
from spartan.methods import ProbMask, SViTE  # type: ignore[attr-defined]
from spartan.methods.base import Method
from spartan.methods.set import SET
from spartan.problem.patterns import Pattern
from tests.solvers.triton import DEVICE
from tests.solvers.triton.test_runs import METHODS as OF_SINGLE_WEIGHTS
from tests.waiting import check_no_step_waits

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)
METHODS: dict[str, Method] = OF_SINGLE_WEIGHTS | {
    "probmask": ProbMask(),
    "set": SET(every=2, fraction=0.5),
    "svite": SViTE(every=2, importance="taylor"),
}
OF_NM = {
    name: replace(method, backward_sparsity=0.25)
    if isinstance(method, TopKAST) and method.backward_sparsity
    else method
    for name, method in METHODS.items()
    if not method.refuses_nm
}
STEPS = 3  # the first of warm-up


def build(kernels: str, method: Method, pattern: Pattern, **options: Any) -> tuple[Any, Any, Sparsifier]:
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    settings: dict[str, Any] = {
        "sparsity": 0.5,
        "total_steps": STEPS,
        "warmup": 0.34,
        "finetune": 0.0,
        "budget": "uniform",
    }
    sparsifier = Sparsifier(model, method=method, kernels=kernels, pattern=pattern, **settings | options)
    return model, optimizer, sparsifier.attach(optimizer)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 8, 3, 3, generator=rng).to(DEVICE), torch.randint(8, (16,), generator=rng).to(DEVICE)
        # The first layer, a segment of its own, is out of the loss's reach once.
        out = model(x) if step != 1 else model[3:](x.flatten(1)[:, :32])
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def runs_alike(method: Method, pattern: Pattern) -> None:
    plain, optimizer, of_plain = build("torch", method, pattern)
    fast, optimizer_fast, of_fast = build("triton", method, pattern)
    (part,) = of_fast._run.weights.parts  # all segments are one
    assert len(part.problem.segments) == 3
    for step in range(STEPS):
        train(plain, optimizer, range(step, step + 1))
        train(fast, optimizer_fast, range(step, step + 1))
        for (key, mask), other in zip(of_plain.masks().items(), of_fast.masks().values(), strict=True):
            assert torch.equal(mask, other), key
        for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            assert torch.equal(a == 0, b == 0)
        if step == 1 and "sinkhorn" not in repr(method):
            assert "by triton\n" in repr(of_fast)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "probmask"])  # kernels draw other numbers
def test_blocks(name: str) -> None:
    runs_alike(METHODS[name], Block(4, 4))


@pytest.mark.parametrize("name", ["topkast-b", "st3", "spartan-learned", "rigl", "str"])
def test_channels(name: str) -> None:
    runs_alike(METHODS[name], Channel("in"))


@pytest.mark.parametrize("name", list(OF_NM))
def test_four_of_eight(name: str) -> None:
    runs_alike(OF_NM[name], NM(4, 8))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *((name, Block(4, 4)) for name in ("topkast-b", "st3", "spartan-learned", "rigl", "str", "probmask")),
        *((name, NM(2, 4)) for name in ("topkast-every", "movement", "st3", "spartan-learned", "acdc")),
    ],
    ids=repr,
)
def test_resume_is_bit_identical(name: str, pattern: Pattern) -> None:
    method = (METHODS if pattern.rows is None else OF_NM)[name]
    first, again = build("triton", method, pattern), build("triton", method, pattern)
    train(*first[:2], range(2))
    for part, state in zip(again, copy.deepcopy([x.state_dict() for x in first]), strict=True):
        part.load_state_dict(state)
    for run in (first, again):
        train(*run[:2], range(2, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), again[0].parameters(), strict=True))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="on a CPU there is nothing to wait for")
@pytest.mark.parametrize(
    ("name", "pattern"),
    [*((name, Block(4, 4)) for name in METHODS if "sinkhorn" not in name), *((name, NM(2, 4)) for name in OF_NM)],
    ids=repr,
)
def test_no_step_waits_for_the_device(name: str, pattern: Pattern) -> None:
    method = (METHODS if pattern.rows is None else OF_NM)[name]
    model, optimizer, _ = build("auto", method, pattern, total_steps=100, warmup=0.0, finetune=0.0)
    x, y = torch.randn(16, 8, 3, 3, device=DEVICE), torch.randint(8, (16,), device=DEVICE)
    check_no_step_waits(model, optimizer, x, y)
