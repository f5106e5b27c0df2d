"""The budget "balanced": one for all layers, by magnitudes relative to how each begins, the same after a resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import Block, Sparsifier, prune
from spartan.gpt import GPT
from spartan.problem.problem import make_problem
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)
STEPS = 20


def net() -> nn.Sequential:
    """Layers whose weights are a hundredfold apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 8))
    with torch.no_grad():
        model[3].get_parameter("weight").mul_(0.01)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def build(model: nn.Sequential, method: Any, **options: Any) -> tuple[torch.optim.Optimizer, Sparsifier]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"warmup": 0.3, "finetune": 0.2} | options
    return optimizer, Sparsifier(model, 0.75, STEPS, method, budget="balanced", **settings).attach(optimizer)


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = batch(step).to(next(model.parameters()))
        (model(x) - x.flatten(1)[:, :8]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_scales_are_those_of_the_definition() -> None:
    """In plain Python: 1/(r·√n), times what leaves the sum of squares of all as it was, to 8 bits."""
    model = net()
    with torch.no_grad():
        model[0].get_parameter("weight")[0, 0, 0, :2] = 0.0  # zeros do not count
    weights = [p.detach().double() for p in model.parameters() if p.ndim > 1]
    squares = [float(w.square().sum()) for w in weights]
    counts = [int((w != 0).sum()) for w in weights]
    inputs = [w[0].numel() for w in weights]
    raw = [1.0 / math.sqrt(s / c * n) for s, c, n in zip(squares, counts, inputs, strict=True)]
    factor = math.sqrt(sum(squares) / sum(r * r * s for r, s in zip(raw, squares, strict=True)))
    found = make_problem(model, 0.5, budget="balanced").scales
    assert found == pytest.approx([factor * r for r in raw], rel=2**-8)
    assert all(math.frexp(x)[0] * 256 == int(math.frexp(x)[0] * 256) for x in found)
    assert make_problem(model, 0.5, budget="global").scales == [1.0] * 3


def test_layers_that_begin_alike_compete_as_with_one_budget() -> None:
    """torch's own initialisation has weights of size 1/√(3n): then it is "global", but for the spread of random weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 64), nn.Conv2d(16, 32, 3))
    assert make_problem(model, 0.5, budget="balanced").scales == pytest.approx([1.0] * 3, abs=0.03)


def test_layers_that_are_all_zero() -> None:
    model = net()
    nn.init.zeros_(model[5].get_parameter("weight"))
    assert make_problem(model, 0.5, budget="balanced").scales[2] == 1.0
    for layer in (0, 3):
        nn.init.zeros_(model[layer].get_parameter("weight"))
    assert make_problem(model, 0.5, budget="balanced").scales == [1.0] * 3


@pytest.mark.parametrize("budget", ["global", "balanced"])
def test_no_layer_of_a_gpt_begins_empty(budget: str) -> None:
    """GPT-2's initialisation makes what adds to the residual stream smaller: one threshold for all leaves nothing there."""
    torch.manual_seed(0)
    model = GPT(context=8, layers=6, width=48, heads=2)
    found = Sparsifier(model, 0.9, STEPS, "topkast", budget=budget, exclude="head.*", warmup=0)
    density = {layer.name: layer.density for layer in found.layers()}
    out = [density[f"layers.{i}.attention.out.weight"] for i in range(6)]
    down = [density[f"layers.{i}.down.weight"] for i in range(6)]
    if budget == "global":
        assert max(out + down) == 0.0
    else:
        assert min(out) > 0.1
        assert min(down) > 0.001  # four times the inputs: half as large as the others, as if all had begun alike
    assert found.stats.density == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize("pattern", [None, Block(2, 2)], ids=["single", "blocks"])
@pytest.mark.parametrize("method", ["spartan", "topkast", "feather"])
def test_units_compete_by_scaled_magnitudes(method: str, pattern: Block | None) -> None:
    """What is kept is the exact top of |θ|·scale, as the whole sorted list says."""
    model = net()
    which = {"include": ["3.*", "5.*"]} if pattern is not None else {}
    before = [p.detach().clone() for p in (model[i].get_parameter("weight") for i in (0, 3, 5))][1 if which else 0 :]
    _, sparsifier = build(model, method, pattern=pattern, warmup=0, **which)
    scales = sparsifier._run.problem.scales
    side = 2 if pattern is not None else 1
    means = [
        nn.functional.avg_pool2d(w.abs().reshape(1, 1, len(w), -1), side).flatten().double() * scale
        for w, scale in zip(before, scales, strict=True)
    ]
    ranked = torch.cat(means).sort(descending=True).values
    kept = [layer.kept // side**2 for layer in sparsifier.layers()]
    assert sum(kept) == int(0.25 * len(ranked))
    assert kept == [int((m >= ranked[sum(kept) - 1]).sum()) for m in means]


@pytest.mark.parametrize("stop", [3, 12, 18], ids=["warm-up", "between", "finetuning"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("method", ["spartan", "feather"])
def test_a_resumed_run_is_the_same(method: str, kernels: str, stop: int) -> None:
    """The scales are those of the beginning, not of the weights that the resumed run is built with."""
    options = {"kernels": kernels} if kernels == "triton" else {}
    whole = net().to(DEVICE)
    optimizer, straight = build(whole, method, **options)
    train(whole, optimizer, range(STEPS))
    first = net().to(DEVICE)
    optimizer, sparsifier = build(first, method, **options)
    train(first, optimizer, range(stop))
    saved = first.state_dict(), optimizer.state_dict(), sparsifier.state_dict()
    second = net().to(DEVICE)
    with torch.no_grad():
        for number, parameter in enumerate(second.parameters()):
            parameter.mul_(1.0 + number)  # it begins otherwise
    optimizer, sparsifier = build(second, method, **options)
    assert sparsifier._run.problem.scales != straight._run.problem.scales
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    sparsifier.load_state_dict(saved[2])
    train(second, optimizer, range(stop, STEPS))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_shot_pruning_takes_it_too() -> None:
    model = net()
    small = prune(model, 0.9, budget="balanced")[3].get_parameter("weight")
    assert int(small.count_nonzero()) > 30
    assert int(prune(net(), 0.9)[3].get_parameter("weight").count_nonzero()) == 0
