"""Torch in chunks, as it runs on a CPU, against plain torch: whole runs, exact thresholds, resume."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import IMP, Flops, Sparsifier, Spartan, TopKAST, constant, linear, soft_topk
from spartan.kernels import chunk_engine
from spartan.kernels.chunk_engine import ChunkEngine
from spartan.methods.base import Method
from spartan.ops.parts import Part
from spartan.ops.select import boundary
from spartan.ops.soft_topk import logit, moments, residual_at, rest_of_step

METHODS = {
    "spartan": Spartan(beta=linear(1, 200)),
    "spartan-hard": Spartan(beta=constant(float("inf"))),
    "spartan-flat": Spartan(beta=constant(0.0)),
    "spartan-soft": Spartan(project=False),
    "topkast": TopKAST(),
    "topkast-b": TopKAST(backward_sparsity=0.1, exploration=1e-2),
    "imp": IMP(),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a tensor, the last one short."""
    monkeypatch.setattr(chunk_engine, "CHUNK", 5000)


def run(
    kernels: str, method: Method, steps: int = 8, skip: int = 3, **options: Any
) -> tuple[Any, Any, Any, list[float]]:
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 230), nn.ReLU(), nn.Linear(230, 7)
    model = nn.Sequential(*layers).to(dtype)
    if options.pop("flops", False):
        options["cost"] = Flops(torch.zeros(1, 3, 8, 8, dtype=dtype), value_power=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    defaults = {"sparsity": 0.9, "total_steps": 8, "warmup": 0.25, "finetune": 0.25, "method": method}
    settings: dict[str, Any] = {**defaults, **options}
    sparsifier = Sparsifier(model, kernels=kernels, **settings).attach(optimizer)
    return model, optimizer, sparsifier, train(model, optimizer, range(steps), skip)


def train(model: Any, optimizer: Any, steps: range, skip: int = 3) -> list[float]:
    losses = []
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(16, 3, 8, 8, generator=rng).to(model[0].weight.dtype)
        out = model(x) if step != skip else model[3:](x.new_ones(16, 288))
        loss = nn.functional.cross_entropy(out, torch.randint(7, (16,), generator=rng))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"budget": "uniform"}, {"flops": True}, {"dtype": torch.float64}], ids=repr)
@pytest.mark.parametrize("name", list(METHODS))
def test_a_run_is_the_same(name: str, options: dict[str, Any]) -> None:
    plain, _, of_plain, losses = run("torch", METHODS[name], **options)
    fast, _, of_fast, fast_losses = run("auto", METHODS[name], **options)
    assert fast_losses == pytest.approx(losses, rel=1e-5)
    for (key, mask), other in zip(of_plain.masks().items(), of_fast.masks().values(), strict=True):
        assert torch.equal(mask, other), key
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert of_fast.stats.cost == of_plain.stats.cost


def test_what_runs() -> None:
    _, _, sparsifier, _ = run("auto", METHODS["spartan"], steps=1)
    assert "by torch in chunks that fit the cache" in repr(sparsifier)
    assert "by plain torch (kernels='torch')" in repr(run("torch", METHODS["spartan"], steps=0)[2])
    several = repr(run("auto", METHODS["spartan"], steps=0, budget="uniform")[2])
    assert "torch in chunks that fit the cache: 1 of 3 groups" in several  # the others have too few weights


@pytest.mark.parametrize("name", ["spartan", "imp"])
@pytest.mark.parametrize("stop", [1, 5])
def test_resume_is_bit_identical(name: str, stop: int) -> None:
    model, optimizer, sparsifier, _ = run("auto", METHODS[name], steps=stop)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))
    train(model, optimizer, range(stop, 8))
    again, optimizer_again, sparsifier_again, _ = run("auto", METHODS[name], steps=0)
    for part, state in zip((again, optimizer_again, sparsifier_again), states, strict=True):
        part.load_state_dict(state)
    train(again, optimizer_again, range(stop, 8))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def moved(tensors: list[Tensor], scale: float, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [t * (1 + scale * torch.randn(t.shape, generator=rng)) for t in tensors]


@pytest.mark.parametrize("costs", [[1.0, 1.0, 1.0], [1.0, 2.5, 0.3]])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 0.5])
def test_thresholds_are_exact_from_wherever_the_search_starts(scale: float, costs: list[float]) -> None:
    """Small moves are followed within the window; large ones leave it, and are found all the same."""
    tensors = moved([torch.ones(12_001), torch.ones(30, 100), torch.ones(7)], 1.0, 0)
    thetas = [t.clone() for t in tensors]
    engine = ChunkEngine(thetas, thetas, costs, [1.0] * 3)
    for step in range(6):
        tensors = moved(tensors, scale, step + 1)
        if step == 4:
            tensors = [(8 * t).round() / 8 for t in tensors]  # ties
        for theta, t in zip(thetas, tensors, strict=True):
            theta.copy_(t)
        k, beta = (0.2 - 0.01 * step) * engine.total, 5.0 * 3**step
        threshold, dual = engine.choose(k, beta)
        parts = [Part(t.abs().reshape(-1), c) for t, c in zip(tensors, costs, strict=True)]
        expected = boundary(parts, k).threshold
        assert (threshold.value, threshold.cut) == (expected.value, expected.cut)
        assert threshold.cost == pytest.approx(expected.cost, rel=1e-12)
        assert dual is not None
        assert residual_at(dual, parts, k) <= 2e-6 or beta > 400
        assert engine.choose(k, None)[1] is None
        engine.restore(threshold, dual)


def test_nothing_and_everything() -> None:
    theta = torch.randn(12_000, generator=torch.Generator().manual_seed(0))
    engine = ChunkEngine([theta], [theta], [1.0], [1.0])
    for k in (1000.0, 0.0, 12_000.0, 11_999.0, 500.5, 0.0, 1.0):
        threshold, dual = engine.choose(k, 3.0)
        assert int(threshold.keep(theta.abs()).sum()) == int(k)
        assert dual is not None
        assert float(dual.mask(theta.abs()).sum()) == pytest.approx(k, rel=1e-5)
    theta.fill_(0.5)
    for k in (1000.0, 999.0):
        threshold, dual = engine.choose(k, 3.0)
        assert int(threshold.keep(theta.abs()).sum()) == k
        assert dual is not None
        assert float(dual.mask(theta.abs()).sum()) == pytest.approx(k, rel=1e-5)


@pytest.mark.parametrize("costs", [[1.0, 1.0], [1.0, 2.5]])
def test_ties_at_the_threshold_are_cut_by_position_without_starting_anew(costs: list[float]) -> None:
    """Some of 25 million float32 weights are equal to the threshold in one step of ten."""
    rng = torch.Generator().manual_seed(0)
    thetas = [torch.randn(12_345, generator=rng), torch.randn(777, generator=rng)]
    engine = ChunkEngine(thetas, thetas, costs, [1.0, 1.0])
    k = 0.2 * engine.total
    value = float(engine.choose(k, None)[0].value)
    for theta in thetas:
        near = (theta.abs() - value).abs() < 0.02
        theta[near] = value * theta[near].sign()
        assert int(near.sum()) > 2
    parts = [Part(t.abs(), c) for t, c in zip(thetas, costs, strict=True)]
    cuts = set()
    for room in (-20.0, -7.5, -1.0, -0.4, 0.0, 1.0, 2.0, 7.5, 20.0):
        expected = boundary(parts, k + room).threshold
        found = engine._first_pass(k + room, None)[0]
        assert found is not None
        assert (found.value, found.cut) == (expected.value, expected.cut) == (value, expected.cut)
        cuts.add(found.cut)
    assert len(cuts) > 3


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_what_is_not_kept_is_plus_zero(factor: float, soft: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    thetas = [(8 * torch.randn(n, generator=rng)).round() / 8 for n in (12_345, 50)]  # ties, zeros of both signs
    parameters = [torch.full_like(t, -1.0) for t in thetas]
    engine = ChunkEngine(parameters, thetas, [1.0, 1.0], [factor, factor])
    u = torch.cat(thetas).abs() * factor
    for k in (0.0, 1234.0, 1235.0, 12_000.0, 12_395.0):
        threshold, dual = engine.choose(k, 3.0)
        assert dual is not None
        kept = threshold.keep(u)
        assert int(kept.sum()) == k
        engine.project(soft)
        w = torch.cat(thetas) * dual.mask(u) if soft else torch.cat(thetas)
        torch.testing.assert_close(torch.cat(parameters), torch.where(kept, w, 0.0), rtol=1e-5, atol=0.0)
        assert not torch.cat(parameters)[~kept].signbit().any()
        grads = [torch.full_like(t, -torch.inf) for t in thetas]
        engine.where_kept(grads)
        assert torch.equal(torch.cat(grads), torch.where(kept, -torch.inf, 0.0))
        assert not torch.cat(grads)[~kept].signbit().any()


@pytest.mark.parametrize("beta", [1.0, 20.0, 300.0])
def test_gradients_are_those_of_autograd(beta: float) -> None:
    """Against float64; β·τ is above and below what decides how the line is written."""
    rng = torch.Generator().manual_seed(0)
    costs, factors = [1.0, 2.5], [1.0, 0.37]
    thetas = [torch.randn(n, generator=rng) for n in (12_345, 777)]
    grads = [torch.randn(t.shape, generator=rng) for t in thetas]
    engine = ChunkEngine(thetas, thetas, costs, factors)
    k = 0.2 * engine.total
    engine.choose(k, 0.99 * beta)
    engine.choose(k, beta)
    whole = torch.cat(thetas).double().requires_grad_()
    f, c = (torch.cat([torch.full_like(t, x) for t, x in zip(thetas, of, strict=True)]) for of in (factors, costs))
    m = soft_topk(whole.abs() * f.double() * c.double(), k, beta, costs=c.double())
    (expected,) = torch.autograd.grad(whole * m, whole, torch.cat(grads).double())
    engine.through_mask(grads)
    error = (torch.cat(grads) - expected).abs().max() / expected.abs().max()
    assert error < 5e-7 * max(beta, 4.0)  # β times the rounding of u


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_what_a_newton_step_leaves_is_no_more_than_said(spread: float) -> None:
    """The bound is not far off either: a hundredfold at most, where it is not nothing."""
    rng = torch.Generator().manual_seed(0)
    parts = [Part(torch.randn(n, generator=rng, dtype=torch.float64).abs(), c) for n, c in ((4000, 1.0), (500, 3.0))]
    total = 5500.0
    tightest = math.inf
    for density in (0.02, 0.1, 0.5, 0.9):
        k = density * total
        for mu in torch.linspace(-3, 3, 25).tolist():
            f, d = moments(parts, spread, 0.0, mu)
            step = (logit(f / total) - logit(k / total)) * f * (total - f) / (total * d)
            bound, left = rest_of_step(step, f, d, total), abs(moments(parts, spread, 0.0, mu - step)[0] - k) / k
            assert left <= bound * (1 + 1e-9) + 1e-13
            tightest = min(tightest, bound / left)
    assert tightest < 100
