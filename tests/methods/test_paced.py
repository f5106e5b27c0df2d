"""Paced against its rule in a straight line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import NM, Block, Channel, Sparsifier, Unstructured
from spartan.methods.paced import FASTEST, NORMED, SLOWEST, WINDOW, Paced
from spartan.solvers.forms import LEAST
from tests.contract.cases import Net, backward, batch
from tests.methods.following import follow
from tests.methods.test_feather import NAMES, places, units

T, W = 40, 20  # steps, and warm-up
SPARSITY, LR = 0.8, 0.05


def reference(model: nn.Module, side: int, method: Paced, adam: bool) -> tuple[list[dict[str, Tensor]], list[float]]:
    """w at every step from 0 to T − 1, and the pace: with so few steps, there is a look at every one."""
    theta = {n: q.detach().clone() for n, q in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    first = {n: torch.zeros_like(q) for n, q in theta.items()}
    second = {n: torch.zeros_like(q) for n, q in theta.items()}
    masks: list[Tensor] = []
    pace, history, paces, before = 1.0, list[dict[str, Tensor]](), list[float](), dict[str, Tensor]()
    seen, usual = {n: torch.zeros(2, dtype=torch.float64) for n in NAMES}, dict.fromkeys(NAMES, 0.0)
    for t in range(T):
        if t:
            lost = 2 * method.leak * (1 - t / T) / T
            for n in NAMES:
                theta[n] = torch.where(before[n], theta[n], theta[n] * (1 - lost))
        u = {n: units(theta[n].abs(), side) for n in NAMES}
        ranked = torch.cat([u[n].flatten() for n in NAMES]).sort(descending=True).values
        k = int((1 - SPARSITY * (1 - (1 - min(1.0, t / W)) ** 3)) * len(ranked) + 1e-9)
        tau = float(ranked[k]) if k < len(ranked) else 0.0
        kept = torch.cat([(u[n] > tau).flatten() for n in NAMES])
        if len(masks) >= WINDOW:
            came = int((kept & ~masks[-WINDOW]).sum())
            left = int(kept.sum())
            wanted = method.exchange * (1 - left / len(kept)) * min(1.0, (T - t) / (T - W))
            if wanted:
                by = (wanted * left / max(came, 0.5)) ** 0.2
                pace = min(FASTEST, max(SLOWEST, pace * (min(1.0, by) if t >= W else by)))
        masks.append(kept)
        paces.append(pace)
        before = {n: places(u[n] > tau, side, theta[n]) for n in NAMES}
        p = method.p
        w = {}
        for n in NAMES:
            shrunk = (1 - (tau / u[n]) ** p).clamp(min=0) ** (1 / p) if side == 1 else torch.ones_like(u[n])
            w[n] = torch.where(before[n], theta[n] * places(shrunk, side, theta[n]), 0.0)
        history.append(w)
        leaves = {n: q.clone().requires_grad_() for n, q in {**theta, **w}.items()}
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**leaves, **buffers}, (x,)), y)
        for n, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            if n in NAMES:
                products = (g * w[n]).flatten(1)
                if usual[n]:
                    g = torch.where(before[n], g, g * (share(w[n], theta[n], side) / usual[n]).clamp(LEAST, 1.0))
                seen[n] += torch.stack([products.sum(1).square().sum(), products.square().sum()])
                usual[n] = float(w[n].norm() / theta[n].norm()) if seen[n][0] < NORMED * seen[n][1] else 0.0
            if n in NAMES and side > 1:
                part = units(g * theta[n], side) / units(theta[n] ** 2, side)
                g = torch.where(before[n], g, places(part, side, theta[n]) * theta[n])
            if adam:
                first[n] = 0.9 * first[n] + 0.1 * g
                second[n] = 0.999 * second[n] + 0.001 * g * g
                root = (second[n] / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8
                update = -LR * first[n] / (1 - 0.9 ** (t + 1)) / root
            else:
                first[n] = 0.9 * first[n] + g
                update = -LR * first[n]
            if n in NAMES:
                update = torch.where(before[n], update, pace * update)
            theta[n] = theta[n] + update
    assert [n for n in NAMES if usual[n]] == [n for n in NAMES if n.startswith("conv")]  # what batch norm follows
    return history, paces


def share(w: Tensor, theta: Tensor, side: int) -> Tensor:
    """‖w‖/‖θ‖ of the outputs in each row of blocks."""
    left, whole = (x.flatten(1).square().sum(1).view(-1, side).sum(1) for x in (w, theta))
    return (left / whole).sqrt().repeat_interleave(side).view(-1, *[1] * (w.ndim - 1))


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    ("side", "options"),
    [
        (1, {}),
        (1, {"exchange": 0.05, "leak": 3.0, "p": 2.0}),
        (2, {}),
        (1, {"leak": 0.0}),
    ],
)
def test_forty_steps(side: int, options: dict[str, Any], adam: bool) -> None:
    torch.manual_seed(0)
    model, method = Net().double(), Paced(**options)
    expected, paces = reference(copy.deepcopy(model), side, method, adam)
    pattern = Unstructured() if side == 1 else Block(side, side)
    sparsifier = Sparsifier(model, SPARSITY, T, method, pattern=pattern)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    found = []
    for _ in follow(model, sparsifier, expected, optimizer, zeros=True):
        found.append(float(sparsifier._run.weights.solving[0].state.per_target["pace"][0]))
    assert found == pytest.approx(paces)
    assert len(set(paces)) > 3
    assert all(b <= a for a, b in zip(paces[W:], paces[W + 1 :], strict=False))


def train(sparsifier: Sparsifier, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2), NM(1, 2), Channel("in")], ids=repr)
def test_two_optimizers_look_once_a_step(pattern: Any) -> None:
    """Masks are then chosen twice a step; the leak and the history must not run twice as fast."""
    found = []
    for apart in (False, True):
        torch.manual_seed(0)
        model = Net().double()
        sparsity = 0.5 if isinstance(pattern, NM) else SPARSITY
        sparsifier = Sparsifier(model, sparsity, T, Paced(), pattern=pattern)
        convs, rest = list(model.conv.parameters()), [p for n, p in model.named_parameters() if "conv" not in n]
        optimizers = [torch.optim.SGD(p, lr=LR) for p in ((convs, rest) if apart else ([*convs, *rest],))]
        sparsifier.attach(*optimizers)
        for step in range(7):  # later a weight of the second is in A or not, after what the first has moved
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
        state = sparsifier.state_dict()
        assert state["numbers"] == {"looks": 8, "looked": 7, "damps": -1}
        found.append({n: p.detach().clone() for n, p in model.named_parameters()})
    for name, p in found[0].items():
        torch.testing.assert_close(found[1][name], p)


def test_layers_of_their_own_budget_have_a_pace_of_their_own() -> None:
    torch.manual_seed(0)
    model = Net().double()
    sparsifier = Sparsifier(model, SPARSITY, T, Paced(), budget="uniform")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    train(sparsifier.attach(optimizer), model, optimizer, range(20))
    paces = sparsifier.state_dict()["per_target"]["pace"]
    assert len(set(paces.values())) == 3
    assert all(SLOWEST <= x <= FASTEST for x in paces.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": 1.5}, r"Paced: exchange=1.5; a number in \[0, 1\] is needed"),
        ({"leak": -1.0}, "Paced: leak=-1.0; a finite number ≥ 0 is needed"),
        ({"leak": float("inf")}, "Paced: leak=inf; a finite number ≥ 0 is needed"),
        ({"p": 0.5}, "Paced: p=0.5; a number of at least 1 is needed, inf for a hard threshold"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Paced(**options)
