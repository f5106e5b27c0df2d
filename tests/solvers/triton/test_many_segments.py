"""A budget for every layer: many segments in the same launches, against plain torch."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spartan import IMP, NM, Block, Sparsifier, Spartan, TopKAST, Unstructured, linear
from spartan.methods import SET, ST3, STR, Feather, Method, RigL  # type: ignore[attr-defined]
from spartan.ops.parts import Part
from spartan.ops.select import Threshold, boundary
from spartan.ops.soft_topk import residual_at
from spartan.problem import problem
from spartan.problem.patterns import Pattern
from spartan.problem.schedules import Moment
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton.state import TOLD
from spartan.solvers.triton.topk import TopK
from tests.contract.kinds import Hurried
from tests.solvers.triton import DEVICE
from tests.waiting import check_no_step_waits

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)
STEPS = 6
METHODS: dict[str, Method] = {
    "spartan": Spartan(beta=linear(1, 50)),
    "topkast": TopKAST(),
    "topkast-b": TopKAST(backward_sparsity=0.1),
    "imp": IMP(),
    "rigl": RigL(every=2, fraction=0.5),
    "set": SET(every=2, fraction=0.5),
    "str": STR(),
    "st3": ST3(),
    "paced": Hurried(),
    "feather": Feather(),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU single weights stand in the order of memory, and are worked on as one tensor; here always."""
    monkeypatch.setattr(problem, "stands_by_memory", lambda target: True)


def net(channels_last: bool = True) -> nn.Sequential:
    """Five weights: of a 3×3 and a 2×2 kernel, of a 1×1 one, and of two Linears."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(4, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 2)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 10))
    order = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(DEVICE).to(memory_format=order)  # type: ignore[call-overload]


def build(kernels: str, method: Method | str, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """Two steps of warm-up, two with all that is to go gone, two with the mask fixed."""
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    settings: dict[str, Any] = {
        "sparsity": 0.8,
        "total_steps": STEPS,
        "warmup": 0.34,
        "finetune": 0.34,
        "budget": "erk",
    }
    return model, optimizer, Sparsifier(model, method=method, kernels=kernels, **(settings | options)).attach(optimizer)


def train(model: nn.Module, optimizer: Any, steps: range, skip: int | None = None) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, 3, 3, generator=rng).to(DEVICE)
        y = torch.randint(10, (8,), generator=rng).to(DEVICE)
        # The first layer is out of the loss's reach now and then.
        out = model(x) if step != skip else model[2:](torch.randn(8, 12, 3, 3, generator=rng).to(DEVICE))  # type: ignore[index]
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: nn.Module, of_one: Sparsifier, two: nn.Module, of_two: Sparsifier) -> None:
    for (key, mask), other in zip(of_one.masks().items(), of_two.masks().values(), strict=True):
        assert torch.equal(mask, other), key
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert torch.equal(a == 0, b == 0)
    assert of_one.stats.density == of_two.stats.density


@pytest.mark.parametrize("name", [name for name in METHODS if name != "topkast-b"])
def test_a_run_is_the_same_in_any_order_of_memory(name: str) -> None:
    plain, optimizer, of_plain = build("torch", METHODS[name], net(channels_last=False))
    fast, optimizer_fast, of_fast = build("triton", METHODS[name])
    assert len(of_fast._run.problem.segments) == 5
    for step in range(STEPS):
        (part,) = of_fast._run.weights.parts  # all segments are one part
        assert part.name == "triton"
        train(plain, optimizer, range(step, step + 1), skip=3)
        train(fast, optimizer_fast, range(step, step + 1), skip=3)
        assert_same(plain, of_plain, fast, of_fast)


@pytest.mark.parametrize(("name", "stop"), [("spartan", 3), ("topkast-b", 3), ("rigl", 3), ("str", 5)])
def test_a_state_moves_between_orders_of_memory(name: str, stop: int) -> None:
    """By the kernels and in plain torch, as it lies and in row-major order: a state knows nothing of them."""
    model, optimizer, sparsifier = build("triton", METHODS[name])
    train(model, optimizer, range(stop))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))
    others = [build("torch", METHODS[name], net(channels_last=False)), build("torch", METHODS[name])]
    for other in others:
        for part, state in zip(other, copy.deepcopy(states), strict=True):  # optimizers take tensors as they are
            part.load_state_dict(state)
        assert_same(model, sparsifier, other[0], other[2])
    back = build("triton", METHODS[name])
    for part, state in zip(back, copy.deepcopy([x.state_dict() for x in others[0]]), strict=True):
        part.load_state_dict(state)
    train(model, optimizer, range(stop, STEPS))
    for other in [*others, back]:
        train(other[0], other[1], range(stop, STEPS))
        assert_same(model, sparsifier, other[0], other[2])


@pytest.mark.parametrize(("name", "stop"), [("spartan", 3), ("spartan", 5), ("imp", 3), ("rigl", 3)])
def test_resume_is_bit_identical(name: str, stop: int) -> None:
    model, optimizer, sparsifier = build("triton", METHODS[name])
    train(model, optimizer, range(stop))
    file = io.BytesIO()
    torch.save([x.state_dict() for x in (model, optimizer, sparsifier)], file)
    train(model, optimizer, range(stop, STEPS))
    again = build("triton", METHODS[name])
    file.seek(0)
    for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(again[0], again[1], range(stop, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again[0].parameters(), strict=True))


def test_ties_are_cut_in_the_order_of_memory() -> None:
    """By position there, and by the kernels and in plain torch alike."""
    masks = []
    for kernels in ("torch", "triton"):
        model = net()
        for p in model.parameters():
            p.data.fill_(0.25)
        masks.append(build(kernels, IMP(), model, warmup=0.0)[2].masks())
    for (key, mask), other in zip(masks[0].items(), masks[1].values(), strict=True):
        assert torch.equal(mask, other), key
    first = masks[0]["0.weight"]
    kept = first.permute(0, 2, 3, 1).reshape(-1)
    assert kept[: int(first.sum())].all()


def launches(monkeypatch: pytest.MonkeyPatch, name: str, budget: str) -> list[list[str]]:
    """The kernels of every step, by name."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    seen: list[str] = []
    call = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.fn.__name__)
        return call(self, *args, **kwargs)

    method, warmup = (RigL(every=2), 0.0) if name == "stored" else (METHODS[name], 0.34)
    model, optimizer, sparsifier = build("triton", method, budget=budget, warmup=warmup)
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", counted)
        for step in range(STEPS):
            train(model, optimizer, range(step, step + 1))
            with torch.no_grad():  # on a GPU it looks at gradients by itself
                for target in sparsifier._run.problem.targets:
                    target.parameter.grad = torch.ones_like(target.parameter)
            checked(sparsifier)
            optimizer.zero_grad()
            found.append(list(seen))
            seen.clear()
    return found


def checked(sparsifier: Sparsifier) -> None:
    """What a step on a GPU does with its gradients."""
    (part,) = sparsifier._run.weights.parts
    part.check_gradients([t.parameter.grad for t in part.problem.targets])


in_the_interpreter = pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter counts")


@in_the_interpreter
@pytest.mark.parametrize("name", ["spartan", "topkast", "imp"])
def test_many_segments_launch_no_more_than_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = (launches(monkeypatch, name, budget) for budget in ("global", "erk"))
    assert many == one
    # One of them fetches the budgets and β, which plain torch filled in before, a launch for each.
    assert len(one[1]) == {"spartan": 10, "topkast": 7, "imp": 8}[name]
    assert len(one[-1]) == 6  # with fixed masks: gradients, put, take, write, and a look at gradients


def test_the_top_k_of_every_segment() -> None:
    """One of several tensors, a tie at the edge, one weight, none at all, everything kept, nothing kept."""
    rng = torch.Generator().manual_seed(0)
    sizes, owners = [5000, 0, 33, 1, 40, 700, 50], [0, 0, 0, 1, 3, 4, 5]
    costs, factors = [1.0, 1.0, 2.5, 3.0, 1.0, 0.3, 1.0], [1.0, 1.0, 0.4, 1.0, 1.0, 2.0, 1.0]
    topk = TopK(sizes, costs, factors, DEVICE, owners, 6)
    states = topk.states
    tensors = [torch.randn(n, generator=rng) for n in sizes]
    tensors[4] = torch.full((40,), 0.5)
    for step, beta in enumerate((None, 5.0, 6.0)):
        asked = [900.0 + step, 3.0, 0.0, 7.5, 210.0, 0.0]
        topk.cold = step < 2
        topk.solve([t.to(DEVICE) for t in tensors], asked, None if beta is None else [beta] * 6)
        for g, k in enumerate(asked):
            if g == 2:  # it has no units
                continue
            mine = [i for i, owner in enumerate(owners) if owner == g]
            parts = [Part(tensors[i].abs() * factors[i], costs[i]) for i in mine]
            edge, saved = boundary(parts, k), states.selection().saved()[g]
            found = Threshold(saved["value"], int(saved["cut"]))
            assert saved["cost"] == pytest.approx(edge.threshold.cost)
            start = 0
            for part in parts:
                assert torch.equal(found.keep(part.u, start), edge.threshold.keep(part.u, start))
                start += part.u.numel()
            if beta is not None:
                assert residual_at(states.duals([beta] * 6).each()[g], parts, k) <= 1e-6
        for i, t in enumerate(tensors):
            tensors[i] = t if owners[i] == 3 else t + 1e-3 * torch.randn(t.shape, generator=rng)
    assert not states.floats[2, TOLD:].any()
    assert not states.ints[2].any()


@dataclass(frozen=True)
class Odd(IMP):
    """Asks for more than the masks in use, changes θ, and keeps some masks for two steps."""

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        solver.solve([0.25 * k for k in solver.k])  # asked for, and thrown away
        half = [0.5 * k if i == 1 else k for i, k in enumerate(solver.k)]
        solver.top(half, -solver.scores())  # of other ranks
        if at.step % 2 == 0:
            ramp = torch.linspace(0.5, 1.5, solver.theta.views[3].shape[0], device=solver.device)[:, None]
            solver.rewrite(lambda i, theta: theta * ramp if i == 3 else theta)
        solver.solve(half)


def test_questions_that_are_not_the_usual_ones() -> None:
    plain, optimizer, of_plain = build("torch", Odd(), finetune=0.0)
    fast, optimizer_fast, of_fast = build("triton", Odd(), finetune=0.0)
    for step in range(STEPS):
        train(plain, optimizer, range(step, step + 1))
        train(fast, optimizer_fast, range(step, step + 1))
        assert_same(plain, of_plain, fast, of_fast)


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2), NM(1, 2)], ids=repr)
def test_two_optimizers(pattern: Pattern) -> None:
    """Each takes its own layers; blocks and N:M move their weights together too."""
    found: list[Any] = []
    for kernels in ("torch", "triton"):
        model = net()
        parts = [list(model[:3].parameters()), list(model[3:].parameters())]
        optimizers = [torch.optim.SGD(part, lr=0.05, momentum=0.9) for part in parts]
        options: dict[str, Any] = {"pattern": pattern, "budget": "uniform", "warmup": 0.0, "finetune": 0.4}
        sparsifier = Sparsifier(model, 0.5, 5, METHODS["spartan"], kernels=kernels, **options).attach(*optimizers)
        for step in range(5):
            both = SimpleNamespace(
                step=lambda optimizers=optimizers: [o.step() for o in optimizers], zero_grad=model.zero_grad
            )
            train(model, both, range(step, step + 1))
        found += [model, sparsifier]
    (part,) = found[3]._run.weights.frozen
    assert part.name == "triton"
    assert_same(*found)


@pytest.mark.parametrize("steps", [1, 5], ids=["dense", "frozen"])
def test_one_bad_gradient_stops_every_segment(steps: int) -> None:
    model, optimizer, sparsifier = build("triton", METHODS["imp"])
    train(model, optimizer, range(steps))
    run, weights = sparsifier._run, [t.parameter for t in sparsifier._targets]
    (part,) = run.weights.parts
    thetas = part.thetas if run.weights.frozen else part.theta.views
    before = [theta.clone() for theta in thetas]
    for p in weights:
        p.grad = torch.ones_like(p)
    weights[3].grad[1, 1] = float("nan")
    checked(sparsifier)
    assert run.weights.bad[0] == 3
    assert not any(p.grad.any() for p in weights)
    with torch.no_grad():
        for p in weights:
            p.fill_(2.0)
        weights[1].view(-1)[:] = float("inf")
        run.weights.take(range(len(weights)))
    assert run.weights.bad[1] == 1
    assert all(torch.equal(a, theta) for a, theta in zip(before, thetas, strict=True))
    with pytest.raises(RuntimeError, match=r"the gradient of 6\.weight held NaN"):
        run.guard.look(wait=True)


@pytest.mark.parametrize("budget", ["erk", "global"])
def test_stored_masks(budget: str) -> None:
    plain, optimizer, of_plain = build("torch", RigL(every=2, fraction=0.5), budget=budget)
    fast, optimizer_fast, of_fast = build("triton", RigL(every=2, fraction=0.5), budget=budget)
    for step in range(STEPS):
        train(plain, optimizer, range(step, step + 1), skip=2)
        train(fast, optimizer_fast, range(step, step + 1), skip=2)
        assert_same(plain, of_plain, fast, of_fast)
    blocks = build("triton", RigL(), pattern=Block(2, 2))[2]  # which keep a mask per block
    assert "by triton\n" in repr(blocks)


@in_the_interpreter
def test_stored_masks_launch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for budget in ("global", "erk"):
        steps = launches(monkeypatch, "stored", budget)
        assert sorted(steps[1]) == ["check", "clear", "project", "put", "take", "where_stored"]  # the first rewires


@pytest.mark.skipif(DEVICE.type != "cuda", reason="on a CPU there is nothing to wait for")
@pytest.mark.parametrize("finetune", [0.0, 0.9], ids=["soft", "finetune"])
@pytest.mark.parametrize("name", ["spartan", "topkast", "imp", "rigl"])
def test_no_step_waits_for_the_device(name: str, finetune: float) -> None:
    method = RigL(every=3) if name == "rigl" else METHODS[name]
    options: dict[str, Any] = {"total_steps": 40, "warmup": 0.0, "finetune": finetune}
    model, optimizer, sparsifier = build("auto", method, **options)
    x, y = torch.randn(8, 4, 3, 3, device=DEVICE), torch.randint(10, (8,), device=DEVICE)
    check_no_step_waits(model, optimizer, x, y)
    assert sparsifier.stats.phase == ("finetune" if finetune else "intermediate")
