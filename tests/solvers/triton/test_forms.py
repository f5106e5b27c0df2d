"""Every form that a method may declare, by the kernels of blocks, rows, columns and N:M, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import NM, Block, Channel
from spartan.methods.soft_threshold import STR
from spartan.problem.axes import Axes
from spartan.problem.patterns import Pattern
from spartan.problem.schedules import Moment
from spartan.solvers.forms import KEPT, STRAIGHT, VJP, Along, Form, Mask, Shrunk, Stored, Where
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton.blocks import BlockSolver
from spartan.solvers.triton.rows import RowSolver, order_of
from tests.solvers.building import build, problem_of, weights_of
from tests.solvers.triton import DEVICE
from tests.solvers.triton.test_rows import in_order

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

# Shapes, and the order of their axes in memory: rows, columns, channels last, and none. The last is a segment of its own.
SHAPES: dict[Pattern, list[tuple[tuple[int, ...], tuple[int, ...] | None]]] = {
    Block(3, 5): [((9, 5, 3), None), ((3, 10), (1, 0)), ((6, 15), None)],
    Block(1, -1): [((5, 7), None), ((3, 2, 2, 3), (0, 2, 3, 1)), ((3, 1), None)],
    Channel("in"): [((5, 7, 3, 3), None), ((6, 5), (1, 0)), ((4, 3, 2, 2), (0, 2, 3, 1))],
    NM(2, 4): [((3, 8, 2, 3), None), ((6, 4), (1, 0)), ((2, 8, 3, 3), (0, 2, 3, 1))],
    NM(3, 7): [((2, 7, 2, 3), (3, 1, 0, 2)), ((4, 7, 2), None), ((3, 14), None)],
}
EACH = (0.5, 0.125)  # of both segments
DAMP = torch.tensor([1.25, 0.0, 0.5], dtype=torch.float64, device=DEVICE)  # of each target
FORMS = {
    "one": Form(Mask.ONE, KEPT),
    "straight": Form(Mask.ONE, STRAIGHT, Where(0.0, 0.5, 0.5), pace=Where(1.0, 2.0, 2.0)),
    "soft": Form(Mask.SOFT, VJP.THROUGH),
    "soft, not projected": Form(Mask.SOFT, VJP.THROUGH, project=False),
    "shrunk": Form(Shrunk(1.0), Where(1.0, EACH, EACH)),
    "shrunk, p": Form(Shrunk(2.5), STRAIGHT),
    "shrunk, by outputs": Form(Shrunk(1.0, row_scale=True), STRAIGHT),
    "b": Form(Mask.ONE, Where(1.0, 1.0, 0.0), Where(0.25, EACH, 0.0), pace=Where(0.25, EACH, 0.0)),
    "everything": Form(Mask.ONE, STRAIGHT, project=False),
    "stored": Form(Stored("A"), KEPT, pace=Where(1.0, EACH, EACH)),
    "stored, b": Form(Stored("A"), Where(1.0, 0.5, 0.0), Where(0.25, EACH, 0.0), more="B"),
    "stored, learned": Form(Stored("A"), KEPT, learned="rank"),
    "stored numbers": Form(Stored("m"), VJP.THROUGH, project=False),
    "learned": Form(Mask.ONE, KEPT, Where(0.25, 0.5, 0.5), learned="rank", pace=Where(1.0, 1.5, 1.5)),
    "along": Form(Mask.ONE, Along.THETA),
    "stored, along": Form(Stored("A"), Along.THETA),
    "damped, along": Form(Mask.ONE, Along.THETA, damp=DAMP),
    "stored, damped, along": Form(Stored("A"), Along.THETA, damp=DAMP),
    "learned, along": Form(Mask.ONE, Along.THETA, learned="rank"),
    "learned, soft": Form(Mask.SOFT, VJP.THROUGH, learned="rank"),
}


def both(pattern: Pattern, dtype: torch.dtype = torch.float32) -> list[TorchSolver]:
    """The same problem twice, plain and with kernels, with the same state."""
    rng = torch.Generator().manual_seed(0)
    thetas = [in_order(torch.randn(shape, generator=rng), order).to(DEVICE, dtype) for shape, order in SHAPES[pattern]]
    prices, power = [1.0, 1.5, 2.0], 1.0 if pattern.rows else 0.5
    fast = BlockSolver if pattern.rows is None else RowSolver
    found: list[TorchSolver] = []
    for kind in (TorchSolver, fast):
        problem = problem_of(thetas, pattern, prices, value_power=power, owners=[0, 0, 1])
        assert fast.why_not(problem, "triton") == ""
        found.append(build(kind, problem))
    for solver in found:
        rng = torch.Generator().manual_seed(1)
        drawn = [torch.rand(solver.count, generator=rng).to(DEVICE) for _ in range(3)]
        solver.state.per_unit |= {"A": drawn[0] > 0.5, "B": drawn[0] > 0.25, "m": drawn[1]}
        solver.state.learned["rank"] = nn.Parameter(4.0 * drawn[2] - 3.0)
    return found


def gradients(solver: TorchSolver, missing: tuple[int, ...]) -> list[Tensor | None]:
    rng = torch.Generator().manual_seed(2)
    views = solver.theta.views
    found = [torch.empty_like(t).copy_(torch.randn(t.shape, generator=rng)) for t in views]
    return [None if i in missing else g for i, g in enumerate(found)]


def compare(solvers: list[TorchSolver], forms: list[Form], missing: tuple[int, ...]) -> None:
    """What is written, what becomes of gradients, what is learned and what decays."""
    half = solvers[0].theta.views[0].dtype != torch.float32
    close: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 2e-5, "atol": 2e-6}
    plain, fast = solvers
    assert fast.serves(forms[1])
    assert fast.turns(forms[1])
    for solver, form in zip(solvers, forms, strict=True):
        solver.write(form)
    for w, found in zip(weights_of(plain), weights_of(fast), strict=True):
        torch.testing.assert_close(found, w, **close)
        assert torch.equal(found == 0, w == 0)
        assert not (torch.signbit(found) & (found == 0)).any()
    for _ in range(2):  # what is learned adds up
        each = [s.turn(f, gradients(s, missing)) for s, f in zip(solvers, forms, strict=True)]
    for expected, g in zip(*each, strict=True):
        assert (g is None) == (expected is None)
        if g is not None and expected is not None:
            torch.testing.assert_close(g, expected, **close)
    for p, q in zip(plain.state.parameters(), fast.state.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, **close | {"atol": 20 * close["atol"]})
    if forms[0].decay is not None:
        for scale in (None, torch.tensor(8.0, device=DEVICE)):
            grads = [gradients(s, missing) for s in solvers]
            for solver, form, mine in zip(solvers, forms, grads, strict=True):
                solver.add_decay(form, mine, scale)
            for expected, g in zip(*grads, strict=True):
                if g is not None:
                    torch.testing.assert_close(g, expected, **close)
    if forms[0].pace is not None:
        compare_pace(solvers, forms, close)


def compare_pace(solvers: list[TorchSolver], forms: list[Form], close: dict[str, Any]) -> None:
    """How far parameters go that an optimizer has moved: of some of them, the others stay where they are."""
    moved = [[g for g in gradients(s, ()) if g is not None] for s in solvers]
    which = [i for i in range(len(moved[0])) if i != 1]
    for solver, form, parameters in zip(solvers, forms, moved, strict=True):
        for target, x in zip(solver.problem.targets, parameters, strict=True):
            target.local.copy_(x)
        solver.pace(form, which)
    assert forms[0].pace is not None
    factors = solvers[0].per_target(solvers[0].spread(solvers[0]._factors(forms[0], forms[0].pace)))
    kept = solvers[0].per_target(solvers[0].spread(solvers[0].kept(forms[0])))
    for i, (x, theta, factor) in enumerate(zip(moved[0], solvers[0].theta.views, factors, strict=True)):
        way = factor * (x - theta)
        expected = (theta + way).to(x.dtype) if i in which else x
        for solver in solvers:
            found = solver.problem.targets[i].local
            torch.testing.assert_close(found, expected, **close)
            untouched = kept[i] & (factor == 1)
            assert torch.equal(found[untouched], x[untouched])


def choose(solver: TorchSolver, learned: str | None) -> None:
    """Thresholds and soft masks, of A and of B: once for all forms, since the interpreter takes its time."""
    segments = solver.problem.segments
    solver.solve([0.5 * s.total for s in segments], [6.0, 3.0], learned=learned)
    solver.b = solver.select([0.8 * s.total for s in segments], solver.ranks(Form(learned=learned)))


def compare_all(solvers: list[TorchSolver], names: list[str], missing: tuple[int, ...]) -> None:
    for learned in (None, "rank"):
        mine = [n for n in names if learned == (FORMS[n].learned if FORMS[n].stored is None else None)]
        for solver in solvers if mine else []:
            choose(solver, learned)
        for name in mine:
            for solver in solvers:
                solver.state.learned["rank"].grad = None
            try:
                compare(solvers, [FORMS[name]] * 2, missing)
            except AssertionError as error:
                error.add_note(f"the form: {name}")
                raise


@pytest.mark.parametrize("pattern", list(SHAPES), ids=repr)
def test_forms_agree(pattern: Pattern) -> None:
    solvers, names = both(pattern), list(FORMS)
    if pattern.rows is not None:  # no method stores numbers there
        names.remove("stored numbers")
        assert not solvers[1].serves(FORMS["stored numbers"])
        names = [
            name for name in names if FORMS[name].back is not Along.THETA
        ]  # nor asks for this: of one weight it is g
    compare_all(solvers, names, missing=(1,))


@pytest.mark.parametrize(("pattern", "dtype"), [(Block(3, 5), torch.bfloat16), (NM(2, 4), torch.float16)], ids=repr)
def test_forms_agree_in_half_precision(pattern: Pattern, dtype: torch.dtype) -> None:
    names = ["shrunk, by outputs", "b", "stored, b", "stored, learned", "learned, soft"]
    compare_all(both(pattern, dtype), names, missing=())


@pytest.mark.parametrize("pattern", [p for p in SHAPES if p.rows is None], ids=repr)
def test_shifted_ranks(pattern: Pattern) -> None:
    """With an expression of the method's own, which autograd sees through."""
    solvers, method, forms = both(pattern), STR(init=-1.0), []
    for solver in solvers:
        del solver.state.learned["rank"]
        solver.k = [0.4 * segment.total for segment in solver.problem.segments]
        at = Moment(0, 10, 0, 10)
        method.setup(solver, at)
        with torch.no_grad():
            solver.state.learned_per_target["s"].add_(torch.linspace(-1.0, 1.0, 3, device=DEVICE))
        method.choose(solver, at)
        forms.append(method.form(solver, at))
    compare(solvers, forms, missing=(1,))


def test_a_segment_that_the_loss_does_not_reach() -> None:
    """What it has learned stays: the pull of the last step must not act on it again."""
    solvers = both(Block(3, 5))
    for solver in solvers:
        choose(solver, "rank")
    compare(solvers, [FORMS["learned, soft"]] * 2, missing=())
    for solver in solvers:
        solver.state.learned["rank"].grad = None
    compare(solvers, [FORMS["learned, soft"]] * 2, missing=(0, 1))


@pytest.mark.parametrize("pattern", list(SHAPES), ids=repr)
def test_vectors_of_units(pattern: Pattern) -> None:
    plain, fast = both(pattern)
    torch.testing.assert_close(fast.scores(), plain.scores(), rtol=1e-6, atol=0)
    grads = gradients(plain, (1,))
    torch.testing.assert_close(fast.products(grads), plain.products(grads), rtol=1e-5, atol=1e-5)
    each = [s.magnitudes(s.dense(grads)) for s in (plain, fast)]
    torch.testing.assert_close(each[1], each[0], rtol=1e-6, atol=0)
    k, mask = [0.5 * s.total for s in plain.problem.segments], plain.state.per_unit["A"]
    ranks = plain.state.per_unit["m"].round(decimals=1)  # with ties
    for among in (None, plain.state.per_unit["B"]):
        assert torch.equal(fast.top(k, ranks, among), plain.top(k, ranks, among))
    for solver in (plain, fast):
        solver.restart(mask, growing=True)
    for theta, found in zip(plain.theta.views, fast.theta.views, strict=True):
        assert torch.equal(theta, found)


def test_axes_that_are_turned_or_stacked() -> None:
    """Inputs × outputs, and matrices for several experts, of either order."""
    for axes, shape in ((Axes(swapped=True), (8, 6)), (Axes(stacked=True), (3, 5, 8)), (Axes(True, True), (3, 8, 5))):
        solvers = []
        for kind in (TorchSolver, RowSolver):
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
            solvers.append(build(kind, problem_of([weight], NM(2, 4), axes=axes)))
        for solver in solvers:
            solver.state.per_unit["A"] = torch.arange(solver.count, device=DEVICE) % 3 == 0
            solver.solve([0.5 * solver.problem.total])
        for form in (FORMS["stored"], FORMS["shrunk, by outputs"]):
            compare(solvers, [form] * 2, missing=())


def test_more_axes_than_kernels_count() -> None:
    """Five that lie in an order of their own: plain torch finds its way among vectors of units."""
    weight = in_order(torch.randn(2, 8, 2, 3, 2), (0, 1, 4, 3, 2)).to(DEVICE)
    solvers = [build(kind, problem_of([weight], NM(2, 4))) for kind in (TorchSolver, RowSolver)]
    assert order_of(solvers[1].problem.targets[0], 4) is None
    for solver in solvers:
        solver.state.per_unit["A"] = torch.arange(solver.count, device=DEVICE) % 3 == 0
        solver.solve([0.5 * solver.problem.total])
        solver.restart(solver.state.per_unit["A"])
    fast = solvers[1]
    assert fast.path(FORMS["stored"]) == "triton for thresholds, torch for weights and gradients"
    assert fast.path(FORMS["one"]) == "triton"
    compare(solvers, [FORMS["one"]] * 2, missing=())
    assert torch.equal(fast.scores(), solvers[0].scores())
