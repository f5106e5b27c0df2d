"""30 steps of ProbMask follow the paper's equations, written here in a straight line with autograd."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Flops, Sparsifier, Unstructured
from spartan.methods.probmask import ProbMask
from spartan.problem.schedules import Moment, linear
from spartan.solvers.units import random_units
from tests.contract.algorithm_3 import POSITIONS, spread
from tests.contract.cases import Net, batch
from tests.methods.test_movement import top_k

T, W, FREEZE = 30, 16, 24  # steps, warm-up, first step of finetuning
HOLD, TAU = 0.25, 0.2
SPARSITY, LR, SCORE_LR, MOMENTUM, DECAY = 0.8, 0.1, 0.1, 0.9, 1e-2


def budget(t: int) -> float:
    """What is kept of 1: everything at first, then a cubic down to the end of the warm-up."""
    start = HOLD * W
    x = min(max((t - start) / (W - start), 0.0), 1.0)
    return 1.0 - SPARSITY + SPARSITY * (1.0 - x) ** 3


def nearest(s: dict[str, Tensor], c: dict[str, float], k: float) -> dict[str, Tensor]:
    """The Euclidean projection onto {0 ≤ s ≤ 1, Σ c·s ≤ k}: bisection for the multiplier."""

    def at(v: float) -> dict[str, Tensor]:
        return {n: (x - v * c[n]).clamp(0, 1) for n, x in s.items()}

    def cost(v: float) -> float:
        return sum(c[n] * float(x.sum()) for n, x in at(v).items())

    low, high = 0.0, 100.0
    if cost(0.0) <= k:
        return at(0.0)
    for _ in range(200):
        mid = 0.5 * (low + high)
        low, high = (mid, high) if cost(mid) > k else (low, mid)
    return at(high)


def reference(
    model: nn.Module, side: int, cost: dict[str, float], noise: list[list[Tensor]]
) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T; noise holds the uniform numbers of every step, one tensor per target."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    s = {n: torch.ones(theta[n].numel() // side**2, dtype=torch.float64) for n in POSITIONS}
    mean, square = ({n: torch.zeros_like(x) for n, x in s.items()} for _ in range(2))
    c = {n: cost[n] * side**2 for n in POSITIONS}
    total = sum(c[n] * s[n].numel() for n in POSITIONS)
    history, fixed = [], None
    for t in range(T + 1):
        progress = min(1.0, t / FREEZE)
        if fixed is None:
            s = nearest(s, c, total * budget(t))
        if t == FREEZE:
            keep = top_k(s, total * budget(t), c)
            fixed = {n: spread(keep[n], theta[n], side) for n in POSITIONS}
        p = {n: x.detach().requires_grad_() for n, x in s.items()}
        mask = fixed
        if mask is None:
            mask = {}
            for n, u in zip(POSITIONS, noise[t], strict=True):
                # ε as the authors have it; logit(u) is the difference of two Gumbel variables
                logit = torch.log(p[n] + 1e-20) - torch.log(1 - p[n] + 1e-20)
                xi = torch.log(u.double()) - torch.log1p(-u.double())
                mask[n] = spread(torch.sigmoid((logit + xi) / (1 + (TAU - 1) * progress)), theta[n], side)
        leaves = {n: x.detach().requires_grad_() for n, x in theta.items()}
        w = {n: x * mask[n] if n in mask else x for n, x in leaves.items()}
        history.append({n: w[n].detach().clone() for n in POSITIONS})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        grads = torch.autograd.grad(loss, [*leaves.values(), *p.values()], allow_unused=True)
        if fixed is None:
            rate = SCORE_LR * 0.5 * (1 + math.cos(math.pi * min(1.0, (t + 1) / FREEZE)))
            for n, g in zip(p, grads[len(leaves) :], strict=True):
                mean[n] = 0.9 * mean[n] + 0.1 * g
                square[n] = 0.999 * square[n] + 0.001 * g * g
                m_hat, v_hat = mean[n] / (1 - 0.9 ** (t + 1)), square[n] / (1 - 0.999 ** (t + 1))
                s[n] = s[n] - rate * m_hat / (v_hat.sqrt() + 1e-8)
        for (n, value), g in zip(theta.items(), grads, strict=False):
            momentum[n] = MOMENTUM * momentum[n] + g + DECAY * value
            theta[n] = value - LR * momentum[n]
    return history


@pytest.mark.parametrize(
    ("side", "cost"),
    [
        pytest.param(1, None, id="unstructured"),
        pytest.param(2, None, id="block"),
        pytest.param(1, Flops, id="flops"),
        pytest.param(2, Flops, id="block-flops"),
    ],
)
def test_thirty_steps(side: int, cost: Any) -> None:
    torch.manual_seed(0)
    model = Net().double()
    start = copy.deepcopy(model)
    sparsifier = Sparsifier(
        model,
        SPARSITY,
        T,
        ProbMask(score_lr=SCORE_LR, temperature=linear(1, TAU), hold=HOLD),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64)) if cost else None,
        warmup=W / T,
        finetune=1 - FREEZE / T,
    )
    (solver,) = sparsifier._run.weights.solving
    seed, sizes = sparsifier._run.at.seed, solver.problem.units
    noise = [list(random_units(solver, Moment(t, T, W, FREEZE, seed)).split(sizes)) for t in range(T + 1)]
    expected = reference(start, side, POSITIONS if cost else dict.fromkeys(POSITIONS, 1.0), noise)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    for t in range(T + 1):
        for name, w in expected[t].items():
            got = model.get_parameter(name).detach()
            torch.testing.assert_close(got, w, rtol=0, atol=1e-9, msg=f"step {t}, {name}")
            if t >= FREEZE:
                assert not got[~sparsifier.masks()[name]].any()
        if t < FREEZE:
            each = solver.state.per_unit["s"].split(sizes)
            expected_cost = sum(c * float(s.sum()) for s, c in zip(each, solver.problem.unit_costs, strict=True))
            assert expected_cost <= solver.k[0] * (1 + 1e-12)
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("costs", [(1.0,), (3.0, 0.5)])
@pytest.mark.parametrize("kind", ["ones", "uniform", "nearly binary", "skewed", "wild", "zero", "inside"])
def test_the_projection_is_exact(kind: str, costs: tuple[float, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 5000
    s = {
        "ones": lambda: torch.ones(n),
        "uniform": lambda: torch.rand(n),
        "nearly binary": lambda: (torch.rand(n) < 0.3).float() + 0.05 * torch.randn(n),
        "skewed": lambda: torch.exp(-30 * torch.rand(n)),
        "wild": lambda: 10 * torch.randn(n),
        "zero": lambda: torch.zeros(n),
        "inside": lambda: 0.01 * torch.rand(n),
    }[kind]().to(dtype)
    model = nn.Sequential(*[nn.Linear(n // len(costs) // 50, 50, bias=False) for _ in costs])
    price = {f"{i}.weight": c for i, c in enumerate(costs)}
    sparsifier = Sparsifier(model, 0.9, 10, ProbMask(), cost=price, warmup=0.0, include=list(price))
    (solver,) = sparsifier._run.weights.solving
    parts, (k,) = list(s.split(n // len(costs))), solver.k
    got = solver.within_budget(s).split(n // len(costs))
    want = nearest({str(i): x.double() for i, x in enumerate(parts)}, {str(i): c for i, c in enumerate(costs)}, k)
    spent = sum(c * float(x.sum(dtype=torch.float64)) for c, x in zip(costs, got, strict=True))
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    assert spent <= k * (1 + exact)
    for i, x in enumerate(got):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), want[str(i)], rtol=0, atol=exact)


def trained(method: ProbMask, steps: int, **kwargs: Any) -> tuple[nn.Linear, Sparsifier, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(20, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.8, 100, method, **kwargs).attach(optimizer)
    for _ in range(steps):
        model(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, sparsifier, optimizer


def test_the_budget_holds_then_falls_as_a_cubic() -> None:
    ramp = ProbMask().ramp
    for epoch, want in ((0, 0.0), (47, 0.0), (114, 1 - 0.5**3), (180, 1.0), (300, 1.0)):
        assert ramp.at(min(1.0, epoch / 180)) == pytest.approx(want, abs=1e-12)
    assert ProbMask(hold=0.0).ramp.at(0.5) == pytest.approx(1 - 0.5**3)


def test_the_model_is_dense_while_the_budget_is_whole_and_soft_until_finetuning() -> None:
    model, sparsifier, _ = trained(ProbMask(), 14)
    assert sparsifier.stats.density == 1.0
    assert (model.weight != 0).all()
    model, sparsifier, _ = trained(ProbMask(), 90)
    assert sparsifier.stats.density == pytest.approx(0.2)
    assert (model.weight != 0).double().mean() > 0.2
    model, sparsifier, _ = trained(ProbMask(), 100)
    assert int((model.weight != 0).sum()) == 200
    assert sparsifier.stats.phase == "finetune"


def test_the_samples_sharpen() -> None:
    """At a high temperature a mask is near its mean, at a low one near 0 or 1."""
    for tau, near in ((100.0, 0.0), (0.001, 1.0)):
        _, sparsifier, _ = trained(ProbMask(score_lr=0.0, temperature=tau), 40)
        m = sparsifier._run.weights.solving[0].state.per_unit["m"]
        assert ((m < 0.1) | (m > 0.9)).double().mean() == pytest.approx(near, abs=0.02)
        assert sparsifier.stats.beta == pytest.approx(1 / tau)


def test_a_hard_sample_has_the_budget_on_average() -> None:
    _, sparsifier, _ = trained(ProbMask(score_lr=0.0, temperature=1e-4), 60)
    assert sparsifier._run.weights.solving[0].state.per_unit["m"].mean().item() == pytest.approx(0.2, abs=0.05)


def test_probabilities_of_zero_leave_the_choice_to_the_magnitudes() -> None:
    _, sparsifier, _ = trained(ProbMask(), 0, warmup=0.0)
    (solver,) = sparsifier._run.weights.solving
    solver.state.per_unit["s"] = torch.zeros(1000)
    solver.state.per_unit["s"][:7] = 0.5
    keep = sparsifier.method.keep(solver, sparsifier._run.at)
    rest = solver.theta.views[0].reshape(-1).abs().clone()
    assert keep[:7].all()
    assert int(keep.sum()) == 200
    assert rest[7:][keep[7:]].min() >= rest[7:][~keep[7:]].max()


def test_a_second_look_changes_nothing() -> None:
    """`choose` runs again after `dense_weights()`; the probabilities must not learn twice from one gradient."""
    model, sparsifier, _ = trained(ProbMask(), 40)
    state = sparsifier._run.weights.solving[0].state
    before, s = model.weight.clone(), state.per_unit["s"].clone()
    with sparsifier.dense_weights():
        pass
    torch.testing.assert_close(state.per_unit["s"], s, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.weight, before, rtol=1e-3, atol=1e-5)


def test_short_runs_take_longer_strides() -> None:
    for steps, want in ((1_000_000, 0.006), (58_800, 0.006), (5880, 0.06), (100, 0.2)):
        assert ProbMask().score_lr_at(Moment(0, steps + 1, 0, steps)) == pytest.approx(want)
    for step, want in ((0, 0.01), (500, 0.005), (1000, 0.0), (1100, 0.0)):
        assert ProbMask(score_lr=0.01).score_lr_at(Moment(step, 1200, 0, 1000)) == pytest.approx(want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_lr": -1.0}, "ProbMask: score_lr=-1.0"),
        ({"score_lr": math.nan}, "ProbMask: score_lr=nan"),
        ({"temperature": 0.0}, "ProbMask: temperature=0.0"),
        ({"temperature": linear(1, -1)}, "ProbMask: temperature=linear"),
        ({"hold": 1.0}, "ProbMask: hold=1.0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProbMask(**settings)
