"""`min_density`: layers that share a budget and keep at least their part, to the unit, at every step and after a resume."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import NM, Block, Flops, Sparsifier, prune
from spartan.methods import RigL  # type: ignore[attr-defined]
from spartan.stepping import finalize_with
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)
STEPS = 20
# The last layer's weights are small: with one budget for all, nothing would be left of it.
SMALL = 1e-3
METHODS = ["spartan", "topkast", "imp", "st3", "movement", "spartan-learned", "powerprop", RigL(every=2)]


def net(wide: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 8))
    with torch.no_grad():
        model[4].get_parameter("weight").mul_(SMALL)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(32, 24, generator=torch.Generator().manual_seed(step))


def build(method: Any, model: nn.Sequential, **options: Any) -> tuple[torch.optim.Optimizer, Sparsifier]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"sparsity": 0.9, "total_steps": STEPS, "warmup": 0.3, "finetune": 0.3, "min_density": 0.05} | options
    if method not in ("static",):
        settings.setdefault("budget", "global")
    return optimizer, Sparsifier(model, method=method, **settings).attach(optimizer)


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: range) -> Any:
    for step in steps:
        x = batch(step).to(next(model.parameters()))
        (model(x)[:, :8] - x[:, :8]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def check(sparsifier: Sparsifier, floor: float, unit: int = 1) -> None:
    """No layer under its least number of units, and the budget of all met."""
    for layer in sparsifier.layers():
        assert layer.kept >= math.ceil(floor * layer.parameters / unit - 1e-9) * unit
    stats = sparsifier.stats
    assert stats.cost <= stats.target_cost * (1 + 1e-9)
    assert stats.cost > stats.target_cost - unit


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("options", [{}, {"pattern": Block(2, 4)}], ids=["single", "blocks"])
def test_every_layer_keeps_its_part(method: Any, options: dict[str, Any]) -> None:
    model = net()
    optimizer, sparsifier = build(method, model, **options)
    unit = 8 if options else 1
    check(sparsifier, 0.05, unit)
    without = Sparsifier(net(), 0.9, STEPS, method, warmup=0, budget="global", **options).layers()
    for step in train(model, optimizer, range(STEPS)):
        check(sparsifier, 0.05, unit)
        if step == 10 and method in ("imp", "topkast"):
            assert sparsifier._run.weights.problems[0].apart[-1] == 2
    sparsifier.finalize()
    left = int(model[4].get_parameter("weight").count_nonzero())
    # What has grown from zero stays there where no gradient has reached it.
    found = sparsifier.layers()[2].kept if sparsifier.method.grows_from_zero else left
    assert found >= math.ceil(0.05 * 128 / unit) * unit
    if method in ("imp", "topkast", "spartan"):
        assert without[2].kept == 0  # there is something to test


def test_large_layers_go_through_chunks() -> None:
    model, plain = net(300), net(300)
    found = []
    for each, kernels in ((model, "auto"), (plain, "torch")):
        optimizer, sparsifier = build("spartan", each, kernels=kernels)
        assert ("chunks" in repr(sparsifier)) == (kernels == "auto")
        for _ in train(each, optimizer, range(STEPS)):
            check(sparsifier, 0.05)
        found.append(sparsifier)
    assert found[0].layers() == found[1].layers()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("method", ["spartan", "imp", "topkast"])
@pytest.mark.parametrize("pattern", [None, Block(2, 4)], ids=["single", "blocks"])
def test_kernels_agree(method: str, pattern: Any) -> None:
    models = [net().to(DEVICE) for _ in range(2)]
    runs = [
        build(method, model, kernels=kernels, pattern=pattern)
        for model, kernels in zip(models, ("triton", "torch"), strict=True)
    ]
    for model, (optimizer, sparsifier) in zip(models, runs, strict=True):
        for _ in train(model, optimizer, range(STEPS)):
            check(sparsifier, 0.05, 1 if pattern is None else 8)
    assert runs[0][1].layers() == runs[1][1].layers()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("method", ["spartan", "imp", "movement"])
@pytest.mark.parametrize("stop", [3, 10, 16])
@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_resumed_run_is_the_same(method: str, stop: int, kernels: str) -> None:
    model = net().to(DEVICE)
    optimizer, sparsifier = build(method, model, kernels=kernels)
    for _ in train(model, optimizer, range(stop)):
        pass
    three = {"model": model, "optimizer": optimizer, "sparsifier": sparsifier}
    saved = copy.deepcopy({name: x.state_dict() for name, x in three.items()})  # type: ignore[attr-defined]
    again = net().to(DEVICE)
    other, resumed = build(method, again, kernels=kernels)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["sparsifier"])
    other.load_state_dict(saved["optimizer"])
    assert resumed._run.weights.problems[0].apart == sparsifier._run.weights.problems[0].apart
    for _ in zip(train(model, optimizer, range(stop, STEPS)), train(again, other, range(stop, STEPS)), strict=True):
        for a, b in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b)


def test_the_largest_of_what_is_allowed_are_kept() -> None:
    """By hand: the floor of every layer first, then the largest of the others."""
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    with torch.no_grad():
        for i, layer in enumerate(model):
            layer.get_parameter("weight").copy_(torch.arange(1.0, 101.0).view(10, 10) * 100.0**-i)
    s = Sparsifier(model, 0.8, 10, "imp", warmup=0, budget="global", min_density={"2.*": 0.1, "1.*": 0.025})
    assert [layer.kept for layer in s.layers()] == [47, 3, 10]
    for i, kept in enumerate((47, 3, 10)):
        expected = torch.arange(100.0).view(10, 10) >= 100 - kept
        assert torch.equal(model[i].get_parameter("weight").detach().ne(0), expected)


def test_a_layer_competes_again_once_it_is_worth_it() -> None:
    model = net()
    optimizer, sparsifier = build("imp", model, warmup=0.0, finetune=0.1)
    assert sparsifier._run.weights.problems[0].apart[-1] == 2
    with sparsifier.dense_weights(), torch.no_grad():
        model[4].get_parameter("weight").mul_(1 / SMALL)
    for _ in train(model, optimizer, range(2)):
        pass
    assert 2 not in sparsifier._run.weights.problems[0].apart
    assert sparsifier.layers()[2].density > 0.06


def test_costs_count() -> None:
    model = net()
    table = {"0.weight": 2.0, "2.weight": 1.0, "4.weight": 3.0}
    _, sparsifier = build("imp", model, cost=table, warmup=0)
    kept = {layer.name: layer.kept for layer in sparsifier.layers()}
    total = sum(table[f"{i}.weight"] * model[i].get_parameter("weight").numel() for i in (0, 2, 4))
    assert kept["4.weight"] == 7
    assert 0.1 * total - 3 < sum(table[name] * n for name, n in kept.items()) <= 0.1 * total


def test_what_cannot_be_is_refused() -> None:
    for options, message in (
        ({"budget": "erk"}, "min_density=0.05 is for layers that share a budget, and here each has its own"),
        ({"pattern": NM(2, 4), "sparsity": 0.5}, "is for layers that share a budget"),
        ({"min_density": 0.2}, r"min_density=0.2 alone asks for 20.1823% of the cost, more than the 10.0000%"),
        ({"min_density": -0.1}, "min_density"),
        ({"min_density": {"conv*": 0.1}}, "min_density: the glob 'conv\\*' matches no target"),
    ):
        with pytest.raises(ValueError, match=message):
            build("spartan", net(), **options)
    prune(net(), 0.9)  # a plain model is left as it was: nothing belongs to a sparsifier now


def test_a_saved_run_must_have_the_same() -> None:
    _, sparsifier = build("imp", net())
    _, other = build("imp", net(), min_density=0.04)
    with pytest.raises(ValueError, match=r"saved with min_density=0.05; this sparsifier has min_density=0.04"):
        other.load_state_dict(sparsifier.state_dict())


def test_with_flops() -> None:
    _, sparsifier = build("spartan", net(), cost=Flops(torch.zeros(1, 24)))
    check(sparsifier, 0.05)


def test_a_checkpoint_with_another_division_may_be_the_one_that_stays() -> None:
    """What counts is the budget that was asked for, not which layers are at their floor when the run ends."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    sparsifier = Sparsifier(model, 0.9, 10, "imp", warmup=0.0, finetune=0.0, min_density=0.02)
    assert sparsifier._run.problem.apart == []
    best = {name: x.clone() for name, x in model.state_dict().items()}
    for _ in range(10):  # until it is looked at which layers are below
        with sparsifier.dense_weights(), torch.no_grad():
            model[1].weight.mul_(0.1)
        sparsifier._run.at = sparsifier._run.at.next()
    assert [layer.kept for layer in sparsifier.layers()] == [72, 8]
    assert sparsifier._run.problem.apart == [1]
    model.load_state_dict(best)
    finalize_with(sparsifier, "the best model")
    assert [layer.kept for layer in sparsifier.layers()] == [int((m.weight != 0).sum()) for m in model]
    assert sum(layer.kept for layer in sparsifier.layers()) == 80


def test_a_checkpoint_that_is_too_dense_is_not() -> None:
    model: Any = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    sparsifier = Sparsifier(model, 0.9, 10, "imp", warmup=0.0)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    with pytest.raises(RuntimeError, match="checkpoint-3 holds fewer zeros than asked for: they are .*asked: 0.9"):
        finalize_with(sparsifier, "checkpoint-3")
