"""30 steps of Top-KAST follow its paper, written here in a straight line; and the rows of Spartan's tables run."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from spartan import Block, Sparsifier, TopKAST, Unstructured
from spartan.methods.powerprop import Powerprop
from tests.contract.algorithm_3 import spread, units
from tests.contract.cases import Net, batch
from tests.training import loss_of, net, thetas, values

T, W, FREEZE = 30, 6, 24  # steps, warm-up, first step of finetuning
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.1, 0.9, 1e-2
NAMES = ("conv.weight", "hidden.weight", "head.weight")


def largest(u: dict[str, Tensor], fraction: float) -> dict[str, Tensor]:
    """1 for the units of largest magnitude over all layers, 0 elsewhere."""
    ranked = torch.cat([u[n] for n in NAMES]).sort(descending=True).values
    count = int(fraction * len(ranked) + 1e-9)
    return {n: (u[n] >= ranked[count - 1]).double() for n in NAMES}


def reference(model: nn.Module, side: int, backward: float, exploration: float, every: int) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    velocity = {n: torch.zeros_like(p) for n, p in theta.items()}
    history, a, b = [], {}, {}
    for t in range(T + 1):
        density = 1 - SPARSITY * min(1.0, t / W)
        if t <= FREEZE and (t <= W or t % every == 0):
            u = {n: units(theta[n].abs(), side) for n in NAMES}
            a = {n: spread(x, theta[n], side) for n, x in largest(u, density).items()}
            b = {n: spread(x, theta[n], side) for n, x in largest(u, max(density, 1 - backward)).items()}
        w = {n: (theta[n] * a[n] if n in NAMES else p.clone()).requires_grad_() for n, p in theta.items()}
        history.append({n: w[n].detach().clone() for n in NAMES})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        for n, g in zip(w, torch.autograd.grad(loss, list(w.values())), strict=True):
            if n in NAMES and t < FREEZE:
                penalty = exploration * theta[n] * a[n] + exploration / density * theta[n] * (b[n] - a[n])
                g = g * b[n] + penalty
            elif n in NAMES:
                g = g * a[n]
            velocity[n] = MOMENTUM * velocity[n] + g + DECAY * theta[n]
            theta[n] = theta[n] - LR * velocity[n]
    return history


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"exploration": 0.05}, id="exploration"),
        pytest.param({"backward_sparsity": 0.5}, id="backward"),
        pytest.param({"backward_sparsity": 0.5, "exploration": 0.05}, id="paper"),
        pytest.param({"every": 4}, id="every"),
        pytest.param({"backward_sparsity": 0.5, "exploration": 0.05, "every": 5}, id="all"),
    ],
)
@pytest.mark.parametrize("side", [1, 2])
def test_thirty_steps(side: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net().double()
    settings = (options.get("backward_sparsity", 0.0), options.get("exploration", 0.0), options.get("every", 1))
    expected = reference(copy.deepcopy(model), side, *settings)
    pattern = Unstructured() if side == 1 else Block(side, side)
    sparsifier = Sparsifier(model, SPARSITY, T, TopKAST(**options), pattern=pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    for t in range(T + 1):
        masks = sparsifier.masks()
        for name, w in expected[t].items():
            found = model.get_parameter(name).detach()
            torch.testing.assert_close(found, w, rtol=0, atol=1e-10, msg=f"step {t}, {name}")
            assert torch.equal(found != 0, masks[name])
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------- the penalty is added once, unscaled

PENALTY = TopKAST(backward_sparsity=0.5, exploration=0.5)


def three_steps(kind: str, fused: bool = False) -> dict[str, Tensor]:
    """Weights after three steps, with the loss scaled, split or transformed in the way that `kind` says."""
    model = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    sparsifier = Sparsifier(model, 0.75, 20, PENALTY, warmup=0).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind.startswith("scaled"))
    for step in range(3):
        if kind == "micro-batches":
            for rows in (slice(0, 4), slice(4, 8)):
                (loss_of(model, step, rows, dtype=torch.float32) / 2).backward()
        else:
            scaler.scale(loss_of(model, step, dtype=torch.float32)).backward()
        if kind == "scaled-unscale":
            scaler.unscale_(optimizer)
        if kind in ("scaled-unscale", "explicit"):
            sparsifier.backward()
            sparsifier.backward()  # once per step, however often it is asked for
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        ("explicit", False),
        ("micro-batches", False),
        ("scaled-step", False),
        ("scaled-step", True),
        ("scaled-unscale", False),
        ("scaled-unscale", True),
    ],
)
def test_the_penalty_is_added_once_and_not_scaled(kind: str, fused: bool) -> None:
    expected, found = three_steps("plain"), three_steps(kind, fused)
    for name, w in expected.items():
        torch.testing.assert_close(found[name], w, rtol=1e-5, atol=1e-6, msg=name)


def test_layers_that_the_loss_does_not_reach_feel_the_penalty_of_their_group() -> None:
    model = net()
    sparsifier = Sparsifier(model, 0.75, 20, TopKAST(exploration=0.5), warmup=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.attach(optimizer)
    theta, mask = thetas(sparsifier)["4.weight"], sparsifier.masks()["4.weight"]
    model[0].weight.square().sum().backward()
    sparsifier.backward()
    assert model[4].weight.grad is None  # the penalty comes in the step
    optimizer.step()
    torch.testing.assert_close(model[4].weight.grad, torch.where(mask, 0.5 * theta, 2.0 * theta))
    torch.testing.assert_close(
        thetas(sparsifier)["4.weight"], theta - 0.1 * torch.where(mask, 0.5 * theta, 2.0 * theta)
    )


class NoLookAtValues(TorchDispatchMode):
    """Fails where the host would wait for a value of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_the_penalty_needs_no_look_at_the_device() -> None:
    sparsifier = Sparsifier(net(), 0.75, 20, TopKAST(exploration=0.5), warmup=0)
    (solver,) = sparsifier._run.weights.solving
    form = sparsifier.method.form(solver, sparsifier._run.at)
    with NoLookAtValues():
        solver.turn(form, [torch.ones_like(t) for t in solver.theta.views])
        solver._per_unit(form.decay.b)  # type: ignore[union-attr]
    with pytest.raises(AssertionError), NoLookAtValues():
        bool(solver.theta.views[0].any())


# ---------------------------------------------------------------------- masks that stay for a while


def build_every(seed: int) -> tuple[Net, torch.optim.Optimizer, Sparsifier]:
    torch.manual_seed(seed)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    method = TopKAST(every=4, backward_sparsity=0.25)
    return model, optimizer, Sparsifier(model, 0.7, 20, method).attach(optimizer)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = batch(step)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_masks_change_every_fourth_step_and_whenever_the_budget_does() -> None:
    model, optimizer, sparsifier = build_every(0)
    total = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    changed, before = set(), sparsifier.masks()
    for step in range(1, 21):
        one_step(model, optimizer, step)
        masks = sparsifier.masks()
        if any(not torch.equal(masks[n], before[n]) for n in masks):
            changed.add(step)
        before = masks
        assert sum(int(m.sum()) for m in masks.values()) == int(total * (1 - 0.7 * min(1.0, step / 4)) + 1e-9)
    assert {1, 2, 3, 4} <= changed <= {1, 2, 3, 4, 8, 12, 16}
    assert changed & {8, 12, 16}


def test_masks_that_stay_survive_a_resume() -> None:
    model, optimizer, sparsifier = build_every(0)
    for step in range(6):
        one_step(model, optimizer, step)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
    file.seek(0)
    again = build_every(1)
    for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    for step in range(6, 20):
        one_step(model, optimizer, step)
        one_step(again[0], again[1], step)
    for a, b in zip(model.parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------- the rows of the paper's tables

ROWS: dict[str, dict[str, Any]] = {
    "IMP": {"method": "imp"},
    "RigL (ERK)": {"method": "rigl", "budget": "erk", "exclude": ["conv.*"]},
    "Top-KAST": {"method": "topkast", "budget": "uniform", "exclude": ["conv.*"]},  # Schwarz et al.
    "Top-KAST (with PP)": {"method": Powerprop("topkast"), "budget": "uniform", "exclude": ["conv.*"]},
    "Top-KAST (with ERK)": {"method": "topkast", "budget": "erk", "exclude": ["conv.*"]},
    "Top-KAST (with PP & ERK)": {"method": Powerprop("topkast"), "budget": "erk", "exclude": ["conv.*"]},
    "Top-KAST (ERK)": {"method": "topkast", "budget": "erk"},
    "Top-KAST (prune all)": {"method": "topkast"},
    "Top-KAST (excl. input conv.)": {"method": "topkast", "exclude": ["conv.*"]},
    "Spartan": {"method": "spartan"},
}


@pytest.mark.parametrize("row", ROWS)
def test_the_rows_of_the_papers_tables(row: str) -> None:
    torch.manual_seed(0)
    model, options = Net().double(), ROWS[row]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sparsifier = Sparsifier(model, sparsity=0.75, total_steps=20, **options).attach(optimizer)
    for step in range(20):
        one_step(model, optimizer, step)
    sparsifier.finalize()
    kept = {n: int((model.get_parameter(n) != 0).sum()) for n in NAMES}
    weights = {n: model.get_parameter(n).numel() for n in NAMES if n in sparsifier.masks()}
    assert ("conv.weight" in weights) == ("exclude" not in options)
    if "exclude" in options:
        assert kept["conv.weight"] == 72
    budget = options.get("budget", "global")
    spare = 0.25 * sum(weights.values()) - sum(kept[n] for n in weights)
    assert 0 <= spare < (len(weights) if budget == "erk" else 1)  # whole weights per layer
    if budget == "uniform":
        assert {n: kept[n] / weights[n] for n in weights} == dict.fromkeys(weights, 0.25)
    if budget == "erk":  # the smaller layer is the denser one
        assert kept["head.weight"] / 32 > kept["hidden.weight"] / 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exploration": -1e-4}, "TopKAST: exploration=-0.0001"),
        ({"exploration": float("inf")}, "TopKAST: exploration=inf"),
        ({"exploration": float("nan")}, "TopKAST: exploration=nan"),
        ({"every": 0}, "TopKAST: every=0"),
        ({"every": 2.5}, "TopKAST: every=2.5"),
        ({"every": True}, "TopKAST: every=True"),
        ({"backward_sparsity": 1.0}, "TopKAST: backward_sparsity=1.0"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKAST(**options)
