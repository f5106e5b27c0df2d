"""30 steps of iterative magnitude pruning in a straight line, with the schedule of Zhu & Gupta as they print it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import IMP, Block, Sparsifier, Unstructured, cubic, linear
from spartan.problem.schedules import Schedule
from tests.contract.algorithm_3 import spread, units
from tests.contract.cases import Net, backward, batch

T, W, FREEZE = 30, 12, 24  # steps, warm-up, first step of finetuning
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.1, 0.9, 1e-2
NAMES = ("conv.weight", "hidden.weight", "head.weight")


def zhu_gupta(t: int, s_i: float, s_f: float, n: int, t_0: int = 0, dt: int = 1) -> float:
    """s_t = s_f + (s_i − s_f)(1 − (t − t₀)/(nΔt))³ for t from t₀ to t₀ + nΔt; s_f after it."""
    return s_f + (s_i - s_f) * (1 - min(1.0, (t - t_0) / (n * dt))) ** 3


def reference(model: nn.Module, sparsities: list[float], side: int) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    velocity = {n: torch.zeros_like(p) for n, p in theta.items()}
    history, kept = [], {}
    for t in range(T + 1):
        if t <= FREEZE:
            u = {n: units(theta[n].abs(), side) for n in NAMES}
            ranked = torch.cat([u[n] for n in NAMES]).sort(descending=True).values
            count = int((1 - sparsities[t]) * len(ranked) + 1e-9)
            kept = {n: spread((u[n] >= ranked[count - 1]).double(), theta[n], side) for n in NAMES}
        w = {n: (theta[n] * kept[n] if n in NAMES else p.clone()).requires_grad_() for n, p in theta.items()}
        history.append({n: w[n].detach().clone() for n in NAMES})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        for n, g in zip(w, torch.autograd.grad(loss, list(w.values())), strict=True):
            velocity[n] = MOMENTUM * velocity[n] + (g * kept[n] if n in NAMES else g) + DECAY * theta[n]
            theta[n] = theta[n] - LR * velocity[n]
    return history


@pytest.mark.parametrize(
    ("ramp", "sparsities"),
    [
        pytest.param(linear(0, 1), [SPARSITY * min(1.0, t / W) for t in range(T + 1)], id="linear"),
        pytest.param(cubic(0, 1), [zhu_gupta(t, 0.0, SPARSITY, W) for t in range(T + 1)], id="cubic"),
        pytest.param(cubic(0.25, 1), [zhu_gupta(t, 0.2, SPARSITY, W) for t in range(T + 1)], id="cubic-from-0.2"),
    ],
)
@pytest.mark.parametrize("side", [1, 2])
def test_thirty_steps(side: int, ramp: Schedule, sparsities: list[float]) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = reference(copy.deepcopy(model), sparsities, side)
    pattern = Unstructured() if side == 1 else Block(side, side)
    sparsifier = Sparsifier(model, SPARSITY, T, IMP(ramp=ramp), pattern=pattern, warmup=W / T)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    for t in range(T + 1):
        assert sparsifier.stats.target_density == pytest.approx(1 - sparsities[t], abs=1e-12)
        masks = sparsifier.masks()
        for name, w in expected[t].items():
            found = model.get_parameter(name).detach()
            torch.testing.assert_close(found, w, rtol=0, atol=1e-10, msg=f"step {t}, {name}")
            assert torch.equal(found != 0, masks[name])
        backward(model, t)
        optimizer.step()
        optimizer.zero_grad()


def test_the_cubic_schedule_is_steep_first_and_flat_at_the_end() -> None:
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparsifier = Sparsifier(model, 0.9, 20, IMP(ramp=cubic(0, 1)), warmup=0.5).attach(optimizer)
    kept = []
    for t in range(12):
        kept.append(int((model.weight != 0).sum()))
        assert kept[-1] == int(10_000 * (1 - zhu_gupta(t, 0.0, 0.9, 10)) + 1e-6)
        model(torch.randn(2, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert kept[0] == 10_000
    assert kept[1] == 7_561
    assert kept[9] == 1_009
    assert kept[10:] == [1_000, 1_000]
    assert sparsifier.stats.target_density == pytest.approx(0.1)
