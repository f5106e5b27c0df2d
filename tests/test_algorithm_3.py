"""50 steps of Spartan follow Algorithm 3 of the paper, written in a straight line with autograd."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from spartan import Block, Flops, Sparsifier, Spartan, Unstructured, linear
from tests.contract.algorithm_3 import (
    DECAY,
    FREEZE,
    LR,
    MOMENTUM,
    POSITIONS,
    SPARSITY,
    Sinkhorn,
    SoftTopK,
    T,
    exact,
    reference,
)
from tests.contract.cases import Net, batch

# The side of the blocks, whether FLOPs are the cost, and the value power.
shapes = pytest.mark.parametrize(
    ("side", "flops", "power"),
    [
        pytest.param(1, False, 1.0, id="unstructured"),
        pytest.param(2, False, 1.0, id="block"),
        pytest.param(1, True, 1.0, id="flops-v1"),
        pytest.param(1, True, 0.5, id="flops-v0.5"),
        pytest.param(2, True, 0.5, id="block-flops"),
    ],
)


def compare(soft: SoftTopK, side: int, flops: bool, power: float, **options: Any) -> None:
    """w of every step is that of the straight line."""
    torch.manual_seed(0)
    model = Net().double()
    beta_end = 30.0 * math.sqrt(side**2)  # blocks scale the end of β by √(h·w)
    table = POSITIONS if flops else dict.fromkeys(POSITIONS, 1.0)
    project = options.get("project", True)
    expected = reference(copy.deepcopy(model), soft, side, table, power, beta_end, project)
    sparsifier = Sparsifier(
        model,
        SPARSITY,
        T,
        Spartan(beta=linear(1, 30), **options),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64), value_power=power) if flops else None,
        warmup=0.2,
        finetune=0.2,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    for t in range(T + 1):
        for name, w in expected[t].items():
            torch.testing.assert_close(
                model.get_parameter(name).detach(), w, rtol=0, atol=1e-10, msg=f"step {t}, {name}"
            )
        if t == FREEZE:
            assert sparsifier.stats.beta == pytest.approx(beta_end)
            assert sparsifier.stats.phase == "finetune"
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@shapes
def test_fifty_steps(side: int, flops: bool, power: float) -> None:
    compare(exact, side, flops, power)


@shapes
def test_fifty_steps_without_the_projection(side: int, flops: bool, power: float) -> None:
    compare(exact, side, flops, power, project=False)


@shapes
@pytest.mark.parametrize("init", ["cold", "cached", "threshold"])
def test_fifty_steps_by_the_papers_iteration(side: int, flops: bool, power: float, init: str) -> None:
    compare(Sinkhorn(init), side, flops, power, solver="sinkhorn", init=init)
