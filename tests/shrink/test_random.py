"""Nets of random structure with random channels dead: the same outputs at every size, and nothing dead is refused."""

from __future__ import annotations

import random
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan.shrink import shrink
from tests.shrink.nets import RandomNet, kill_channels, largest_difference


def check_random_net(seed: int) -> tuple[int, int]:
    torch.manual_seed(seed)
    model = RandomNet(seed).double().eval()
    kill_channels(model, random.Random(seed).choice([0.2, 0.5, 0.8]), seed)
    x = torch.randn(2, model.channels, 16, 16, dtype=torch.double)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing can be cut")
        smaller, report = shrink(model, x, report=True)
    assert report.refused == ()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    others = [torch.randn(2, model.channels, 16, 16, dtype=torch.double)]
    others += [] if model.flat else [torch.randn(1, model.channels, 24, 20, dtype=torch.double)]
    with torch.no_grad():
        assert all(largest_difference(model(other), smaller(other)) < 1e-10 for other in others)
    assert report.after == sum(p.numel() for p in smaller.parameters())
    return report.before, report.after


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_nets(first: int) -> None:
    sizes = [check_random_net(seed) for seed in range(first, first + 10)]
    assert sum(after for _, after in sizes) < 0.7 * sum(before for before, _ in sizes)


@pytest.mark.slow
def test_many_random_nets() -> None:
    for seed in range(1000, 1400):
        check_random_net(seed)


def straight_counts(weights: list[Tensor], biases: list[Tensor | None]) -> list[int]:
    """How many of each layer's outputs have to stay, in a chain of linear layers with ReLU between, in plain loops.

    An output is a constant if it has weights for constants only. One is needed if it is not, and a needed output of the next
    layer has a weight for it. Of those that are constants other than zero, and that a needed output reads, one stays where
    the next layer has no bias.
    """
    constants: list[dict[int, float]] = []
    known: dict[int, float] = {}
    for weight, bias in zip(weights, biases, strict=True):
        found = {}
        for o in range(weight.shape[0]):
            reads = [i for i in range(weight.shape[1]) if weight[o, i] != 0]
            if all(i in known for i in reads):
                value = sum(float(weight[o, i]) * known[i] for i in reads) + (0.0 if bias is None else float(bias[o]))
                found[o] = max(value, 0.0)
        constants.append(found)
        known = found
    needed = set(range(weights[-1].shape[0]))
    counts = [len(needed)]
    for layer in range(len(weights) - 1, 0, -1):
        weight, fixed = weights[layer], constants[layer - 1]
        read = {i for i in range(weight.shape[1]) if any(weight[o, i] != 0 for o in needed)}
        stays = read - fixed.keys()
        if biases[layer] is None and any(fixed[i] != 0 for i in read & fixed.keys()):
            stays |= {max((i for i in read & fixed.keys()), key=lambda i: fixed[i])}
        needed = stays or {0}
        counts.append(len(needed))
    return counts[::-1]


@pytest.mark.parametrize("seed", range(12))
def test_chains_are_as_narrow_as_a_plain_count_says(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths = [7, *torch.randint(5, 30, (3,), generator=generator).tolist(), 4]
    layers = [nn.Linear(a, b, bias=bool(torch.rand((), generator=generator) < 0.6)) for a, b in pairwise(widths)]
    model: Any = nn.Sequential(*(x for layer in layers for x in (layer, nn.ReLU())))[:-1].double().eval()
    kill_channels(model, 0.4, seed)
    expected = straight_counts(
        [x.weight.data for x in layers], [None if x.bias is None else x.bias.data for x in layers]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing can be cut")
        smaller = shrink(model, torch.randn(3, 7, dtype=torch.double))
    assert [len(layer.weight) for layer in smaller if isinstance(layer, nn.Linear)] == expected


class ResidualStack(nn.Module):
    """Blocks around a stream of channels, with batch norm."""

    def __init__(self, width: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
                nn.Conv2d(inner, width, 3, padding=1, bias=False),
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.relu().mean((2, 3)))


@pytest.mark.parametrize("seed", range(4))
def test_residual_streams_by_a_plain_count(seed: int) -> None:
    """A channel of the stream goes if all that write it write zeros, or if nobody reads it; an inner one if it is zero."""
    torch.manual_seed(seed)
    model: Any = ResidualStack(16, 12, 3).double().eval()
    dead = torch.rand(16) < 0.4  # written by nobody
    unread = torch.rand(16) < 0.3
    inner = [torch.rand(12) < 0.5 for _ in model.blocks]
    with torch.no_grad():
        writers = [model.stem, *(block[3] for block in model.blocks)]
        for layer in writers:
            layer.weight[dead] = 0.0
        for layer in (*(block[0] for block in model.blocks), model.head):
            layer.weight[:, unread] = 0.0
        writers[1].weight[~dead & (torch.rand(16) < 0.5)] = 0.0  # one writer alone does not kill a channel
        for block, gone in zip(model.blocks, inner, strict=True):
            block[0].weight[gone] = 0.0
            block[1].bias.normal_()
            block[1].running_mean.normal_()
    smaller, report = shrink(model, torch.randn(2, 3, 8, 8, dtype=torch.double), report=True)
    assert smaller.stem.out_channels == smaller.head.in_features == int((~dead & ~unread).sum())
    for block, old, gone in zip(smaller.blocks, model.blocks, inner, strict=True):
        norm = old[1]
        constant = norm.bias - norm.running_mean * norm.weight * (norm.running_var + norm.eps).rsqrt()
        carried = bool((constant[gone] > 0).any())  # a constant that is padded needs a channel
        assert block[0].out_channels == block[3].in_channels == int((~gone).sum()) + carried
    assert report.refused == ()
