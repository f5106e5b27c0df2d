"""Units of several weights in strips, as they run on a CPU, against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import Block, Channel, Flops, Sparsifier, Spartan, TopKAST, linear
from spartan.methods import (  # type: ignore[attr-defined]
    ACDC,
    SRSTE,
    ST3,
    STR,
    Feather,
    Movement,
    OptG,
    Powerprop,
    ProbMask,
    RigL,
    SpartanLearned,
    SViTE,
)
from spartan.methods.base import Method
from spartan.problem.axes import PLAIN, Axes
from spartan.problem.patterns import Pattern
from spartan.solvers.chunks import strips
from spartan.solvers.chunks.units import ChunkUnits
from spartan.solvers.forms import KEPT, VJP, Along, Form, Mask, Shrunk, Where
from spartan.solvers.torch import TorchSolver
from tests.contract.kinds import Hurried
from tests.solvers.building import build, problem_of, set_theta, weights_of

METHODS: dict[str, Method] = {
    "spartan": Spartan(beta=linear(1, 200)),
    "spartan-soft": Spartan(project=False),
    "topkast-b": TopKAST(backward_sparsity=0.3, exploration=1e-2),
    "learned": SpartanLearned(),
    "powerprop": Powerprop(),
    "powerprop-spartan": Powerprop(Spartan(beta=linear(1, 200))),
    "st3": ST3(),
    "paced": Hurried(),
    "feather": Feather(pruned_gradient=0.3),
    "srste": SRSTE(decay=1e-2),
    "movement": Movement(),
    "optg": OptG(epochs=6, steepness=1.5),
    "str": STR(),
    "rigl": RigL(every=2),
    "svite": SViTE(every=2),
    "acdc": ACDC(first_dense=0.1, phase=0.2, last_dense=0.1),
    "probmask": ProbMask(),
}
PATTERNS: dict[str, Pattern] = {
    "4×4": Block(4, 4),
    "1×8": Block(1, 8),
    "columns": Block(-1, 4),
    "channels": Channel(),
    "inputs": Channel("in"),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a tensor, the last one short; less than a unit for some patterns, and less than a row."""
    monkeypatch.setattr(strips, "CHUNK", 1500)


def run(kernels: str, method: Method, pattern: Pattern, steps: int = 8, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    layers = nn.Conv2d(4, 8, 2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(392, 200), nn.ReLU(), nn.Linear(200, 8)
    model = nn.Sequential(*layers).to(dtype)
    if options.pop("flops", False):
        options["cost"] = Flops(torch.zeros(1, 4, 8, 8, dtype=dtype), value_power=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    defaults = {"sparsity": 0.7, "total_steps": 8, "warmup": 0.25, "finetune": 0.25, "method": method}
    settings: dict[str, Any] = {**defaults, **options}
    sparsifier = Sparsifier(model, kernels=kernels, pattern=pattern, **settings).attach(optimizer)
    train(model, optimizer, range(steps))
    return model, optimizer, sparsifier


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(16, 4, 8, 8, generator=rng).to(model[0].weight.dtype)
        out = model(x) if step != 3 else model[3:](x.new_ones(16, 392))  # the convolution gets no gradient then
        nn.functional.cross_entropy(out, torch.randint(8, (16,), generator=rng)).backward()
        optimizer.step()
        optimizer.zero_grad()


SETTINGS: list[tuple[str, dict[str, Any]]] = [(pattern, {}) for pattern in PATTERNS]
SETTINGS += [("inputs", {"flops": True}), ("4×4", {"dtype": torch.float64})]


@pytest.mark.parametrize(("pattern", "options"), SETTINGS, ids=repr)
@pytest.mark.parametrize("name", METHODS)
def test_a_run_is_the_same(name: str, pattern: str, options: dict[str, Any]) -> None:
    plain, _, of_plain = run("torch", METHODS[name], PATTERNS[pattern], **options)
    fast, _, of_fast = run("auto", METHODS[name], PATTERNS[pattern], **options)
    for (key, mask), other in zip(of_plain.masks().items(), of_fast.masks().values(), strict=True):
        assert torch.equal(mask, other), key
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert of_fast.stats.cost == of_plain.stats.cost
    for key, mask in of_fast.masks().items():
        pruned = fast.get_parameter(key)[~mask]
        assert not pruned.any(), key
        assert not pruned.signbit().any(), key


@pytest.mark.parametrize("name", ["spartan", "paced", "st3", "rigl"])
@pytest.mark.parametrize("stop", [1, 5])
def test_resume_is_bit_identical(name: str, stop: int) -> None:
    model, optimizer, sparsifier = run("auto", METHODS[name], Block(4, 4), steps=stop)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))
    train(model, optimizer, range(stop, 8))
    again, optimizer_again, sparsifier_again = run("auto", METHODS[name], Block(4, 4), steps=0)
    for part, state in zip((again, optimizer_again, sparsifier_again), states, strict=True):
        part.load_state_dict(state)
    train(again, optimizer_again, range(stop, 8))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_runs() -> None:
    assert "by chunks\n" in repr(run("auto", METHODS["paced"], Block(4, 4), steps=0)[2])
    assert "by torch (kernels='torch')\n" in repr(run("torch", METHODS["paced"], Block(4, 4), steps=0)[2])
    small = Sparsifier(nn.Linear(8, 8), 0.5, total_steps=8, pattern=Block(4, 4), method="imp")
    assert "by torch (few weights)\n" in repr(small)


FORMS: dict[str, Form] = {
    "kept": Form(),
    "factors": Form(back=Where(1.0, 0.5, 0.5), decay=Where(0.0, 0.25, 0.25)),
    "soft": Form(Mask.SOFT, VJP.THROUGH),
    "shrunk": Form(Shrunk(3.0), Where(1.0, 1.0, 1.0), pace=Where(1.0, 0.5, 0.5)),
    "along": Form(back=Along.THETA),
    "damped": Form(back=Along.THETA, damp=torch.tensor([0.7, 0.0, 1.3])),
}
LAYOUTS: dict[str, tuple[Axes, list[tuple[int, ...]]]] = {
    "plain": (PLAIN, [(64, 128), (32, 8, 2, 2), (300, 40)]),
    "inputs first": (Axes(swapped=True), [(128, 64), (32, 32), (40, 300)]),
    "experts": (Axes(stacked=True), [(3, 64, 32), (2, 32, 32), (5, 60, 40)]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", ["4×4", "1×8", "channels"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_that_of_plain_torch(form: str, pattern: str, layout: str) -> None:
    """In float64, where nothing rounds; zeros of both signs and units of zeros, one gradient missing."""
    axes, shapes = LAYOUTS[layout]
    rng = torch.Generator().manual_seed(0)
    thetas = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]
    for theta in thetas:
        theta.view(-1)[:40] = 0.0
        theta.view(-1)[40:50] = -0.0
    grads: list[Tensor | None] = [torch.randn(t.shape, generator=rng, dtype=torch.float64) for t in thetas]
    grads[1] = None
    found, declared = [], FORMS[form]
    for kind in (TorchSolver, ChunkUnits):
        problem = problem_of(thetas, PATTERNS[pattern], prices=[1.0, 2.5, 0.3], value_power=0.5, axes=axes)
        solver = build(kind, problem)
        solver.solve([0.3 * problem.total], [7.0] if declared.mask is Mask.SOFT else None)
        solver.write(declared)
        weights = [w.clone() for w in weights_of(solver)]
        with torch.no_grad():
            turned = solver.turn(declared, [None if g is None else g.clone() for g in grads])
            some = [g for g in turned if g is not None]
            if declared.decay is not None:
                solver.add_decay(declared, turned, torch.tensor(8.0))
            if declared.pace is not None:
                for w in weights_of(solver):
                    w.sub_(0.125)
                solver.pace(declared, [0, 2])
        found.append([solver.scores(), *weights, *some, *weights_of(solver)])
        if kind is ChunkUnits:
            assert ChunkUnits.why_not(problem, "auto") in ("", "few weights")
            kept = solver.per_target(solver.spread(solver.kept(declared)))
            assert not any(w[~k].signbit().any() for w, k in zip(weights, kept, strict=True))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_units_are_read_again_when_theta_has_moved() -> None:
    """Whoever moves it: the optimizer, a method, what was saved."""
    theta = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    solver = build(ChunkUnits, problem_of([theta], Block(8, 8)))
    before = solver.scores()
    assert solver.scores() is before
    with torch.no_grad():
        weights_of(solver)[0].mul_(2.0)
    solver.take([0])
    torch.testing.assert_close(solver.scores(), 2.0 * before)
    saved = solver.snapshot()
    solver.rewrite(lambda i, x: 3.0 * x)
    torch.testing.assert_close(solver.scores(), 6.0 * before)
    solver.restore(saved)
    torch.testing.assert_close(solver.scores(), 2.0 * before)
    solver.restart(torch.ones(64, dtype=torch.bool))
    assert not solver.scores().any()
    set_theta(solver, [theta])
    torch.testing.assert_close(solver.scores(), before)


def test_what_has_another_layout_is_left_to_plain_torch() -> None:
    theta = torch.randn(64, 16, 4, 4).contiguous(memory_format=torch.channels_last)
    assert "row-major" in ChunkUnits.why_not(problem_of([theta], Block(4, 4)), "auto")
    turned = problem_of([torch.randn(2, 32, 64)], Block(4, 4), axes=Axes(swapped=True, stacked=True))
    assert "row-major" in ChunkUnits.why_not(turned, "auto")
    assert "float32" in ChunkUnits.why_not(problem_of([torch.randn(64, 64).bfloat16()], Block(4, 4)), "auto")
    theta = torch.randn(64, 64)
    solver = build(ChunkUnits, problem_of([theta], Block(4, 4)))
    solver.solve([0.5 * 4096])
    g = torch.randn(64, 64).t()
    (found,) = solver.turn(Form(back=KEPT), [g.clone(memory_format=torch.preserve_format)])
    (kept,) = solver.per_target(solver.spread(solver.kept(Form())))
    assert found is not None
    assert torch.equal(found, torch.where(kept, g, 0.0))
