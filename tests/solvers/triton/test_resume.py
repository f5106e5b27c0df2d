"""A run with kernels, saved and continued: the same bits as one that never stopped."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from spartan import Sparsifier
from tests.contract.cases import METHODS, Net, batch
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)
STEPS, SAVED_AT = 8, 3


def build(method: str) -> tuple[nn.Module, torch.optim.Optimizer, Sparsifier]:
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, Sparsifier(model, 0.7, STEPS, METHODS[method], kernels="triton").attach(optimizer)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = batch(step)
        nn.functional.cross_entropy(model(x.float().to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "method",
    [
        *("spartan", "spartan-soft", "spartan-cached", "topkast-sparse-backward", "imp", "rigl-often"),
        *("spartan-learned", "movement", "feather", "paced-hurried", "st3", "str", "probmask", "powerprop"),
    ],
)
def test_resume_is_bit_identical(method: str) -> None:
    model, optimizer, sparsifier = build(method)
    train(model, optimizer, range(SAVED_AT))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
    train(model, optimizer, range(SAVED_AT, STEPS))
    again, optimizer_again, sparsifier_again = build(method)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    parts: list[Any] = [again, optimizer_again, sparsifier_again]
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    train(again, optimizer_again, range(SAVED_AT, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
