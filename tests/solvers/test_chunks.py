"""Torch in chunks, as it runs on a CPU, against plain torch: whole runs, exact thresholds, resume."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import IMP, Flops, Sparsifier, Spartan, TopKAST, constant, linear, soft_topk
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
    Static,
)
from spartan.methods.base import Method
from spartan.ops.newton import logit, rest_of_step
from spartan.ops.parts import Part
from spartan.ops.select import boundary
from spartan.ops.soft_topk import moments, residual_at
from spartan.solvers.chunks import pieces
from spartan.solvers.chunks.search import first_pass
from spartan.solvers.chunks.solver import ChunkSolver
from spartan.solvers.forms import KEPT, VJP, Form, Mask
from spartan.solvers.torch import TorchSolver
from tests.contract.kinds import Hurried
from tests.solvers.building import build, problem_of, set_theta, weights_of

METHODS = {
    "spartan": Spartan(beta=linear(1, 200)),
    "spartan-hard": Spartan(beta=constant(float("inf"))),
    "spartan-flat": Spartan(beta=constant(0.0)),
    "spartan-soft": Spartan(project=False),
    "topkast": TopKAST(),
    "topkast-b": TopKAST(backward_sparsity=0.1, exploration=1e-2),
    "imp": IMP(),
    "topkast-every": TopKAST(backward_sparsity=0.1, exploration=1e-2, every=2),
    "learned": SpartanLearned(),
    "learned-hard": SpartanLearned(beta=constant(float("inf"))),
    "powerprop": Powerprop(),
    "powerprop-1.5": Powerprop(alpha=1.5),
    "powerprop-2.3": Powerprop(alpha=2.3),
    "powerprop-4": Powerprop(TopKAST(backward_sparsity=0.1, exploration=1e-2), alpha=4.0),
    "powerprop-spartan": Powerprop(Spartan(beta=linear(1, 200))),
    "powerprop-st3": Powerprop(ST3()),
    "powerprop-str": Powerprop(STR()),
    "st3": ST3(),
    "st3-plain": ST3(rescale=False),
    "st3-sigma": ST3(sigma=True),
    "paced": Hurried(),
    "feather": Feather(pruned_gradient=0.3),
    "feather-2.5": Feather(p=2.5),
    "srste": SRSTE(decay=1e-2),
    "movement": Movement(),
    "optg": OptG(epochs=6, steepness=1.5),
    "str": STR(),
    "str-paper": STR(exact=False),
    "rigl": RigL(every=2),
    "static": Static(),
    "acdc": ACDC(first_dense=0.1, phase=0.2, last_dense=0.1),
    "probmask": ProbMask(),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a tensor, the last one short."""
    monkeypatch.setattr(pieces, "CHUNK", 5000)


def run(
    kernels: str, method: Method, steps: int = 8, skip: int = 3, **options: Any
) -> tuple[Any, Any, Any, list[float]]:
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 230), nn.ReLU(), nn.Linear(230, 7)
    model = nn.Sequential(*layers).to(dtype)
    if options.pop("channels_last", False):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if options.pop("flops", False):
        options["cost"] = Flops(torch.zeros(1, 3, 8, 8, dtype=dtype), value_power=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    defaults = {"sparsity": 0.9, "total_steps": 8, "warmup": 0.25, "finetune": 0.25, "method": method}
    settings: dict[str, Any] = {**defaults, **options}
    sparsifier = Sparsifier(model, kernels=kernels, **settings).attach(optimizer)
    return model, optimizer, sparsifier, train(model, optimizer, range(steps), skip)


def train(model: Any, optimizer: Any, steps: range, skip: int = 3) -> list[float]:
    losses = []
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(16, 3, 8, 8, generator=rng).to(model[0].weight.dtype)
        out = model(x) if step != skip else model[3:](x.new_ones(16, 288))
        loss = nn.functional.cross_entropy(out, torch.randint(7, (16,), generator=rng))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIONS: list[dict[str, Any]] = [
    {},
    {"budget": "uniform"},
    {"flops": True},
    {"dtype": torch.float64},
    {"channels_last": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("name", list(METHODS))
def test_a_run_is_the_same(name: str, options: dict[str, Any]) -> None:
    plain, _, of_plain, losses = run("torch", METHODS[name], **options)
    fast, _, of_fast, fast_losses = run("auto", METHODS[name], **options)
    assert fast_losses == pytest.approx(losses, rel=1e-5)
    for (key, mask), other in zip(of_plain.masks().items(), of_fast.masks().values(), strict=True):
        assert torch.equal(mask, other), key
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert of_fast.stats.cost == of_plain.stats.cost


@pytest.mark.parametrize("name", ["paced", "spartan", "st3", "rigl", "probmask", "movement"])
def test_the_order_of_memory_changes_nothing(name: str) -> None:
    """As `model.to(memory_format=torch.channels_last)` leaves it: other pieces, the same masks and random numbers."""
    one, _, of_one, _ = run("auto", METHODS[name])
    other, _, of_other, _ = run("auto", METHODS[name], channels_last=True)
    assert not other[0].weight.is_contiguous()
    assert "by chunks\n" in repr(run("auto", METHODS[name], steps=1, channels_last=True)[2])
    for (key, mask), turned in zip(of_one.masks().items(), of_other.masks().values(), strict=True):
        assert torch.equal(mask, turned), key
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    again, _, of_again, _ = run("auto", METHODS[name], steps=0)
    again.load_state_dict(other.state_dict())
    of_again.load_state_dict(of_other.state_dict())
    for a, b in zip(again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("price", [1.0, 2.5])
def test_ties_are_cut_in_the_order_of_memory(price: float) -> None:
    """Where weights lie with the channels last: the same ones by chunks and by plain torch, and as many as asked for."""
    rng = torch.Generator().manual_seed(0)
    convolution = torch.randn(40, 24, 3, 3, generator=rng).contiguous(memory_format=torch.channels_last)
    thetas = [(4 * t).round() / 4 for t in (convolution, torch.randn(50, 60, generator=rng))]
    chunks, plain = (build(kind, problem_of(thetas, prices=[price, price])) for kind in (ChunkSolver, TorchSolver))
    for k in (0.0, 1.0, 1000.0, 1001.0, 5000.0, 11_000.0, 11_640.0):
        for solver in (chunks, plain):
            solver.solve([k * price])
            solver.write(Form())
        for a, b in zip(weights_of(chunks), weights_of(plain), strict=True):
            assert torch.equal(a, b)
        kept = chunks.kept(Form())
        assert int(kept.sum()) == k
        flat = torch.cat([thetas[0].permute(0, 2, 3, 1).reshape(-1), thetas[1].view(-1)]).abs()
        first = flat.argsort(descending=True, stable=True)[: int(k)]
        assert kept[first].all()


def test_what_runs() -> None:
    _, _, sparsifier, _ = run("auto", METHODS["spartan"], steps=1)
    assert "by chunks\n" in repr(sparsifier)
    assert "by torch (kernels='torch')\n" in repr(run("torch", METHODS["spartan"], steps=0)[2])
    assert "by chunks\n" in repr(run("auto", METHODS["spartan"], steps=0, budget="uniform")[2])
    assert "by chunks\n" in repr(run("auto", METHODS["spartan-soft"], steps=0)[2])
    odd = repr(run("auto", METHODS["powerprop-2.3"], steps=0)[2])
    assert "by chunks for moving weights, torch for thresholds, weights and gradients" in odd


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("stop", [1, 5])
def test_resume_is_bit_identical(name: str, stop: int) -> None:
    model, optimizer, sparsifier, _ = run("auto", METHODS[name], steps=stop)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))
    train(model, optimizer, range(stop, 8))
    again, optimizer_again, sparsifier_again, _ = run("auto", METHODS[name], steps=0)
    for part, state in zip((again, optimizer_again, sparsifier_again), states, strict=True):
        part.load_state_dict(state)
    train(again, optimizer_again, range(stop, 8))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["spartan", "imp"])
def test_a_step_that_fails_is_taken_back(name: str) -> None:
    model, _, sparsifier, _ = run("auto", METHODS[name], steps=4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    sparsifier.detach().attach(optimizer)
    before, stats, calls = [p.detach().clone() for p in model.parameters()], sparsifier.stats, 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 3, 8, 8)).square().mean()
        loss.backward()
        if calls == 3:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.ndim == 1 or torch.equal(p, old)
    assert sparsifier.stats == stats


@pytest.mark.parametrize("name", ["spartan", "topkast"])
def test_weights_swapped_out_and_in_again_are_not_changed(name: str) -> None:
    """As evaluating an average does: versions change, values do not, whoever wrote them."""
    model, optimizer, sparsifier, _ = run("auto", METHODS[name], steps=4)
    assert "chunks" in repr(sparsifier)
    with torch.no_grad():
        for p in model.parameters():
            own = p.clone()
            p.fill_(1.0)
            p.copy_(own)
    model(torch.ones(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        weight = next(p for p in model.parameters() if p.ndim > 1)
        weight[weight == 0] = 1e-3
    changed = weight.detach().clone()
    with pytest.raises(RuntimeError, match="changed outside the optimizer step"):
        optimizer.step()
    assert torch.equal(weight, changed)  # left as it was found


def moved(tensors: list[Tensor], scale: float, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [t * (1 + scale * torch.randn(t.shape, generator=rng)) for t in tensors]


@pytest.mark.parametrize("owners", [[0, 0, 0], [0, 1, 1]], ids=["one segment", "two"])
@pytest.mark.parametrize("costs", [[1.0, 1.0, 1.0], [1.0, 2.5, 0.3]])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 0.5])
def test_thresholds_are_exact_from_wherever_the_search_starts(
    scale: float, costs: list[float], owners: list[int]
) -> None:
    """Small moves are followed within the window; large ones leave it, and are found all the same."""
    tensors = moved([torch.ones(12_001), torch.ones(30, 100), torch.ones(7)], 1.0, 0)
    solver = build(ChunkSolver, problem_of(tensors, prices=costs, owners=owners))
    for step in range(6):
        tensors = moved(tensors, scale, step + 1)
        if step == 4:
            tensors = [(8 * t).round() / 8 for t in tensors]  # ties
        set_theta(solver, tensors)
        segments = solver.problem.segments
        k, beta = [(0.2 - 0.01 * step) * s.total for s in segments], 5.0 * 3**step
        solver.solve(k, [beta] * len(k))
        for s, segment in enumerate(segments):
            parts = [Part(tensors[i].abs().reshape(-1), costs[i]) for i in segment.targets]
            expected = boundary(parts, k[s]).threshold
            assert (solver.a.value[s], solver.a.cut[s]) == (expected.value, expected.cut)
            assert float(solver.a.cost[s]) == pytest.approx(expected.cost, rel=1e-12)
            assert residual_at(solver.dual.each()[s], parts, k[s]) <= 2e-6 or beta > 400
        solution = solver.solution()
        solver.solve(k)
        assert solver.dual is None
        solver.go_on_from(solution)


def test_nothing_and_everything() -> None:
    theta = torch.randn(12_000, generator=torch.Generator().manual_seed(0)).view(-1, 1)
    solver = build(ChunkSolver, problem_of([theta]))
    for k in (1000.0, 0.0, 12_000.0, 11_999.0, 500.5, 0.0, 1.0):
        solver.solve([k], [3.0])
        assert int(solver.kept(Form()).sum()) == int(k)
        assert float(solver.pools.soft(solver.scores(), solver.dual).sum()) == pytest.approx(k, rel=1e-5)
    set_theta(solver, [torch.full_like(theta, 0.5)])
    for k in (1000.0, 999.0):
        solver.solve([k], [3.0])
        assert int(solver.kept(Form()).sum()) == k
        assert float(solver.pools.soft(solver.scores(), solver.dual).sum()) == pytest.approx(k, rel=1e-5)


@pytest.mark.parametrize("costs", [[1.0, 1.0], [1.0, 2.5]])
def test_ties_at_the_threshold_are_cut_by_position_without_starting_anew(costs: list[float]) -> None:
    """Some of 25 million float32 weights are equal to the threshold in one step of ten."""
    rng = torch.Generator().manual_seed(0)
    thetas = [torch.randn(12_345, 1, generator=rng), torch.randn(777, 1, generator=rng)]
    solver = build(ChunkSolver, problem_of(thetas, prices=costs))
    k = 0.2 * solver.problem.total
    solver.solve([k])
    value = float(solver.a.value)
    for theta in thetas:
        near = (theta.abs() - value).abs() < 0.02
        theta[near] = value * theta[near].sign()
        assert int(near.sum()) > 2
    set_theta(solver, thetas)
    parts = [Part(t.abs().view(-1), c) for t, c in zip(thetas, costs, strict=True)]
    cuts = set()
    for room in (-20.0, -7.5, -1.0, -0.4, 0.0, 1.0, 2.0, 7.5, 20.0):
        expected = boundary(parts, k + room).threshold
        found = first_pass(solver.problem, solver._pieces, solver.reader(), solver.known("a"), [k + room], {})[0]
        assert (found.value, found.cut) == (expected.value, expected.cut) == (value, expected.cut)
        cuts.add(found.cut)
    assert len(cuts) > 3


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("price", [1.0, 7.0])
def test_what_is_not_kept_is_plus_zero(price: float, soft: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    thetas = [(8 * torch.randn(n, 1, generator=rng)).round() / 8 for n in (12_345, 50)]  # ties, zeros of both signs
    solver = build(ChunkSolver, problem_of(thetas, prices=[price, price], value_power=0.5))
    with torch.no_grad():
        for w in weights_of(solver):
            w.fill_(-1.0)
    u, flat = solver.scores(), torch.cat(thetas).view(-1)
    torch.testing.assert_close(u, flat.abs() * price**-0.5)
    for k in (0.0, 1234.0, 1235.0, 12_000.0, 12_395.0):
        solver.solve([k * price], [3.0])
        kept = solver.kept(Form())
        assert int(kept.sum()) == k
        solver.write(Form(Mask.SOFT, VJP.THROUGH) if soft else Form())
        w = flat * solver.pools.soft(u, solver.dual) if soft else flat
        found = torch.cat(weights_of(solver)).view(-1)
        torch.testing.assert_close(found, torch.where(kept, w, 0.0), rtol=1e-5, atol=0.0)
        assert not found[~kept].signbit().any()
        grads = [torch.full_like(t, -torch.inf) for t in thetas]
        assert all(a is b for a, b in zip(solver.turn(Form(Mask.ONE, KEPT), grads), grads, strict=True))  # in place
        turned = torch.cat(grads).view(-1)
        assert torch.equal(turned, torch.where(kept, -torch.inf, 0.0))
        assert not turned[~kept].signbit().any()


@pytest.mark.parametrize("beta", [1.0, 20.0, 300.0])
def test_gradients_are_those_of_autograd(beta: float) -> None:
    """Against float64; β·τ is above and below what decides how the line is written."""
    rng = torch.Generator().manual_seed(0)
    costs = [1.0, 2.5]
    thetas = [torch.randn(n, 1, generator=rng) for n in (12_345, 777)]
    grads = [torch.randn(t.shape, generator=rng) for t in thetas]
    given = torch.cat(grads).view(-1).double()
    solver = build(ChunkSolver, problem_of(thetas, prices=costs, value_power=0.2))
    factors, k = [c ** (0.2 - 1.0) for c in costs], 0.2 * solver.problem.total
    solver.solve([k], [0.99 * beta])
    solver.solve([k], [beta])
    whole = torch.cat(thetas).view(-1).double().requires_grad_()
    f, c = (torch.cat([torch.full((len(t),), x) for t, x in zip(thetas, of, strict=True)]) for of in (factors, costs))
    m = soft_topk(whole.abs() * f.double() * c.double(), k, beta, costs=c.double())
    (expected,) = torch.autograd.grad(whole * m, whole, given)
    solver.turn(Form(Mask.SOFT, VJP.THROUGH), grads)
    error = (torch.cat(grads).view(-1) - expected).abs().max() / expected.abs().max()
    assert error < 5e-7 * max(beta, 4.0)  # β times the rounding of u


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_what_a_newton_step_leaves_is_no_more_than_said(spread: float) -> None:
    """The bound is not far off either: a hundredfold at most, where it is not nothing."""
    rng = torch.Generator().manual_seed(0)
    parts = [Part(torch.randn(n, generator=rng, dtype=torch.float64).abs(), c) for n, c in ((4000, 1.0), (500, 3.0))]
    total = 5500.0
    tightest = math.inf
    for density in (0.02, 0.1, 0.5, 0.9):
        k = density * total
        for mu in torch.linspace(-3, 3, 25).tolist():
            f, d = moments(parts, spread, 0.0, mu)
            step = (logit(f / total) - logit(k / total)) * f * (total - f) / (total * d)
            bound, left = rest_of_step(step, f, d, total), abs(moments(parts, spread, 0.0, mu - step)[0] - k) / k
            assert left <= bound * (1 + 1e-9) + 1e-13
            tightest = min(tightest, bound / left)
    assert tightest < 100
