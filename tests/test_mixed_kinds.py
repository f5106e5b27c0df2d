"""Models whose weights differ in dtype or layout: parts with solvers of their own, one budget over all, resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import Block, Sparsifier, TopKAST
from spartan.methods import as_method
from tests.contract.cases import METHODS, begin

STEPS = 10
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Mixed(nn.Module):
    """Every layer in another precision; the middle one is large enough for chunks."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        sizes = [(12, wide), (wide, wide), (wide, 4)]
        self.layers = nn.ModuleList(nn.Linear(*size, dtype=dtype) for size, dtype in zip(sizes, DTYPES, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.get_parameter("weight").dtype)))
        return x.float()


def build(method: Any, wide: int = 16, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Sparsifier]:
    torch.manual_seed(0)
    model = begin(Mixed(wide), as_method(method), 0.75, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, Sparsifier(model, 0.75, STEPS, method, **options).attach(optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", ["global", "uniform"])
@pytest.mark.parametrize("pattern", [None, Block(2, 2)], ids=["single", "blocks"])
def test_budgets_are_met_and_a_resumed_run_is_the_same(method: str, budget: str, pattern: Any) -> None:
    model, optimizer, sparsifier = build(METHODS[method], budget=budget, pattern=pattern)
    assert len(sparsifier._run.weights.parts) == (1 if budget == "global" else 3)
    train(model, optimizer, range(4))
    three = {"model": model, "optimizer": optimizer, "sparsifier": sparsifier}
    saved = copy.deepcopy({name: x.state_dict() for name, x in three.items()})  # type: ignore[attr-defined]
    train(model, optimizer, range(4, STEPS))
    stats = sparsifier.stats
    if sparsifier.method.sparse_from != "never":
        unit = 1 if pattern is None else 4
        assert (
            stats.target_cost - unit * (1 if budget == "global" else 3) < stats.cost <= stats.target_cost * (1 + 1e-9)
        )
        assert stats.cost == sum(layer.kept for layer in sparsifier.layers())
    again, other, resumed = build(METHODS[method], budget=budget, pattern=pattern)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["sparsifier"])
    other.load_state_dict(saved["optimizer"])
    train(again, other, range(4, STEPS))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.stats == stats


def test_an_odd_layer_does_not_slow_down_the_others() -> None:
    _, _, sparsifier = build("spartan", wide=300, budget="uniform")
    text = repr(sparsifier)
    assert "by torch (few weights): 1 of 3 tensors; chunks: 1 of 3 tensors; torch (not float32 or float64" in text
    _, _, sparsifier = build("spartan", wide=300, budget="global")
    assert "by torch (not float32 or float64 on a CPU)\n" in repr(sparsifier)


def test_parts_agree_with_runs_of_their_own() -> None:
    """Where each layer has its own budget, what one does is no concern of another's."""
    model, optimizer, _ = build(TopKAST(), budget="uniform")
    train(model, optimizer, range(STEPS))
    twin, optimizer, _ = build(TopKAST(), budget="uniform", kernels="torch")
    train(twin, optimizer, range(STEPS))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_several_optimizers_over_several_parts() -> None:
    torch.manual_seed(0)
    model = Mixed()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in model.layers]
    sparsifier = Sparsifier(model, 0.75, STEPS, "spartan", budget="uniform").attach(*optimizers)
    for step in range(STEPS):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        (model(x) - x[:, :4]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert sparsifier.stats.step == STEPS
    sparsifier.finalize()
    for layer in sparsifier.layers():
        assert int(model.get_parameter(layer.name).count_nonzero()) == layer.kept == layer.parameters // 4
