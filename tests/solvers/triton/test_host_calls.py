"""What a step takes of the host does not creep up: how many functions of ours it calls, with launches left out.

Where a model is small, the host is what a step waits for, and there all that a step does is spread thin over Python.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan.solvers.triton.replay import Replay
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="launches are left out, which on a GPU are needed")

OURS = str(Path(spartan.__file__).parent)
# A few more than there are, by Python 3.11; later ones call fewer.
MOST = {"dense": 80, "spartan": 190, "topkast": 178}


class Handed(torch.autograd.Function):
    """Gives parameters gradients that lie where the last ones did, as an accelerator's mostly do."""

    @staticmethod
    def forward(ctx: Any, memory: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.memory = memory
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *(grad.detach() for grad in ctx.memory)


def calls(method: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of our functions in a backward and a step, in the middle of a run."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sparsifier = spartan.Sparsifier(model, 0.5, 10_000, method, warmup=0.0, kernels="triton").attach(optimizer)
    sparsifier._run.guard._waits = False  # as on a GPU
    monkeypatch.setattr(Replay, "_run", lambda *_: None)
    memory = [torch.randn_like(p) for p in model.parameters()]

    def step() -> None:
        Handed.apply(memory, *model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found.total()


@pytest.mark.parametrize("method", sorted(MOST))
def test_a_step_calls_no_more_than_it_did(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(method, 3, monkeypatch) <= MOST[method]


@pytest.mark.parametrize("method", ["spartan", "topkast"])
def test_a_further_layer_is_one_call_more(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hook in the backward; all else is done for all layers at once."""
    few, many = (calls(method, layers, monkeypatch) for layers in (3, 13))
    assert many - few <= 10
