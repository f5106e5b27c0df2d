"""N:M in chunks, as it runs on a CPU, against plain torch: whole runs, resume, and one verb at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan import NM, Sparsifier, Spartan, TopKAST, constant
from spartan.methods import ST3, SpartanLearned  # type: ignore[attr-defined]
from spartan.solvers.chunks import masks, row_pieces
from spartan.solvers.chunks.rows import ChunkRows
from spartan.solvers.forms import KEPT, VJP, Form, Mask, Shrunk, Where
from tests.contract import test_contract as contract
from tests.contract.cases import METHODS as ALL
from tests.contract.cases import Case
from tests.solvers.building import build, problem_of, set_theta, weights_of

METHODS = {name: x for name, x in ALL.items() if not x.refuses_nm and name not in ("dense", "fixed")} | {
    "spartan-flat": Spartan(beta=constant(0.0)),
    "spartan-sharp": Spartan(beta=constant(300.0)),
    "topkast-b": TopKAST(backward_sparsity=0.25, exploration=1e-2),
    "topkast-every": TopKAST(backward_sparsity=0.25, exploration=1e-2, every=2),
    "st3-plain": ST3(rescale=False),
    "learned-hard": SpartanLearned(beta=constant(float("inf"))),
}
PATTERNS = [NM(1, 4), NM(2, 4), NM(2, 8), NM(3, 5), NM(4, 16), NM(5, 32)]
PROMISES = [
    contract.test_the_gradient_is_the_vjp_of_the_expression,
    contract.test_a_closed_form_agrees_with_the_vjp_when_gradients_are_missing,
    contract.test_the_budget_is_exact_at_every_step_from_when_the_model_is_sparse,
    contract.test_two_micro_batches_are_one_batch,
]
each_method = pytest.mark.parametrize("name", list(METHODS))
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several to a tensor, the last one short."""
    monkeypatch.setattr(masks, "WORTH", 100)
    monkeypatch.setattr(row_pieces, "LENGTH", 1000)


class Net(nn.Module):
    """A convolution and two Linears whose inputs m divides."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.conv, self.point = nn.Conv2d(2 * m, m, 3), nn.Conv2d(m, m, 1)
        self.hidden, self.head = nn.Linear(4 * m, 6 * m), nn.Linear(6 * m, 7)

    def forward(self, x: Tensor, above: bool = False) -> Tensor:
        """The convolutions get no gradient where only what is above them is used."""
        if above:
            return self.head(torch.relu(self.hidden(x.flatten(1)[:, : self.hidden.in_features])))
        return self.head(torch.relu(self.hidden(self.point(torch.relu(self.conv(x))).flatten(1))))


def run(kernels: str, method: Any, pattern: NM, steps: int = 8, tied: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(pattern.m).to(options.pop("dtype", torch.float32))
    if tied:
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.ndim > 1):
                p.copy_(p.sign() * (30 * p).abs().ceil() / 30)
                p.view(-1)[::9], p.view(-1)[::18] = 0.0, -0.0
    make = options.pop("optimizer", lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9, weight_decay=1e-3))
    optimizer = make(model.parameters())
    settings: dict[str, Any] = {"total_steps": 8, "warmup": 0.25, "finetune": 0.25, **options}
    sparsifier = Sparsifier(model, pattern.sparsity, method=method, pattern=pattern, kernels=kernels, **settings)
    sparsifier.attach(optimizer)
    if kernels == "auto":
        assert [type(solver) for solver in sparsifier._run.weights.solving] == [ChunkRows]
    return model, optimizer, sparsifier, train(model, optimizer, range(steps))


def train(model: Net, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(16, model.conv.in_channels, 4, 4, generator=rng).to(model.head.weight.dtype)
        loss = nn.functional.cross_entropy(model(x, step == 3), torch.randint(7, (16,), generator=rng))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_same(plain: Any, fast: Any, rtol: float, atol: float) -> None:
    assert fast[3] == pytest.approx(plain[3], rel=10 * rtol)
    for (key, mask), other in zip(plain[2].masks().items(), fast[2].masks().values(), strict=True):
        assert torch.equal(mask, other), key
    for a, b in zip(plain[0].parameters(), fast[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    assert fast[2].stats.cost == plain[2].stats.cost


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("name", [name for name, x in ALL.items() if not x.refuses_nm])
def test_what_every_method_promises(name: str, promise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models are small."""
    monkeypatch.setattr(masks, "WORTH", 0)
    monkeypatch.setattr(row_pieces, "LENGTH", 50)
    promise(Case(name, "nm", "global", "params"))


@each_pattern
@each_method
def test_a_run_is_the_same(name: str, pattern: NM) -> None:
    plain, fast = (run(kernels, METHODS[name], pattern, dtype=torch.float64) for kernels in ("torch", "auto"))
    check_same(plain, fast, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tied", [True, False])
@each_method
def test_a_run_in_single_precision_is_the_same(name: str, tied: bool) -> None:
    plain, fast = (run(kernels, METHODS[name], NM(2, 8), tied=tied) for kernels in ("torch", "auto"))
    check_same(plain, fast, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["spartan", "srste", "paced-hurried", "movement"])
def test_a_run_with_another_optimizer_is_the_same(name: str) -> None:
    adam = lambda some: torch.optim.AdamW(some, lr=1e-3)  # noqa: E731
    plain, fast = (run(k, METHODS[name], NM(2, 4), dtype=torch.float64, optimizer=adam) for k in ("torch", "auto"))
    check_same(plain, fast, rtol=1e-9, atol=1e-11)


@each_method
@pytest.mark.parametrize("stop", [1, 5])
def test_resume_is_bit_identical(name: str, stop: int) -> None:
    model, optimizer, sparsifier, _ = run("auto", METHODS[name], NM(2, 4), steps=stop)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()))
    train(model, optimizer, range(stop, 8))
    again, optimizer_again, sparsifier_again, _ = run("auto", METHODS[name], NM(2, 4), steps=0)
    for part, state in zip((again, optimizer_again, sparsifier_again), states, strict=True):
        part.load_state_dict(state)
    train(again, optimizer_again, range(stop, 8))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["spartan", "imp", "srste"])
def test_a_step_that_fails_is_taken_back(name: str) -> None:
    model, _, sparsifier, _ = run("auto", METHODS[name], NM(2, 4), steps=4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    sparsifier.detach().attach(optimizer)
    before, stats, calls = [p.detach().clone() for p in model.parameters()], sparsifier.stats, 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 8, 4, 4)).square().mean()
        loss.backward()
        if calls == 3:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.ndim == 1 or torch.equal(p, old)
    assert sparsifier.stats == stats


def test_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    build_one = lambda: run("auto", METHODS["spartan"], NM(2, 4), steps=0)[2]  # noqa: E731
    assert "by chunks\n" in repr(build_one())
    assert "torch (kernels='torch')\n" in repr(run("torch", METHODS["spartan"], NM(2, 4), steps=0)[2])
    monkeypatch.setattr(masks, "WORTH", 10**6)
    model = Net(4)
    assert "by torch (few weights)\n" in repr(Sparsifier(model, 0.5, 8, pattern=NM(2, 4)))
    problem = problem_of([torch.ones(8, 16).t()], NM(2, 4))
    assert "row-major" in ChunkRows.why_not(problem, "auto")
    assert ChunkRows.why_not(problem, "torch") == "kernels='torch'"
    assert "no budgets of rows" in ChunkRows.why_not(problem_of([torch.ones(8, 16)]), "auto")
    halves = problem_of([torch.ones(8, 16, dtype=torch.bfloat16)], NM(2, 4))
    assert "not float32" in ChunkRows.why_not(halves, "auto")


def thetas(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = (40, 32), (12, 32, 3, 3), (24, 64, 1, 1), (1, 32, 2, 20)
    return [torch.randn(shape, generator=rng, dtype=dtype) for shape in shapes]


FORMS = {
    "hard": Form(),
    "soft": Form(Mask.SOFT, VJP.THROUGH),
    "soft-whole": Form(Mask.SOFT, VJP.THROUGH, project=False),
    "shrunk": Form(Shrunk(3.0), Where(1.0, 0.5, 0.25)),
    "shrunk-1.5": Form(Shrunk(1.5), Where(1.0, 0.5, 0.25)),
    "scaled": Form(Shrunk(row_scale=True), Where(0.5, 0.5, 0.0)),
}


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("pattern", [NM(2, 4), NM(5, 32)], ids=str)
@pytest.mark.parametrize("name", list(FORMS))
def test_every_verb_is_that_of_plain_torch(name: str, pattern: NM, more: bool, scale: float) -> None:
    form = FORMS[name]._replace(decay=Where(0.1, 0.2, 0.3), pace=Where(1.0, 0.5, (0.25, 2.0)))
    for tensors in (thetas(), [(2 * t).round() / 2 for t in thetas()]):  # ties, and zeros of both signs
        grads = [torch.randn_like(t) if i != 1 else None for i, t in enumerate(tensors)]
        problem = [problem_of(tensors, pattern, owners=[0, 0, 1, 1]) for _ in range(2)]
        solvers = [
            build(kind, p) for kind, p in zip((ChunkRows, spartan.solvers.torch.TorchSolver), problem, strict=True)
        ]
        found = []
        for solver in solvers:
            solver.problem.set_scales([scale, 1.0, scale, 1.0])
            solver.redivided()
            k = [s.total * pattern.n / pattern.m for s in solver.problem.segments]
            solver.solve(k, [3.0, 8.0] if form.mask is Mask.SOFT else None)
            if more:
                solver.solve_more([s.total * (pattern.n + 1) / pattern.m for s in solver.problem.segments])
            solver.write(form)
            weights = [w.clone() for w in weights_of(solver)]
            turned = [None if g is None else g.clone() for g in grads]
            turned = list(solver.turn(form, turned))
            solver.add_decay(form, turned, torch.tensor(2.0))
            for w, t in zip(weights_of(solver), tensors, strict=True):
                w.copy_(0.5 * t + 1.0)
            solver.pace(form, [0, 1, 3])
            found.append([*weights, *turned, *(w.clone() for w in weights_of(solver)), solver.kept(form)])
        for fast, plain in zip(*found, strict=True):
            assert (fast is None) == (plain is None)
            if plain is not None:
                torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-12)
                assert torch.equal(fast == 0, plain == 0)


@pytest.mark.parametrize("form", [Form(), FORMS["soft"], FORMS["shrunk"]])
def test_what_is_not_kept_is_plus_zero(form: Form) -> None:
    tensors = [(2 * t).round() / 2 for t in thetas(torch.float32)]
    solver = build(ChunkRows, problem_of(tensors, NM(3, 4)))
    for given in (tensors, [-t.abs() for t in tensors], [0.0 * t for t in tensors]):
        set_theta(solver, given)
        solver.solve([0.75 * solver.problem.total], [2.0] if form.mask is Mask.SOFT else None)
        for w in weights_of(solver):
            w.fill_(-1.0)
        solver.write(form)
        kept = solver.kept(form)
        w = solver.reduce(weights_of(solver))
        assert (kept.view(-1, 4).sum(1) == 3).all()
        assert torch.isfinite(w).all()
        assert not w[~kept].signbit().any()
        assert not w[~kept].any()
        grads = [torch.full_like(t, -torch.inf) for t in tensors]
        turned = solver.turn(Form(Mask.ONE, KEPT), grads)
        assert all(a is b for a, b in zip(turned, grads, strict=True))  # in place
        units = solver.reduce(grads)
        assert torch.equal(units, torch.where(kept, -torch.inf, 0.0))
        assert not units[~kept].signbit().any()


def test_soft_masks_are_found_again_as_they_were() -> None:
    tensors = thetas(torch.float32)
    solver = build(ChunkRows, problem_of(tensors, NM(2, 8)))
    solver.solve([solver.problem.total / 4], [5.0])
    solver.write(FORMS["soft"])
    grads = [torch.randn_like(t) for t in tensors]
    want = solver.turn(FORMS["soft"], [g.clone() for g in grads])
    solver.go_on_from(solver.solution())
    for a, b in zip(solver.turn(FORMS["soft"], grads), want, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
