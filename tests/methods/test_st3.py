"""ST-3 against its update rule in a straight line, and what soft thresholding must not break."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Sparsifier, Unstructured, cubic, linear
from spartan.methods.st3 import ST3
from spartan.problem import problem
from spartan.problem.problem import make_problem
from spartan.problem.schedules import Schedule
from spartan.solvers.masks import row_scales
from spartan.solvers.units import Units
from tests.contract.cases import Net, batch
from tests.methods.following import follow

T, W, FREEZE = 30, 10, 24  # steps, warm-up, first step of finetuning
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.1, 0.9, 1e-3
NAMES = ("conv.weight", "hidden.weight", "head.weight")


def mean_of_blocks(x: Tensor, side: int) -> Tensor:
    """Mean over side × side blocks of the matrix, at every place of the block."""
    matrix = x.reshape(x.shape[0], -1)
    found = torch.empty_like(matrix)
    for i in range(0, matrix.shape[0], side):
        for j in range(0, matrix.shape[1], side):
            found[i : i + side, j : j + side] = matrix[i : i + side, j : j + side].mean()
    return found.reshape(x.shape)


def soft(theta: dict[str, Tensor], density: float, side: int, rescale: bool) -> dict[str, Tensor]:
    """w = s · θ · max(1 − τ/u, 0), τ the magnitude of the first unit that goes."""
    u = {n: mean_of_blocks(theta[n].abs(), side) for n in NAMES}
    ranked = torch.cat([u[n].flatten() for n in NAMES]).sort(descending=True).values[:: side * side]
    kept = int(density * len(ranked) + 1e-9)
    tau = float(ranked[kept]) if kept < len(ranked) else 0.0
    w = {}
    for n in NAMES:
        # A block's mean is the same number at all its places, up to rounding.
        alive = u[n] > tau * (1 + 1e-13)
        scale = torch.ones_like(u[n])
        if rescale:
            for row in range(len(scale)):
                magnitude = theta[n][row].abs()
                r = ((magnitude * alive[row]).mean() + 1e-6) / (magnitude.mean() + 1e-6)
                scale[row] = 1.01 / (r + 0.01)
            scale = mean_of_blocks(scale, side)
        w[n] = torch.where(alive, scale * theta[n] * (1 - tau / u[n]), 0.0)
    return w


def reference(model: nn.Module, side: int, rescale: bool, power: int) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    velocity = {n: torch.zeros_like(p) for n, p in theta.items()}
    history, ratio = [], None
    for t in range(T + 1):
        if t < FREEZE:
            w = soft(theta, 1 - SPARSITY * (1 - (1 - min(1.0, t / W)) ** power), side, rescale)
        else:
            if ratio is None:
                start = soft(theta, 1 - SPARSITY, side, rescale)
                ratio = {n: start[n] / theta[n] for n in NAMES}
            w = {n: ratio[n] * theta[n] for n in NAMES}
        history.append(w)
        leaves = {n: p.clone().requires_grad_() for n, p in {**theta, **w}.items()}
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**leaves, **buffers}, (x,)), y)
        for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            if ratio is not None and n in NAMES:
                g = g * ratio[n]  # the mask is a constant from here on
            velocity[n] = MOMENTUM * velocity[n] + g + DECAY * theta[n]
            theta[n] = theta[n] - LR * velocity[n]
    return history


@pytest.mark.parametrize("ramp", [linear(0, 1), cubic(0, 1)], ids=repr)
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("side", [1, 2])
def test_thirty_steps(side: int, rescale: bool, ramp: Schedule) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = reference(copy.deepcopy(model), side, rescale, 3 if ramp.shape == "cubic" else 1)
    pattern = Unstructured() if side == 1 else Block(side, side)
    method = ST3(rescale=rescale, ramp=ramp)
    sparsifier = Sparsifier(model, SPARSITY, T, method, pattern=pattern, warmup=W / T, finetune=1 - FREEZE / T)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for _ in follow(model, sparsifier, expected, optimizer, zeros=True):
        pass


@pytest.mark.filterwarnings("ignore:.*zero already:UserWarning")
@pytest.mark.parametrize("method", ["st3", "feather", "str"])
@pytest.mark.parametrize("values", [[1.0], [1.0, -1.0, 2.0], [0.5, 0.0, 1.0]], ids=["equal", "two", "zeros"])
def test_ties_at_the_threshold_keep_the_budget(method: str, values: list[float]) -> None:
    """Units equal to the threshold are kept by position; soft thresholding must not zero them."""
    model = nn.Linear(12, 4)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(values).repeat(48 // len(values)).reshape(4, 12))
    sparsifier = Sparsifier(model, 0.75, 10, method, warmup=0)
    assert int((model.weight != 0).sum()) == 12
    assert torch.equal(model.weight != 0, sparsifier.masks()["weight"])


@pytest.mark.parametrize("method", ["st3", "feather", "str"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_exactly_sparse(method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(dtype)
    sparsifier = Sparsifier(model, 0.9, 10, method, warmup=0)
    assert int((model.weight != 0).sum()) == 409
    assert torch.equal(model.weight != 0, sparsifier.masks()["weight"])


@pytest.mark.parametrize("method", ["st3", "feather", "str"])
def test_zero_weights_stay_finite_and_learn(method: str) -> None:
    model = nn.Linear(8, 4)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Sparsifier(model, 0.75, 10, method, warmup=0.5).attach(optimizer)
    for _ in range(10):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(model.weight).all()
    assert 0 < int((model.weight != 0).sum()) <= 8


@pytest.mark.parametrize("method", ["st3", "feather", "str"])
def test_everything_kept_is_no_shrinkage(method: str) -> None:
    model = nn.Linear(8, 4)
    before = model.weight.detach().clone()
    Sparsifier(model, 0.75, 10, method, warmup=0.5)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("channels_last", [False, True])
def test_targets_worked_on_as_one_have_the_same_channels(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 2), nn.Linear(6, 5)).double()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = []
    for joined in (False, True):
        monkeypatch.setattr(problem, "stands_by_memory", lambda target, joined=joined: joined)
        units = Units(make_problem(model, 0.5))
        assert units.joined == joined
        scales = row_scales(units, units.scores() > 0.1)
        found.append(units.per_target(units.spread(scales)))
    for one, other, target in zip(*found, units.problem.targets, strict=True):
        torch.testing.assert_close(one, other)
        theta = target.parameter.detach().flatten(1).abs()
        r = (torch.where(theta > 0.1, theta, 0.0).mean(1) + 1e-6) / (theta.mean(1) + 1e-6)
        torch.testing.assert_close(one.flatten(1), (1.01 / (r + 0.01))[:, None].expand_as(theta))
