"""What every method promises, whatever its pattern, budget and cost."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from spartan import NM
from spartan.sparsifier import Sparsifier
from tests.contract import oracle
from tests.contract.cases import METHODS, STEPS, Case, all_cases, backward, batch
from tests.contract.own import straight_line

each_case = pytest.mark.parametrize("case", all_cases())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def check_budget(model: nn.Module, sparsifier: Sparsifier) -> None:
    """The kept units of every group fit the budget, no further unit would, and the model is zero elsewhere."""
    run, masks = sparsifier._run, sparsifier.masks()
    weights = dict(model.named_parameters())
    warmed = min(1.0, run.at.step / run.at.warmup_steps) if run.at.warmup_steps else 1.0
    grown = {"start": 1.0, "warmup": sparsifier.method.ramp.at(warmed)}
    problem = run.problem
    for segment in problem.segments:
        members = segment.targets
        density = 1.0 - segment.sparsity * grown.get(sparsifier.method.sparse_from, 1.0)
        if isinstance(problem.pattern, NM):  # whole numbers of every m, rounded up while the density falls
            n, m = math.ceil(problem.pattern.m * density - 1e-9), problem.pattern.m
            density = n / m
            for i in members:
                name = problem.targets[i].name
                assert (masks[name].movedim(1, -1).reshape(-1, m).sum(1) == n).all(), f"{n} of every {m}"
        k = segment.total * density
        costs = [problem.unit_costs[i] for i in members]
        units = [problem.pattern.reduce(masks[problem.targets[i].name].double()) / problem.sizes[i] for i in members]
        cost = sum(float(u.sum()) * c for u, c in zip(units, costs, strict=True))
        assert all(bool(((u == 0) | (u == 1)).all()) for u in units), "a unit lives or dies together"
        if len(set(costs)) == 1:
            assert cost == costs[0] * math.floor(k / costs[0] + 1e-9)
        assert k - max(costs) < cost <= k + 1e-6
    known = sparsifier.progress()["density"]
    if known is not None and sparsifier.method.sparse_from != "finetune":
        assert known == pytest.approx(sparsifier.stats.cost / problem.total, abs=1e-8)
    for name, mask in masks.items():
        assert not weights[name][~mask].any(), f"{name}: the model must be zero where nothing is kept"
        if not sparsifier.method.grows_from_zero:
            assert weights[name][mask].all(), f"{name}: and only there"
        assert not torch.signbit(weights[name][~mask]).any(), f"{name}: no −0.0"


@each_case
def test_the_budget_is_exact_at_every_step_from_when_the_model_is_sparse(case: Case) -> None:
    model, optimizer, sparsifier = case.build()
    sparse_from = {"start": 0, "warmup": 0, "finetune": sparsifier._run.at.freeze_step, "never": math.inf}
    for step in range(STEPS + 2):  # past the end, values stay
        if step >= sparse_from[sparsifier.method.sparse_from]:
            check_budget(model, sparsifier)
        train(model, optimizer, range(step, step + 1))
    sparsifier.finalize()
    stats = sparsifier.stats
    assert stats.step == STEPS + 2
    assert stats.phase == "finetune"
    if sparsifier.method.sparse_from != "never":
        problem = sparsifier._run.problem
        dearest = [max(problem.unit_costs[i] for i in segment.targets) for segment in problem.segments]
        assert stats.target_cost - stats.cost < sum(dearest)
        nonzero = sum(int((p != 0).sum()) for p in model.parameters() if p.ndim > 1)
        kept = round(stats.density * sum(p.numel() for p in model.parameters() if p.ndim > 1))
        # What grew from zero stays there until a gradient reaches it.
        assert nonzero <= kept if sparsifier.method.grows_from_zero else nonzero == kept


def saved_weights(sparsifier: Sparsifier) -> tuple[list[Tensor], list[Tensor]]:
    """θ and the fixed mask of each target, zero where nothing is kept, from what a checkpoint holds."""
    thetas: list[Tensor] = []
    masks: list[Tensor] = []
    for target in sparsifier._run.problem.targets:
        saved = sparsifier.state_dict()["weights"][target.name]
        for values, found in ((saved["theta"], thetas), (saved["mask"], masks)):
            flat = torch.zeros(target.numel, dtype=torch.float64)
            flat[saved["index"].long()] = values
            found.append(flat.reshape(target.shape))
    return thetas, masks


@each_case
def test_the_gradient_is_the_vjp_of_the_expression(case: Case) -> None:
    """Against autograd through the whole model with w = f(θ) in the graph, in every phase."""
    model, optimizer, sparsifier = case.build()
    for step in range(STEPS):
        run = sparsifier._run
        part: Any = run.weights.parts[0]
        if run.weights.frozen:
            thetas, masks = saved_weights(sparsifier)
            leaves = [theta.requires_grad_() for theta in thetas]
            weights, added = [leaf * mask for leaf, mask in zip(leaves, masks, strict=True)], None
        else:
            form = sparsifier.method.form(part, run.at)
            leaves = [theta.clone().requires_grad_() for theta in part.theta.views]
            weights = oracle.weights(part, form, leaves, straight_line(case.method, part, run.at))
            added = oracle.decay(part, form, leaves)
        learned = part.state.parameters()
        state = {t.name: w for t, w in zip(run.problem.targets, weights, strict=True)}
        x, y = batch(step)
        loss = nn.functional.cross_entropy(functional_call(model, state, (x,)), y)
        found = torch.autograd.grad(loss, [*leaves, *learned], allow_unused=True)
        expected = list(found[: len(leaves)])
        backward(model, step)
        sparsifier.backward()
        for target, w, want in zip(run.problem.targets, weights, expected, strict=True):
            torch.testing.assert_close(target.parameter.detach(), w.detach(), rtol=1e-12, atol=1e-14)
            got = target.parameter.grad
            assert got is not None
            if run.weights.frozen:
                assert not got[~sparsifier.masks()[target.name]].any()
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        if not run.weights.frozen:
            for parameter, grad in zip(learned, found[len(leaves) :], strict=True):
                assert (parameter.grad is None) == (grad is None)
                if (
                    grad is not None
                ):  # β·(G − a₁/a₂) cancels where a segment has one soft unit: what is left is rounding
                    torch.testing.assert_close(parameter.grad, grad, rtol=1e-10, atol=1e-10)
        if added is not None:
            before = [target.parameter.grad.clone() for target in run.problem.targets]  # type: ignore[union-attr]
            run._add_decay(range(len(before)), None)
            for target, g, p in zip(run.problem.targets, before, added, strict=True):
                torch.testing.assert_close(target.parameter.grad, g + p, rtol=1e-10, atol=1e-12)
        optimizer.step()
        optimizer.zero_grad()


@each_case
def test_a_closed_form_agrees_with_the_vjp_when_gradients_are_missing(case: Case) -> None:
    """A weight that the loss does not reach gets the gradient of the others' budget, or none."""
    _, _, sparsifier = case.build(warmup=0.0, finetune=0.25)
    torch.manual_seed(1)
    (part,) = sparsifier._run.weights.solving
    form = sparsifier.method.form(part, sparsifier._run.at)
    leaves = [theta.clone().requires_grad_() for theta in part.theta.views]
    grads: list[Tensor | None] = [torch.randn_like(t) for t in leaves]
    grads[0] = None
    line = straight_line(case.method, part, sparsifier._run.at)
    weights = oracle.weights(part, form, leaves, line)
    outputs = [(w, g) for w, g in zip(weights, grads, strict=True) if g is not None]
    want = torch.autograd.grad([w for w, _ in outputs], leaves, [g for _, g in outputs], allow_unused=True)
    with torch.no_grad():
        got = part.turn(form, [None if g is None else g.clone() for g in grads])
    for a, b, zero in zip(got, want, map(torch.zeros_like, leaves), strict=True):
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-10, atol=1e-12)


@each_case
def test_two_micro_batches_are_one_batch(case: Case) -> None:
    whole, optimizer_1, _ = case.build()
    parts, optimizer_2, _ = case.build()
    for model in (whole, parts):
        model.get_submodule("norm").eval()  # batch statistics are not additive
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.cross_entropy(whole(x), y).backward()
        for half in (slice(0, 4), slice(4, 8)):
            (nn.functional.cross_entropy(parts(x[half]), y[half]) / 2).backward()
        for optimizer in (optimizer_1, optimizer_2):
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@each_case
@pytest.mark.parametrize("stop", [1, 4, 10])
def test_resume_is_bit_identical(case: Case, stop: int) -> None:
    model, optimizer, sparsifier = case.build()
    train(model, optimizer, range(stop))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
    train(model, optimizer, range(stop, STEPS))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, optimizer_again, sparsifier_again = case.build(seed=99)
    for part, state in zip((again, optimizer_again, sparsifier_again), saved, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    assert sparsifier_again.stats.step == stop
    train(again, optimizer_again, range(stop, STEPS))
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert sparsifier.stats == sparsifier_again.stats
    assert_same(sparsifier.state_dict(), sparsifier_again.state_dict())


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_model_trains_the_same_without_graph_breaks(method: str) -> None:
    case = Case(method, "unstructured", "global", "params")
    eager, optimizer, _ = case.build()
    plain, optimizer_compiled, _ = case.build()
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.cross_entropy(eager(x), y).backward()
        nn.functional.cross_entropy(compiled(x), y).backward()
        for o in (optimizer, optimizer_compiled):
            o.step()
            o.zero_grad()
    for a, b in zip(eager.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
