"""Powerpropagation around other methods: its update in a straight line, its gradient, its start and its end."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import spartan
from spartan import IMP, Block, Sparsifier, Spartan, TopKAST, Unstructured
from spartan.app.report.page import write_report
from spartan.app.train.config import RecipeError, load_recipe
from spartan.app.train.loop import train
from spartan.app.train.setup import build_method
from spartan.methods import Method, as_method
from spartan.methods.paced import Paced
from spartan.methods.powerprop import Powerprop
from spartan.problem.schedules import Moment
from spartan.solvers.torch import TorchSolver
from tests.contract import oracle
from tests.contract.algorithm_3 import spread, units
from tests.contract.cases import Net, backward, batch
from tests.contract.own import straight_line

T, W, FREEZE = 30, 6, 24  # steps, warm-up, first step of finetuning
SPARSITY, LR, MOMENTUM, DECAY = 0.8, 0.1, 0.9, 1e-2
NAMES = ("conv.weight", "hidden.weight", "head.weight")
REFUSED = {"paced", "powerprop"} | {entry.name for entry in spartan.methods() if entry.cls.grows_from_zero}
# What needs a sparse model to begin with is tried with one below.
INNER = [entry.name for entry in spartan.methods() if entry.name not in REFUSED and not entry.cls.keeps_zeros]


def power(x: Tensor, alpha: float) -> Tensor:
    return x.sign() * x.abs() ** alpha


def mean(x: Tensor, side: int) -> Tensor:
    return spread(units(x, side), x, side) / side**2


def reference(model: nn.Module, inner: str, side: int, alpha: float) -> list[dict[str, Tensor]]:
    """w at every step, from 0 to T, for an inner Top-KAST or IMP."""
    theta = {n: power(p, 1 / alpha) if n in NAMES else p.clone() for n, p in model.named_parameters()}
    theta = {n: p.detach() for n, p in theta.items()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    velocity = {n: torch.zeros_like(p) for n, p in theta.items()}
    history, kept, slope = [], {}, {}
    for t in range(T + 1):
        if t <= FREEZE:
            u = {n: units(power(theta[n], alpha).abs(), side) for n in NAMES}
            ranked = torch.cat([u[n] for n in NAMES]).sort(descending=True).values
            count = int((1 - SPARSITY * min(1.0, t / W)) * len(ranked) + 1e-9)
            kept = {n: spread((u[n] >= ranked[count - 1]).double(), theta[n], side) for n in NAMES}
            slope = {n: alpha * theta[n].abs() ** (alpha - 1) for n in NAMES}
        if t == FREEZE:  # the tangent: w = θ' · s
            slope = {n: mean(s, side) for n, s in slope.items()}
            theta |= {n: power(theta[n], alpha) / slope[n] for n in NAMES}
        w = dict(theta)
        for n in NAMES:
            w[n] = kept[n] * (theta[n] * slope[n] if t >= FREEZE else power(theta[n], alpha))
        w = {n: x.clone().requires_grad_() for n, x in w.items()}
        history.append({n: w[n].detach().clone() for n in NAMES})
        x, y = batch(t)
        loss = nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y)
        for n, g in zip(w, torch.autograd.grad(loss, list(w.values())), strict=True):
            if n in NAMES:
                g = g * slope[n] * (kept[n] if inner == "imp" or t >= FREEZE else 1.0)
            velocity[n] = MOMENTUM * velocity[n] + g + DECAY * theta[n]
            theta[n] = theta[n] - LR * velocity[n]
    return history


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("inner", ["topkast", "imp"])
def test_thirty_steps(inner: str, side: int, alpha: float) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = reference(copy.deepcopy(model), inner, side, alpha)
    pattern = Unstructured() if side == 1 else Block(side, side)
    sparsifier = Sparsifier(model, SPARSITY, T, Powerprop(inner, alpha=alpha), pattern=pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    for t in range(T + 1):
        masks = sparsifier.masks()
        for name, w in expected[t].items():
            found = model.get_parameter(name).detach()
            torch.testing.assert_close(found, w, rtol=0, atol=1e-9, msg=f"step {t}, {name}")
            assert torch.equal(found != 0, masks[name])
        backward(model, t)
        optimizer.step()
        optimizer.zero_grad()


def start(method: Any, steps: int = 0, **options: Any) -> tuple[Net, torch.optim.Optimizer, Sparsifier]:
    """A run after some steps."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    sparsifier = Sparsifier(model, 0.7, 10, method, **options).attach(optimizer)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, sparsifier


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2)], ids=["unstructured", "block"])
@pytest.mark.parametrize("inner", [*INNER, TopKAST(backward_sparsity=0.25, exploration=0.1)], ids=str)
def test_the_gradient_is_the_inner_vjp_times_the_slope(inner: Any, pattern: Any) -> None:
    _, _, sparsifier = start(Powerprop(inner, alpha=2.5), 3, pattern=pattern)
    method, at = sparsifier.method, sparsifier._run.at
    assert isinstance(method, Powerprop)
    (solver,) = sparsifier._run.weights.solving
    torch.manual_seed(1)
    thetas = solver.theta.views
    grads = [torch.randn_like(t) for t in thetas]
    leaves = [t.clone().requires_grad_() for t in thetas]
    form = method.inner.form(solver, at)
    w = oracle.weights(solver, form, leaves, straight_line(method.inner.name, solver, at))  # a plain expression of θ
    expected = torch.autograd.grad(w, leaves, grads, allow_unused=True)
    with torch.no_grad():
        turned = solver.turn(method.form(solver, at), grads)
        added = solver.decay(form) if form.decay is not None else None
    for i, got in enumerate(turned):
        assert got is not None
        torch.testing.assert_close(got, expected[i], rtol=1e-10, atol=1e-12)
    want = oracle.decay(solver, form, thetas)
    assert (added is None) == (want is None)
    for a, b in zip(added or [], want or [], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    if isinstance(inner, TopKAST):
        assert added is not None
        slope = 2.5 * thetas[0].abs() ** 1.5
        psi = thetas[0].sign() * thetas[0].abs() ** 2.5
        kept = sparsifier.masks()["conv.weight"]
        torch.testing.assert_close(added[0][kept], (0.1 * psi * slope)[kept])


@pytest.mark.parametrize("inner", INNER)
def test_everything_else_is_the_inner_methods(inner: str) -> None:
    plain = as_method(inner)
    method = Powerprop(inner)
    for fact in ("sparse_from", "budget", "warmup", "finetune", "ramp", "refuses_nm", "learned_options"):
        assert getattr(method, fact) == getattr(plain, fact), fact
    assert not method.identity
    model, _, sparsifier = start(method, 10)
    _, _, alone = start(plain, 10)
    assert sparsifier.stats.phase == alone.stats.phase
    assert sparsifier.progress()["beta"] == alone.progress()["beta"]
    if plain.sparse_from != "never":
        weights = [p for p in model.parameters() if p.ndim > 1]
        assert sum(int((p != 0).sum()) for p in weights) == sum(layer.kept for layer in alone.layers())
    sparsifier.finalize()


@pytest.mark.parametrize("inner", ["topkast", "imp", "spartan"])
def test_alpha_one_is_the_inner_method(inner: str) -> None:
    one, plain = start(Powerprop(inner, alpha=1.0), 12)[0], start(inner, 12)[0]
    for a, b in zip(one.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_model_starts_unchanged() -> None:
    torch.manual_seed(0)
    model = Net().double()
    before = copy.deepcopy(model)
    Sparsifier(model, 0.7, 10, "powerprop")  # at step 0 of the warm-up everything is kept
    for a, b in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_weight_decay_acts_on_theta() -> None:
    """Without a loss, w shrinks by (1 − ηλ)^α in a step."""
    model = nn.Linear(8, 8, bias=False).double()
    w = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    Sparsifier(model, 0.5, 100, Powerprop("topkast", alpha=3.0), warmup=0.9, finetune=0).attach(optimizer)
    (0.0 * model.weight.sum()).backward()
    optimizer.step()
    kept = model.weight != 0
    torch.testing.assert_close(model.weight[kept], (w * 0.95**3)[kept], rtol=1e-12, atol=0)


def test_the_zeros_that_are_there_stay() -> None:
    model = spartan.prune(torch.nn.Linear(8, 8), 0.75)
    before = model.weight == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Sparsifier(model, 0.75, 10, Powerprop("fixed")).attach(optimizer)
    for _ in range(5):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight == 0, before)


@pytest.mark.filterwarnings("ignore:.*zero already:UserWarning")
@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_a_zero_has_a_gradient_of_zero(alpha: float) -> None:
    model = nn.Linear(4, 4).double()
    with torch.no_grad():
        model.weight[0] = 0.0
    method = Powerprop("topkast", alpha=alpha)
    sparsifier = Sparsifier(model, 0.5, 100, method)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    sparsifier.backward()
    assert not model.weight.grad[0].any()  # type: ignore[index]
    assert model.weight.grad[1:].all()  # type: ignore[index]
    assert torch.isfinite(model.weight.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2)], ids=["unstructured", "block"])
@pytest.mark.parametrize("inner", ["topkast", "imp", "spartan", "str"])
def test_the_mask_freezes_without_a_jump(inner: str, pattern: Any) -> None:
    model, _, sparsifier = start(Powerprop(inner), 4, pattern=pattern)
    before = {n: model.get_parameter(n).detach().clone() for n in NAMES}
    run = sparsifier._run
    with torch.no_grad():
        run.weights.freeze(run.at)
        run.write()
    for name, w in before.items():
        torch.testing.assert_close(model.get_parameter(name), w, rtol=1e-14, atol=0)
        assert torch.equal(model.get_parameter(name) != 0, w != 0)
    assert sparsifier.mask_histogram() is None


def test_gradients_keep_their_scale_when_the_mask_freezes() -> None:
    """For single weights under a hard mask the tangent has the very slope of the power."""
    model, _, sparsifier = start(Powerprop("imp"), 4)
    found = []
    for _ in range(2):
        model.zero_grad()
        model.get_submodule("norm").eval()
        backward(model, 0)
        sparsifier.backward()
        found.append([model.get_parameter(n).grad.clone() for n in NAMES])  # type: ignore[union-attr]
        run = sparsifier._run
        with torch.no_grad():
            if not run.weights.frozen:
                run.weights.freeze(run.at)
            run.write()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------------- how it is asked for


def test_settings_of_the_inner_method() -> None:
    for method in (
        Powerprop(TopKAST(exploration=1e-4)),
        Powerprop("topkast", method_args={"exploration": 1e-4}),
        Powerprop(TopKAST, method_args={"exploration": 1e-4}),
    ):
        assert method.inner == TopKAST(exploration=1e-4)
        assert repr(method) == f"Powerprop(method={TopKAST(exploration=1e-4)!r}, alpha=2.0)"
    assert Powerprop().inner == TopKAST()


def test_recipes(tmp_path: Path) -> None:
    sets = ["method=powerprop", "method_args.method=imp", "method_args.alpha=3", "epochs=1", "sparsity=0.9"]
    config = load_recipe("digits", sets)
    assert build_method(config) == Powerprop("imp", alpha=3)
    train(config, tmp_path / "run", quiet=True)
    assert write_report(tmp_path / "run").is_file()
    nested = ["method=powerprop", "method_args.method=topkast", "method_args.method_args.exploration=1e-4"]
    assert build_method(load_recipe("digits", nested)) == Powerprop(TopKAST(exploration=1e-4))
    says = (
        r"method_args.explore=1: topkast has no such argument \(did you mean exploration\?\); accepted: .*exploration"
    )
    with pytest.raises(RecipeError, match=says):
        build_method(load_recipe("digits", [*nested[:2], "method_args.method_args.explore=1"]))


@dataclass(frozen=True)
class Shrinking(IMP):
    """Changes θ by itself."""

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        super().choose(solver, at)
        solver.rewrite(lambda _, theta: 0.5 * theta)


def test_methods_that_change_the_dense_weights_are_refused() -> None:
    assert {"acdc", "rigl", "set"} <= REFUSED
    with pytest.raises(ValueError, match=r"Powerprop: method=Paced\(.* changes the dense weights by itself"):
        Powerprop("paced")
    assert Powerprop(Paced(leak=0.0)).method == Paced(leak=0.0)
    for name in REFUSED - {"paced", "powerprop"}:
        with pytest.raises(ValueError, match=f"Powerprop: method='{name}' restarts"):
            Powerprop(name)
    with pytest.raises(RuntimeError, match="Powerprop: imp changes the dense weights"):
        Sparsifier(Net().double(), 0.7, 10, Powerprop(Shrinking()))


def test_bad_settings() -> None:
    for alpha in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Powerprop: alpha="):
            Powerprop("topkast", alpha=alpha)
    with pytest.raises(ValueError, match="multiply the two alpha"):
        Powerprop(Powerprop())
    with pytest.raises(ValueError, match="method='topcast' is unknown"):
        Powerprop("topcast")
    with pytest.raises(ValueError, match="has its settings already"):
        Powerprop(Spartan(), method_args={"beta": 3.0})


def test_it_is_a_method_like_the_others() -> None:
    assert isinstance(Powerprop(), Method)
    assert "powerprop" in {entry.name for entry in spartan.methods()}
