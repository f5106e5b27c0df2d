"""RigL follows the algorithm of Evci et al. (2020), and keeps its promises where its mask changes."""

from __future__ import annotations

import copy
import io
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import Block, Flops, Sparsifier, Unstructured
from spartan.methods import SET, RigL  # type: ignore[attr-defined]
from spartan.problem import problem
from spartan.step.look import solutions
from tests.contract.cases import Net, batch
from tests.methods.rewiring import END, NAMES, Rule, T, compare, cosine_down

METHODS = {"rigl": RigL(every=3, fraction=0.5), "set": SET(every=3, fraction=0.5)}


def by_gradient(seed: int) -> Any:
    return lambda layer, step, gradient: gradient


@pytest.mark.parametrize("budget", ["erk", "uniform"])
@pytest.mark.parametrize("side", [1, 2])
def test_forty_steps(budget: str, side: int) -> None:
    pattern = Unstructured() if side == 1 else Block(2, 2)
    method = RigL(every=4, fraction=0.5)
    seen = compare(
        lambda model: Sparsifier(model, 0.7, T, method, pattern=pattern, budget=budget),
        Rule(lambda t: t % 4 == 0 and t < END, lambda t, kept: cosine_down(0.5, t, kept), replaces=True),
        by_gradient,
        side,
    )
    changed = [any(not torch.equal(a[n], b[n]) for n in NAMES) for a, b in pairwise(seen)]
    # An update alone drops weights at once; what has grown is zero until the next step.
    assert changed[0]
    assert not any(torch.equal(a[n], b[n]) for n in NAMES for a, b in pairwise(seen[END:]))
    dropped = [all(((a[n] == b[n]) | (b[n] == 0)).all() for n in NAMES) for a, b in pairwise(seen)]
    assert [t for t, alone in enumerate(dropped) if alone] == [0, 4, 8, 12, 16, 20, 24, 28]


def test_an_update_leaves_everything_else_as_it_is() -> None:
    """Biases, norms, the optimizer's count and its momentum too, but for what grows."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sparsifier = Sparsifier(model, 0.7, T, RigL(every=5, fraction=0.5)).attach(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for t in range(11):
        theta = [x.clone() for x in sparsifier._run.weights.solving[0].theta.views]
        before = copy.deepcopy({n: p.detach() for n, p in model.named_parameters()})
        states = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
        old = sparsifier.masks()
        train(model, optimizer, range(t, t + 1))
        scheduler.step()
        if t % 5:
            continue
        assert sparsifier.stats.step == t + 1
        grown = {n: mask & ~old[n] for n, mask in sparsifier.masks().items()}
        assert any(mask.any() for mask in grown.values())
        for n, p in model.named_parameters():
            assert n in grown or torch.equal(p, before[n])
            for key, value in states.get(p, {}).items():
                new = optimizer.state[p][key]
                if key == "exp_avg" and n in grown:
                    assert not new[grown[n]].any()
                    new, value = new[~grown[n]], value[~grown[n]]
                assert torch.equal(new, value)
        for i, n in enumerate(grown):
            now = sparsifier._run.weights.solving[0].theta.views[i]
            assert not now[grown[n]].any()
            assert torch.equal(now[~grown[n]], theta[i][~grown[n]])
    assert optimizer.state[model.head.bias]["step"] == 8


def test_a_closure_is_asked_once_for_an_update() -> None:
    model, optimizer, sparsifier = start(method=RigL(every=3, fraction=0.5))
    plain, other, _ = start(method=RigL(every=3, fraction=0.5))
    for t in range(T):
        losses: list[Any] = []

        def closure(t: int = t, losses: list[Any] = losses) -> Any:
            optimizer.zero_grad()
            x, y = batch(t)
            losses.append(nn.functional.cross_entropy(model(x), y))
            losses[-1].backward()
            return losses[-1]

        assert optimizer.step(closure) is losses[0]
        assert len(losses) == 1
        train(plain, other, range(t, t + 1))
    assert sparsifier.stats.step == T
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def start(seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Sparsifier]:
    torch.manual_seed(seed)
    model = Net().double()
    method = options.pop("method", RigL(every=3, fraction=0.5))
    sparsifier = Sparsifier(model, 0.7, T, method, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, sparsifier.attach(optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for t in steps:
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("warmup", [0.0, 0.3])
@pytest.mark.parametrize("budget", ["global", "erk", {"conv.*": 0.5}])
@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2), Block(1, -1)])
@pytest.mark.parametrize("flops", [False, True])
def test_the_budget_holds_at_every_step_while_the_mask_changes(
    name: str, warmup: float, budget: Any, pattern: Any, flops: bool
) -> None:
    cost = Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64)) if flops else None
    method = METHODS[name]
    model, optimizer, sparsifier = start(method=method, budget=budget, pattern=pattern, cost=cost, warmup=warmup)
    masks = []
    for t in range(T):
        run = sparsifier._run
        kept, costs = run.kept_units(), run.problem.unit_costs
        for segment, (k, _, _) in zip(run.problem.segments, solutions(run.weights), strict=True):
            spent = sum(kept[i] * costs[i] for i in segment.targets)
            assert k - max(costs[i] for i in segment.targets) < spent <= k + 1e-6
        masks.append(sparsifier.masks())
        for n, mask in masks[-1].items():
            assert not model.get_parameter(n)[~mask].any()
        train(model, optimizer, range(t, t + 1))
    if pattern != Block(1, -1):  # of the few rows of a layer, half is often less than one
        assert any(not torch.equal(masks[29][n], masks[14][n]) for n in NAMES)
    sparsifier.finalize()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [2, 3, 10, 29, 33])
def test_resume_across_updates_is_bit_identical(name: str, stop: int) -> None:
    method = METHODS[name]
    model, optimizer, sparsifier = start(method=method)
    train(model, optimizer, range(stop))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
    train(model, optimizer, range(stop, T))
    file.seek(0)
    again: tuple[Any, Any, Any] = start(seed=9, method=method)
    for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(again[0], again[1], range(stop, T))
    for a, b in zip(model.state_dict().values(), again[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", METHODS)
def test_choosing_twice_at_a_step_changes_nothing(name: str) -> None:
    model, optimizer, sparsifier = start(method=METHODS[name])
    for t in range(T):
        train(model, optimizer, range(t, t + 1))
        before = copy.deepcopy(model.state_dict())
        with sparsifier.dense_weights():
            pass
        for n, value in model.state_dict().items():
            assert torch.equal(value, before[n])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_targets_worked_on_as_one_are_rewired_as_separate_ones_are(
    name: str, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    for joined in (False, True):
        monkeypatch.setattr(problem, "stands_by_memory", lambda target, joined=joined: joined)
        torch.manual_seed(0)
        model = Net().double().to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        sparsifier = Sparsifier(model, 0.7, T, METHODS[name], budget="global").attach(optimizer)
        assert sparsifier._run.weights.solving[0].joined == joined
        train(model, optimizer, range(T))
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_two_optimizers_rewire_as_one_does() -> None:
    one, optimizer, _ = start(budget="global")
    torch.manual_seed(0)
    two = Net().double()
    sparsifier = Sparsifier(two, 0.7, T, RigL(every=3, fraction=0.5), budget="global")
    split: list[list[Tensor]] = [list(two.conv.parameters()), [*two.hidden.parameters(), *two.head.parameters()]]
    split[0] += list(two.norm.parameters())
    parts = [torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3) for p in split]
    sparsifier.attach(*parts)
    for t in range(T):
        train(one, optimizer, range(t, t + 1))
        x, y = batch(t)
        nn.functional.cross_entropy(two(x), y).backward()
        for part in parts:
            part.step()
        for part in parts:
            part.zero_grad()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_gradients_that_come_in_two_parts_are_put_together() -> None:
    """As with two optimizers that have a backward pass each, where layers share a budget."""
    _, _, sparsifier = start(budget="global", method=RigL(every=2))
    (solver,) = sparsifier._run.weights.solving
    g = [torch.randn_like(theta) for theta in solver.theta.views]
    sparsifier.method.observe(solver, [g[0], None, None], sparsifier._run.at)
    sparsifier.method.observe(solver, [None, g[1], None], sparsifier._run.at)
    for found, want in zip(
        solver.state.per_unit["growth"].split(solver.problem.units), [g[0], g[1], torch.zeros_like(g[2])], strict=True
    ):
        assert torch.equal(found, want.abs().flatten())


def test_a_layer_that_the_loss_does_not_reach_keeps_its_mask() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.5, 20, RigL(every=2)).attach(optimizer)
    first = sparsifier.masks()
    for _ in range(10):
        model["used"](torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(sparsifier.masks()["unused.weight"], first["unused.weight"])
    assert not torch.equal(sparsifier.masks()["used.weight"], first["used.weight"])


def test_gradients_are_remembered_only_for_an_update() -> None:
    model, optimizer, sparsifier = start()
    for t in range(T):
        train(model, optimizer, range(t, t + 1))
        assert all("growth" not in part.state.per_unit for part in sparsifier._run.weights.parts)


@pytest.mark.parametrize(
    ("options", "names"),
    [({"every": 0}, "every"), ({"every": 2.5}, "every"), ({"every": 1}, "every"), ({"fraction": 1.5}, "fraction")],
)
def test_bad_settings_are_named(options: Any, names: str) -> None:
    with pytest.raises(ValueError, match=f"RigL: {names}="):
        RigL(**options)
