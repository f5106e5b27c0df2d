"""STR, in both forms, against its update rule in a straight line."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import spartan
from spartan import Block, Sparsifier, Unstructured
from spartan.methods.soft_threshold import STR
from spartan.problem import problem
from tests.contract.cases import Net, batch
from tests.methods.following import follow

T, W, FREEZE = 30, 6, 24  # steps, warm-up, first step of finetuning
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.1, 0.9, 1e-3
NAMES = ("conv.weight", "hidden.weight", "head.weight")


def units(x: Tensor, side: int) -> Tensor:
    """Mean over side × side blocks of the matrix."""
    rows, columns = x.shape[0], x[0].numel()
    return x.reshape(rows // side, side, columns // side, side).mean((1, 3))


def places(u: Tensor, side: int, like: Tensor) -> Tensor:
    return u.repeat_interleave(side, 0).repeat_interleave(side, 1).reshape(like.shape)


def thresholded(theta: dict[str, Tensor], s: Tensor, density: float, side: int, exact: bool) -> dict[str, Tensor]:
    """w = θ · relu(u − t)/u with t = max(sigmoid(s) + λ, 0), λ a constant that leaves the budget; one weight: its sign."""
    u = {n: units(theta[n].abs(), side) for n in NAMES}
    shift = 0.0
    if exact:
        z = torch.cat([(u[n] - torch.sigmoid(s[i])).flatten() for i, n in enumerate(NAMES)])
        ranked = z.detach().sort(descending=True).values
        kept = int(density * len(ranked) + 1e-9)
        shift = float(ranked[kept]) if kept < len(ranked) else -math.inf
    w = {}
    for i, n in enumerate(NAMES):
        t = torch.relu(torch.sigmoid(s[i]) + shift)
        if side == 1:
            w[n] = torch.sign(theta[n]) * torch.relu(theta[n].abs() - t)
        else:
            w[n] = theta[n] * places(torch.relu(u[n] - t) / u[n], side, theta[n])
        # The first unit that does not fit is at the threshold; rounding must not put it above.
        w[n] = torch.where(places(u[n] - torch.sigmoid(s[i]) > shift, side, theta[n]), w[n], 0.0)
    return w


def reference(model: nn.Module, init: float, side: int, exact: bool) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """w and s at every step, from 0 to T."""
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    theta["s"] = torch.full((3,), init, dtype=torch.float64)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    velocity = {n: torch.zeros_like(p) for n, p in theta.items()}
    history, thresholds, ratio = [], [], None
    for t in range(T + 1):
        leaves = {n: p.clone().requires_grad_() for n, p in theta.items()}
        density = 1 - SPARSITY * min(1.0, t / W)
        if t < FREEZE:
            w = thresholded(leaves, leaves["s"], density, side, exact)
        else:
            if ratio is None:
                start = thresholded(theta, theta["s"], density, side, exact)
                ratio = {n: start[n] / theta[n] for n in NAMES}
            w = {n: ratio[n] * leaves[n] for n in NAMES}
        history.append({n: w[n].detach() for n in NAMES})
        thresholds.append(theta["s"].clone())
        x, y = batch(t)
        dense = {n: p for n, p in leaves.items() if n != "s"}
        loss = nn.functional.cross_entropy(functional_call(model, {**dense, **w, **buffers}, (x,)), y)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for n, g in zip(leaves, grads, strict=True):
            if g is not None:  # s rests once the mask is fixed
                velocity[n] = MOMENTUM * velocity[n] + g + DECAY * theta[n]
                theta[n] = theta[n] - LR * velocity[n]
    return history, thresholds


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("init", [-5.0, -2.0])
def test_thirty_steps(init: float, side: int, exact: bool) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected, thresholds = reference(copy.deepcopy(model), init, side, exact)
    pattern = Unstructured() if side == 1 else Block(side, side)
    method = STR(exact=exact, init=init)
    sparsifier = Sparsifier(model, SPARSITY, T, method, pattern=pattern, warmup=W / T, finetune=1 - FREEZE / T)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    state = sparsifier._run.weights.solving[0].state
    for t, _ in follow(model, sparsifier, expected, optimizer, zeros=True):
        torch.testing.assert_close(state.learned_per_target["s"].detach(), thresholds[t], rtol=0, atol=1e-10)
    assert len({round(x, 9) for x in state.learned_per_target["s"].tolist()}) == 3, "each layer has its own"


def test_the_learned_thresholds_move_the_budget_between_layers() -> None:
    torch.manual_seed(0)
    model = Net().double()
    sparsifier = Sparsifier(model, SPARSITY, 10, "str", warmup=0)
    before = [layer.kept for layer in sparsifier.layers()]
    (solver,) = sparsifier._run.weights.solving
    with torch.no_grad():
        solver.state.learned_per_target["s"][0] = -1.0  # a higher threshold for the convolution
    sparsifier._run.solve()
    after = [layer.kept for layer in sparsifier.layers()]
    assert sum(after) == sum(before)
    assert after[0] < before[0]


def test_the_published_form_has_no_phases_and_asks_for_nothing() -> None:
    """To the end of the run thresholds learn, and by default s decays as the weights do."""
    torch.manual_seed(0)
    model = Net().double()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)
    sparsifier = Sparsifier(model, SPARSITY, T, STR(exact=False, init=-2.0)).attach(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0]
    (learned,) = sparsifier._run.weights.learned()
    assert optimizer.param_groups[0]["params"][-1] is learned  # beside the weights, whose decay it takes
    s = sparsifier._run.weights.solving[0].state.learned_per_target["s"]
    for t in range(T):
        assert sparsifier.stats.phase == "intermediate"
        assert sparsifier.stats.target_density == 1.0
        before = s.detach().clone()
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (s != before).all()
    sparsifier.finalize()
    zeros = sum(int((model.get_parameter(n) == 0).sum()) for n in NAMES)
    whole = sum(model.get_parameter(n).numel() for n in NAMES)
    assert 0 < zeros < SPARSITY * whole
    assert sparsifier.stats.density == pytest.approx(1 - zeros / whole)
    assert sparsifier.stats.zeros == pytest.approx(zeros / whole)
    with pytest.raises(RuntimeError, match="fewer zeros than asked for"):
        spartan.verify(model, SPARSITY)
    spartan.verify(model, zeros / whole)


@pytest.mark.parametrize("decay", [None, 0.0])
def test_without_decay_the_published_form_says_that_it_will_stay_dense(decay: float | None) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, SPARSITY, 10, STR(exact=False, decay=decay))
    with pytest.warns(UserWarning, match=r"STR\(exact=False.*gets sparse by the weight decay.*none.*decay=5e-4"):
        sparsifier.attach(optimizer)


def test_its_own_form_promises_no_sparsity() -> None:
    assert STR().sparse_from == "warmup"
    assert STR(exact=False).sparse_from == "never"
    assert next(e for e in spartan.methods() if e.name == "str").sparse_from == "warmup"
    model = Net()
    sparsifier = Sparsifier(model, SPARSITY, 10, STR(exact=False, init=-3200.0))
    assert sparsifier.stats.density == 1.0
    assert sparsifier.progress()["density"] is None
    sparsifier.finalize()


def test_targets_worked_on_as_one_have_a_threshold_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where all weights are one tensor."""
    found = []
    for joined in (False, True):
        monkeypatch.setattr(problem, "stands_by_memory", lambda target, joined=joined: joined)
        torch.manual_seed(0)
        sparsifier = Sparsifier(Net().double(), SPARSITY, 10, STR(), warmup=0)
        (solver,) = sparsifier._run.weights.solving
        assert solver.joined == joined
        with torch.no_grad():
            solver.state.learned_per_target["s"].copy_(torch.tensor([-1.0, -2.0, -3.0]))
        sparsifier._run.solve()
        form = STR().form(solver, sparsifier._run.at)
        torch.manual_seed(1)
        grads = [torch.randn_like(t) for t in solver.theta.views]
        with torch.no_grad():
            weights, turned = solver.weights(form), solver.turn(form, grads)
        found.append((weights, [g for g in turned if g is not None], solver.state.learned_per_target["s"].grad))
    (want, grads, s), (got, joined_grads, joined_s) = found
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    for a, b in zip(grads, joined_grads, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(s, joined_s)


def test_its_own_form_gets_sparse_by_the_decay_of_its_thresholds() -> None:
    kept = []
    for decay in (1e-9, 0.5):
        torch.manual_seed(0)
        model = Net().double()
        optimizer = torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 1e-4}], lr=0.1)
        sparsifier = Sparsifier(model, SPARSITY, 30, STR(exact=False, decay=decay)).attach(optimizer)
        assert optimizer.param_groups[-1]["weight_decay"] == decay
        for t in range(30):
            x, y = batch(t)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        kept.append(sum(layer.kept for layer in sparsifier.layers()))
    assert kept[1] < 0.8 * kept[0]


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="STR: init"):
        STR(init=math.inf)
    with pytest.raises(ValueError, match="STR: decay=-1"):
        STR(decay=-1.0)


@pytest.mark.parametrize(("decay", "groups"), [(DECAY, 1), (0.5, 2)])
def test_thresholds_join_the_group_of_the_weights_where_options_are_the_same(decay: float, groups: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    before = list(optimizer.param_groups[0]["params"])
    sparsifier = Sparsifier(model, SPARSITY, T, STR(decay=decay)).attach(optimizer)
    assert len(optimizer.param_groups) == groups
    (learned,) = sparsifier._run.weights.learned()
    assert optimizer.param_groups[-1]["params"][-1] is learned
    sparsifier.detach()
    assert len(optimizer.param_groups) == 1
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], before, strict=True))
    sparsifier.attach(optimizer)
    assert len(optimizer.param_groups) == groups
