"""Feather against its update rule in a straight line."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import Block, Sparsifier, Unstructured, cubic
from spartan.methods.feather import Feather
from tests.contract.cases import Net, batch
from tests.methods.following import follow

T, W = 30, 15  # steps, and warm-up: half of them, as in the paper
LR, MOMENTUM, DECAY = 0.1, 0.9, 1e-3
NAMES = ("conv.weight", "hidden.weight", "head.weight")


def units(x: Tensor, side: int) -> Tensor:
    """Mean over side × side blocks of the matrix."""
    rows, columns = x.shape[0], x[0].numel()
    return x.reshape(rows // side, side, columns // side, side).mean((1, 3))


def places(u: Tensor, side: int, like: Tensor) -> Tensor:
    return u.repeat_interleave(side, 0).repeat_interleave(side, 1).reshape(like.shape)


def reference(model: nn.Module, sparsity: float, side: int, p: float, kappa: float) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T − 1: Feather-Global, with the cubic schedule."""
    theta = {n: q.detach().clone() for n, q in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    velocity = {n: torch.zeros_like(q) for n, q in theta.items()}
    history = []
    for t in range(T):
        u = {n: units(theta[n].abs(), side) for n in NAMES}
        ranked = torch.cat([u[n].flatten() for n in NAMES]).sort(descending=True).values
        kept = int((1 - sparsity * (1 - (1 - min(1.0, t / W)) ** 3)) * len(ranked) + 1e-9)
        tau = float(ranked[kept]) if kept < len(ranked) else 0.0
        alive = {n: places(u[n] > tau, side, theta[n]) for n in NAMES}
        ratio = {n: places((u[n] ** p - tau**p).clamp(min=0) ** (1 / p) / u[n], side, theta[n]) for n in NAMES}
        w = {
            n: torch.where(alive[n], theta[n] * ratio[n], 0.0) for n in NAMES
        }  # the cube root of a rounding error is not small
        history.append(w)
        leaves = {n: q.clone().requires_grad_() for n, q in {**theta, **w}.items()}
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**leaves, **buffers}, (x,)), y)
        for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            if n in NAMES:
                g = torch.where(alive[n], g, kappa * g)
            velocity[n] = MOMENTUM * velocity[n] + g + DECAY * theta[n]
            theta[n] = theta[n] - LR * velocity[n]
    return history


@pytest.mark.parametrize(
    ("sparsity", "options", "p", "kappa"),
    [
        pytest.param(0.8, {}, 3.0, 1.0, id="paper"),
        pytest.param(0.96, {}, 3.0, 0.5, id="paper-high"),
        pytest.param(0.95, {}, 3.0, 1.0, id="paper-edge"),
        pytest.param(0.8, {"p": 2.0, "pruned_gradient": 0.25}, 2.0, 0.25, id="settings"),
        pytest.param(0.8, {"p": 1.0}, 1.0, 1.0, id="soft"),
    ],
)
@pytest.mark.parametrize("side", [1, 2])
def test_thirty_steps(side: int, sparsity: float, options: dict[str, float], p: float, kappa: float) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = reference(copy.deepcopy(model), sparsity, side, p, kappa)
    pattern = Unstructured() if side == 1 else Block(side, side)
    sparsifier = Sparsifier(model, sparsity, T, Feather(ramp=cubic(0, 1), **options), pattern=pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for _ in follow(model, sparsifier, expected[:T], optimizer, zeros=True):
        pass


def test_the_mask_freezes_without_a_jump() -> None:
    torch.manual_seed(0)
    model = Net().double()
    sparsifier = Sparsifier(model, 0.8, 10, "feather", warmup=0, finetune=0.5)
    before = {n: model.get_parameter(n).detach().clone() for n in NAMES}
    run = sparsifier._run
    with torch.no_grad():
        run.weights.freeze(run.at)
        run.write()
    for name, w in before.items():
        assert torch.equal(model.get_parameter(name), w)


def test_bad_settings() -> None:
    for p, kappa in ((0.5, None), (float("inf"), None), (3.0, 2.0), (3.0, -0.1)):
        with pytest.raises(ValueError, match="Feather"):
            Feather(p=p, pruned_gradient=kappa)
