"""Channels: whole outputs or whole inputs live or die together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import spartan
from spartan import Block, Channel, Flops, Sparsifier
from spartan.problem.problem import make_problem
from tests.contract.cases import Net, backward


@pytest.mark.parametrize("side", ["out", "in"])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2), (6, 4, 1, 1)])
def test_reduce_and_expand_are_adjoint(side: str, shape: tuple[int, ...]) -> None:
    pattern, x = Channel(side), torch.randn(shape, dtype=torch.float64)
    units = pattern.reduce(x)
    assert units.numel() * pattern.unit_size(shape) == math.prod(shape)
    y = torch.randn_like(units)
    spread = pattern.expand(y, shape)
    assert spread.shape == x.shape
    torch.testing.assert_close((units * y).sum(), (x * spread).sum())
    axis = 0 if side == "out" else 1
    for i in range(shape[axis]):
        assert (spread.select(axis, i) == y[i]).all()
        torch.testing.assert_close(units[i], x.select(axis, i).sum())


def test_output_channels_are_rows() -> None:
    x = torch.randn(4, 6, 3, 3)
    torch.testing.assert_close(Channel().reduce(x), Block(1, -1).reduce(x))
    assert Channel().unit_size(x.shape) == Block(1, -1).unit_size(x.shape)


def runs(pattern: Any, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(model, 0.5, 10, pattern=pattern, **options).attach(optimizer)
    for step in range(10):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()
    return model


@pytest.mark.parametrize("options", [{}, {"budget": "uniform"}, {"cost": Flops(torch.zeros(1, 2, 6, 6).double())}])
def test_output_channels_train_as_rows(options: dict[str, Any]) -> None:
    a, b = runs(Channel(), **options), runs(Block(1, -1), **options)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("side", ["out", "in"])
def test_whole_channels_are_gone(side: str) -> None:
    model = runs(Channel(side), budget="uniform")
    for weight in (model.conv.weight, model.hidden.weight, model.head.weight):
        channels = weight.detach().transpose(0, 0 if side == "out" else 1).flatten(1)
        assert int((channels != 0).all(1).sum()) == len(channels) // 2
        assert int((channels == 0).all(1).sum()) == len(channels) // 2


def test_prune_removes_the_weakest_inputs() -> None:
    layer = nn.Conv2d(3, 2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 3.0, 2.0]).view(1, 3, 1, 1).expand(2, 3, 2, 2))
    spartan.prune(layer, 1 / 3, pattern=Channel("in"))
    assert (layer.weight != 0).any(-1).any(-1).all(0).tolist() == [False, True, True]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="side='rows' is unknown"):
        Channel("rows")
    with pytest.raises(ValueError, match=r"Channel\(\) is for weights that stand as outputs × inputs.* of weight"):
        make_problem(nn.ConvTranspose1d(4, 4, 2), 0.5, pattern=Channel())
    with pytest.raises(ValueError, match=r"Channel\('in'\) has no meaning for 2 groups of inputs .*exclude"):
        make_problem(nn.Conv2d(4, 4, 2, groups=2), 0.5, pattern=Channel("in"))
    problem = make_problem(nn.Conv2d(4, 4, 2, groups=2), 0.5, pattern=Channel())
    assert problem.units == [4]
