"""Powers of θ in its place, by kernels: runs against plain torch, values and gradients by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spartan import Spartan, TopKAST, linear
from spartan.methods.base import Method
from spartan.methods.powerprop import Powerprop
from spartan.methods.st3 import ST3
from spartan.solvers.forms import KEPT, STRAIGHT, VJP, Form, Mask, Shrunk, Where
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton.single import TritonSolver
from tests.contract import oracle
from tests.solvers.building import build, problem_of, weights_of
from tests.solvers.triton import DEVICE
from tests.solvers.triton.test_runs import METHODS, run, same

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ASKED: dict[str, Any] = {"prices": [1.0, 0.25, 3.0, 0.5], "owners": [0, 0, 1, 1], "value_power": 0.5}
DAMP = torch.tensor([0.25, 1.0, 0.0, 1.75], dtype=torch.float64, device=DEVICE)  # of each target
FORMS = {
    "spartan": Form(Mask.SOFT, VJP.THROUGH),
    "spartan-soft": Form(Mask.SOFT, VJP.THROUGH, project=False),
    "imp": Form(back=KEPT),
    "topkast": Form(back=STRAIGHT, decay=Where(0.1, 0.5, 0.0)),
    "feather": Form(Shrunk(3.0), Where(1.0, 0.5, 0.5)),
    "straight": Form(Shrunk(3.0), STRAIGHT, pace=Where(1.0, 1.5, 1.5)),
    "paced": Form(Shrunk(3.0), STRAIGHT, pace=Where(1.0, 1.5, 1.5), damp=DAMP),
    "damped": Form(Mask.ONE, STRAIGHT, damp=DAMP),
    "st3": Form(Shrunk(1.0, row_scale=True), STRAIGHT),
    "srste": Form(back=STRAIGHT, decay=Where(0.0, 0.2, 0.2)),
}


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(size, device=DEVICE).to(dtype) for size in ((31, 7), (1, 1), (50, 41), (9, 4, 3, 3))]
    found[2][:, 3] = 0.0
    return found


def solvers(power: float, dtype: torch.dtype = torch.float32) -> tuple[TritonSolver, TorchSolver]:
    """By kernels and in plain torch; two segments, prices and a value power that make every target's factor its own."""
    problem = problem_of(tensors(dtype), **ASKED)
    found = build(TritonSolver, problem), build(TorchSolver, problem)
    for solver in found:
        solver.power = power
    return found


def cut_off(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are cut off rather than rounded: the interpreter's bfloat16."""
    return dtype == torch.bfloat16 and DEVICE.type == "cpu"


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not (method.restarts or method.rewrites)])
def test_a_run_is_the_same(name: str) -> None:
    assert "by triton\n" in repr(same(Powerprop(METHODS[name]), skip=3))


@pytest.mark.parametrize("alpha", [1.25, 3.0, 4.5])
@pytest.mark.parametrize("method", [TopKAST(), Spartan(beta=linear(1, 50)), ST3()], ids=str)
def test_other_powers(method: Method, alpha: float) -> None:
    """The kernels' powers round otherwise; no two weights here are so near each other that it matters."""
    same(Powerprop(method, alpha=alpha), skip=3, odd=True, budget="erk")


def test_a_power_of_one_is_the_inner_method() -> None:
    model, _, losses = run("triton", TopKAST())
    other, _, other_losses = run("triton", Powerprop(TopKAST(), alpha=1.0))
    assert losses == other_losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [1.5, 2.0, 3.0])
def test_values(power: float, dtype: torch.dtype) -> None:
    fast, plain = solvers(power, dtype)
    for x, y in zip(fast.values(), plain.values(), strict=True):
        assert x.dtype == dtype
        if power == 2.0 and not cut_off(dtype):
            assert torch.equal(x, y)
        torch.testing.assert_close(x, y)
    assert not fast.per_target(fast.values())[2][:, 3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [1.25, 2.0, 3.7])
def test_who_looks_sees_what_the_kernels_kept(power: float, dtype: torch.dtype) -> None:
    """The threshold is one of the kernels' values: bools made of scores, w, and the cost told agree with each other."""
    fast, _ = solvers(power, dtype)
    totals = [segment.total for segment in fast.problem.segments]
    for part in (0.03, 0.2, 0.5, 0.93):
        fast.solve([part * total for total in totals], None)
        form = FORMS["imp"]
        assert fast.serves(form)
        fast.write(form)
        kept = fast.per_target(fast.spread(fast.kept(form)))
        for w, keep, psi in zip(weights_of(fast), kept, fast.per_target(fast.values()), strict=True):
            assert torch.equal(w, torch.where(keep, psi, 0.0))
        assert torch.equal(fast.cost_of(fast.kept(form)), fast.a.cost)
        for cost, total in zip(fast.a.cost.tolist(), totals, strict=True):
            assert part * total - max(fast.problem.unit_costs) < cost <= part * total + 1e-9


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("name", list(FORMS))
def test_weights_and_gradients(name: str, power: float) -> None:
    """Against the VJP of a plain expression of θ, in float64."""
    fast, plain = solvers(power)
    form, budgets = FORMS[name], [0.4 * segment.total for segment in fast.problem.segments]
    beta = [5.0, 20.0] if form.mask is Mask.SOFT else None
    for solver in (fast, plain):
        solver.solve(budgets, beta)
        solver.write(form)
        assert solver.serves(form)
        if isinstance(solver, TritonSolver):
            assert solver.turns(form)
            found = [w.clone() for w in weights_of(solver)]
    for w, expected in zip(found, weights_of(plain), strict=True):
        torch.testing.assert_close(w, expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(w == 0, expected == 0)
    wide = build(TorchSolver, problem_of([t.double().cpu() for t in tensors()], **ASKED))
    wide.power = power
    wide.solve(budgets, beta)
    torch.manual_seed(1)
    grads = [torch.randn_like(t) for t in fast.theta.views]
    leaves = [t.double().cpu().requires_grad_() for t in fast.theta.views]
    w64 = oracle.weights(wide, form, leaves)
    expected64 = torch.autograd.grad(w64, leaves, [g.double().cpu() for g in grads], allow_unused=True)
    turned = fast.turn(form, [g.clone() for g in grads])
    for got, want in zip(turned, expected64, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-3, atol=1e-4)
    if form.decay is not None:
        added = [torch.zeros_like(t) for t in fast.theta.views]
        fast.add_decay(form, added)
        for got, want in zip(added, oracle.decay(wide, form, [t.detach() for t in leaves]) or [], strict=True):
            torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The same masks at the start, ties included; and a run that goes on within its budget."""
    for inner in (TopKAST(), Spartan(beta=linear(1, 50))):
        _, plain, _ = run("torch", Powerprop(inner), steps=0, dtype=dtype, warmup=0.0)
        _, fast, _ = run("triton", Powerprop(inner), steps=0, dtype=dtype, warmup=0.0)
        for (key, mask), other in zip(plain.masks().items(), fast.masks().values(), strict=True):
            assert torch.equal(mask, other) or cut_off(dtype), key
        for steps in (3, 6):
            model, fast, losses = run("triton", Powerprop(inner, alpha=1.5), steps=steps, dtype=dtype, warmup=0.0)
            assert all(loss < 10 for loss in losses)
            assert 0 <= fast.stats.target_cost - fast.stats.cost < 1
            kept = sum(int((p != 0).sum()) for p in model.parameters() if p.ndim > 1)
            assert kept <= fast.stats.cost
