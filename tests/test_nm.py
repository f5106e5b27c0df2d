"""N:M: n of every m weights along the inputs, at every step, with every method that takes it; the rest is refused."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spartan
from spartan import NM, Flops, Sparsifier, Spartan, TopKAST, cubic
from spartan.methods import as_method
from spartan.methods.feather import Feather
from spartan.methods.imp import IMP
from spartan.methods.st3 import ST3
from spartan.methods.static import Static
from spartan.problem.problem import make_problem
from tests.contract import oracle
from tests.contract.cases import METHODS, begin

TAKES = [name for name, method in METHODS.items() if not method.refuses_nm]
REFUSES = [name for name, method in METHODS.items() if method.refuses_nm]
STEPS = 20  # warm-up to step 4, finetuning from step 16, where the method does not say otherwise


class Net(nn.Module):
    """Inputs that four divides, and a kernel that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(8, 4, 3), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x)).flatten(1))


def build(method: Any, pattern: NM, dtype: torch.dtype = torch.float64, **kwargs: Any) -> tuple[Net, Any, Sparsifier]:
    torch.manual_seed(0)
    model = begin(Net().to(dtype), as_method(method), pattern.sparsity, pattern=pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    sparsifier = Sparsifier(model, pattern.sparsity, STEPS, method, pattern=pattern, **kwargs)
    return model, optimizer, sparsifier.attach(optimizer)


def train(model: Net, optimizer: Any, steps: range) -> None:
    dtype = model.head.weight.dtype
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 8, 4, 4, generator=rng).to(dtype), torch.randint(8, (8,), generator=rng)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def counts(model: Net, m: int) -> list[int]:
    """How many of each m are not zero, along the input channels of the convolution and the inputs of the Linear."""
    kernel = model.conv.weight.detach().permute(0, 2, 3, 1).reshape(-1, m)
    return (torch.cat([kernel, model.head.weight.detach().reshape(-1, m)]) != 0).sum(1).tolist()


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(1, 4), NM(5, 8), NM(1, 8)], ids=str)
@pytest.mark.parametrize("method", TAKES)
def test_weights_satisfy_the_pattern(method: str, pattern: NM) -> None:
    model, optimizer, sparsifier = build(METHODS[method], pattern)
    for step in range(STEPS):
        if METHODS[method].sparse_from in ("start", "warmup"):
            n = counts(model, pattern.m)
            stats = sparsifier.stats
            assert len(set(n)) == 1, f"step {step}"
            assert stats.density == stats.target_density == n[0] / pattern.m == sparsifier.progress()["density"]
            assert stats.cost == stats.target_cost
        train(model, optimizer, range(step, step + 1))
    if method != "dense":
        assert set(counts(model, pattern.m)) == {pattern.n}
        assert [layer.density for layer in sparsifier.layers()] == [pattern.n / pattern.m] * 2
    sparsifier.finalize()


@pytest.mark.parametrize("method", [name for name in TAKES if METHODS[name].sparse_from == "warmup"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_and_ties(method: str, dtype: torch.dtype) -> None:
    for values in ([0.5], [0.0], [0.5, 0.25, 0.25], None):
        torch.manual_seed(0)
        model = nn.Linear(24, 6).to(dtype)
        if values is not None:
            with torch.no_grad():
                model.weight.copy_(torch.tensor(values).repeat(144 // len(values)).reshape(6, 24))
        sparsifier = Sparsifier(model, 0.5, STEPS, METHODS[method], pattern=NM(2, 4), warmup=0)
        assert (sparsifier.masks()["weight"].view(-1, 4).sum(1) == 2).all()
        assert not model.weight.detach()[~sparsifier.masks()["weight"]].any()
        assert torch.isfinite(model.weight).all()


def test_warm_up_lowers_n_in_steps() -> None:
    model, optimizer, sparsifier = build(IMP(), NM(1, 4), warmup=0.5, finetune=0)
    found = []
    for step in range(STEPS):
        assert len(set(counts(model, 4))) == 1
        found.append(counts(model, 4)[0])
        train(model, optimizer, range(step, step + 1))
    # ⌈4 · (1 − 3/4 · t/10)⌉
    assert found == [4, 4, 4, 4, 3, 3, 3, 2, 2, 2] + [1] * 10
    assert sparsifier.stats.density == 0.25


@settings(deadline=None)
@given(m=st.integers(2, 64), data=st.data())
def test_n_at_a_density(m: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, m - 1))
    pattern, density = NM(n, m), data.draw(st.floats(n / m, 1.0))
    kept = pattern.density_at(density) * m
    assert kept == pytest.approx(round(kept), abs=1e-12)
    assert n <= round(kept) <= m
    assert round(kept) - 1 < m * density + 1e-6
    found = [pattern.density_at(x) for x in (1.0 - pattern.sparsity, 1.0, 0.0)]
    assert found == [n / m, 1.0, n / m]


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (3, 8)])
@pytest.mark.parametrize("shape", [(3, 8), (4, 16, 3), (2, 8, 3, 5), (2, 8, 2, 1, 3)])
def test_groups_run_along_the_inputs(n: int, m: int, shape: tuple[int, ...]) -> None:
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    units = NM(n, m).reduce(x)
    assert torch.equal(NM(n, m).expand(units, shape), x)
    for group in units.reshape(-1, m):  # neighbours in the input, at one output and one place of the kernel
        step = math.prod(shape[2:])
        assert torch.equal(group, group[0] + step * torch.arange(m))
    if len(shape) == 4:
        assert torch.equal(units, NM(n, m).reduce(x.to(memory_format=torch.channels_last)))


@pytest.mark.parametrize("beta", [0.0, 3.0, math.inf])
def test_spartan_solves_every_group_by_itself(beta: float) -> None:
    """w and its gradient are those of one soft top-k per group."""
    model, _, sparsifier = build(Spartan(beta=beta), NM(2, 4), warmup=0)
    run = sparsifier._run
    (solver,) = run.weights.solving
    thetas = solver.theta.views
    grads = [torch.randn_like(t) for t in thetas]
    turned = solver.turn(sparsifier.method.form(solver, run.at), [g.clone() for g in grads])
    for target, theta, g, got in zip(run.problem.targets, thetas, grads, turned, strict=True):
        last = theta.movedim(1, -1).reshape(-1, 4).clone().requires_grad_()
        soft = torch.stack([row * spartan.soft_topk(row.abs(), 2, beta) for row in last])
        hard = torch.stack([spartan.hard_topk(row.abs(), 2) for row in last])
        w = torch.where(hard, soft, 0.0).detach()
        held = model.get_parameter(target.name).detach().movedim(1, -1).reshape(-1, 4)
        torch.testing.assert_close(held, w, rtol=1e-12, atol=1e-14)
        flowing = soft * hard if math.isinf(beta) else soft
        (want,) = torch.autograd.grad(flowing, last, g.movedim(1, -1).reshape(-1, 4))
        assert got is not None
        torch.testing.assert_close(got.movedim(1, -1).reshape(-1, 4), want, rtol=1e-9, atol=1e-12)


def test_no_single_threshold_or_dual_is_told() -> None:
    _, _, sparsifier = build("spartan", NM(2, 4), warmup=0)
    stats = sparsifier.stats
    assert (stats.mu, stats.threshold, stats.beta) == (None, None, 1.0)
    assert stats.passes > 0
    assert sparsifier.progress()["mu"] is None


def test_spartan_meets_the_budget_of_every_group() -> None:
    for dtype, tol in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        model, optimizer, sparsifier = build(Spartan(beta=20.0), NM(2, 4), dtype, warmup=0)
        train(model, optimizer, range(5))
        (solver,) = sparsifier._run.weights.solving
        mask = solver.pools.soft(solver.scores(), solver.dual)
        assert mask.dtype == dtype
        assert float((mask.double().view(-1, 4).sum(1) - 2).abs().max()) <= 2 * tol


def test_topkast_backward_set_is_chosen_in_every_group() -> None:
    _, _, sparsifier = build(TopKAST(backward_sparsity=0.25), NM(1, 4), warmup=0)
    run = sparsifier._run
    (solver,) = run.weights.solving
    form, thetas = sparsifier.method.form(solver, run.at), solver.theta.views
    ones = [torch.ones_like(t) for t in thetas]
    leaves = [t.clone().requires_grad_() for t in thetas]
    want = torch.autograd.grad(oracle.weights(solver, form, leaves), leaves, ones)
    got = solver.turn(form, [t.clone() for t in ones])
    for a, b, theta in zip(got, want, thetas, strict=True):
        assert a is not None
        assert torch.equal(a, b)
        rows = a.movedim(1, -1).reshape(-1, 4)
        assert (rows.sum(1) == 3).all()
        smallest = theta.abs().movedim(1, -1).reshape(-1, 4).argmin(1)
        assert not rows[torch.arange(len(rows)), smallest].any()


def test_thresholds_are_those_of_every_group() -> None:
    """ST-3 and Feather shrink what is kept by the largest that is not, in each group."""
    for method, power in ((ST3(rescale=False), 1.0), (Feather(p=3.0), 3.0)):
        model, _, sparsifier = build(method, NM(2, 4), warmup=0)
        theta = sparsifier.state_dict()["weights"]["head.weight"]["theta"].view(-1, 4)
        tau = theta.abs().sort(1, descending=True).values[:, 2:3]
        want = theta.sign() * (theta.abs() ** power - tau**power).clamp(min=0) ** (1 / power)
        torch.testing.assert_close(model.head.weight.detach().view(-1, 4), want, rtol=1e-9, atol=1e-12)


def test_static_draws_in_every_group() -> None:
    model, _, sparsifier = build(Static(), NM(2, 4))
    assert set(counts(model, 4)) == {2}
    groups = sparsifier.masks()["conv.weight"].movedim(1, -1).reshape(-1, 4)
    assert len(torch.unique(groups, dim=0)) == 6  # every way to keep two of four


@pytest.mark.parametrize("ramp", [None, cubic(0, 1)])
def test_a_warm_up_keeps_parts_of_what_it_kept(ramp: Any) -> None:
    _, optimizer, sparsifier = build(Static() if ramp is None else IMP(ramp=ramp), NM(1, 8), warmup=0.5)
    masks = [sparsifier.masks()["head.weight"]]
    for step in range(10):
        train(sparsifier.model, optimizer, range(step, step + 1))  # type: ignore[arg-type]
        masks.append(sparsifier.masks()["head.weight"])
    kept = [int(mask.view(-1, 8).sum(1)[0]) for mask in masks]
    assert kept == sorted(kept, reverse=True)
    assert (kept[0], kept[-1]) == (8, 1)
    if ramp is None:
        assert all(not (after & ~before).any() for before, after in itertools.pairwise(masks))


@pytest.mark.parametrize("method", TAKES)
@pytest.mark.parametrize("stop", [2, 7, 18])
def test_resume_is_bit_identical(method: str, stop: int) -> None:
    model, optimizer, sparsifier = build(METHODS[method], NM(2, 4))
    train(model, optimizer, range(stop))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
    file.seek(0)
    again, optimizer_again, sparsifier_again = build(METHODS[method], NM(2, 4))
    saved = torch.load(file, weights_only=True)
    for part, state in zip((again, optimizer_again, sparsifier_again), saved, strict=True):
        part.load_state_dict(state)
    assert sparsifier_again.stats == sparsifier.stats
    assert sparsifier_again.mask_histogram() == sparsifier.mask_histogram()
    train(model, optimizer, range(stop, STEPS))
    train(again, optimizer_again, range(stop, STEPS))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_mask_histogram_counts_every_weight() -> None:
    _, optimizer, sparsifier = build("spartan", NM(2, 4))
    for steps in (range(10), range(10, STEPS)):  # while masks change, and frozen
        train(sparsifier.model, optimizer, steps)  # type: ignore[arg-type]
        found = sparsifier.mask_histogram(10)
        assert found is not None
        assert sum(found) == 288 + 128


@pytest.mark.parametrize("budget", [None, "global", "uniform"])
@pytest.mark.parametrize("cost", [None, Flops(torch.zeros(1, 8, 4, 4, dtype=torch.float64))])
def test_budgets_and_costs_that_change_nothing(budget: Any, cost: Any) -> None:
    plain, optimizer, _ = build("spartan", NM(2, 4))
    other, optimizer_other, sparsifier = build("spartan", NM(2, 4), budget=budget, cost=cost)
    train(plain, optimizer, range(STEPS))
    train(other, optimizer_other, range(STEPS))
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert sparsifier.stats.cost == sparsifier.stats.target_cost == 0.5 * sparsifier._run.problem.total


def test_prune() -> None:
    torch.manual_seed(0)
    model = Net()
    dense = model.head.weight.detach().clone().view(-1, 4)
    spartan.prune(model, 0.5, pattern=NM(2, 4))
    assert set(counts(model, 4)) == {2}
    kept = model.head.weight.detach().view(-1, 4) != 0
    largest = torch.zeros_like(kept).scatter_(1, dense.abs().topk(2).indices, True)
    assert torch.equal(kept, largest)


def test_count_model_with_the_sparsity_that_fits() -> None:
    torch.manual_seed(0)
    model = Net()
    weights, everything = 288 + 128, 288 + 4 + 128 + 8
    sparsifier = Sparsifier(model, 0.5 * weights / everything, STEPS, pattern=NM(2, 4), count="model", warmup=0)
    assert set(counts(model, 4)) == {2}
    assert sparsifier.stats.density == (weights / 2 + 12) / everything


class TestRefused:
    @pytest.mark.parametrize("method", REFUSES)
    def test_methods(self, method: str) -> None:
        model = Net()
        before = model.head.weight.detach().clone()
        with pytest.raises(ValueError, match=r"does not go with pattern=NM\(2, 4\): .*; these do: .*imp, .*topkast"):
            Sparsifier(model, 0.5, STEPS, METHODS[method], pattern=NM(2, 4))
        assert torch.equal(model.head.weight, before)

    def test_the_registry_says_so(self) -> None:
        takes = {entry.name for entry in spartan.methods() if not entry.refuses_nm}
        assert {"imp", "topkast", "spartan", "spartan-learned", "srste", "static", "acdc", "movement", "st3"} <= takes
        assert {"set", "rigl", "str"}.isdisjoint(takes)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sparsity": 0.9}, r"sparsity=0.9 with pattern=NM\(2, 4\), which keeps 2 of every 4; pass sparsity=0.5"),
            ({"budget": "erk"}, r"budget='erk' with pattern=NM\(2, 4\): every 4 weights have a budget of their own"),
            ({"budget": {"head.*": 0.5}}, "no layer can be sparser than another; leave the budget out"),
            ({"cost": Flops(torch.zeros(1, 8, 4, 4), value_power=0.5)}, "value_power=0.5 .* has nothing to weigh"),
            (
                {"count": "model"},
                r"sparsity=0.5 of all parameters, 0.514.* of the targets .*; pass sparsity=0.4859.* or",
            ),
            (
                {"pattern": NM(2, 3), "sparsity": 1 / 3},
                r"NM\(2, 3\) does not divide the 8 inputs .* of conv.weight; .*exclude=\['conv.weight'\]",
            ),
        ],
    )
    def test_settings(self, options: dict[str, Any], message: str) -> None:
        settings: dict[str, Any] = {"sparsity": 0.5, "total_steps": STEPS, "pattern": NM(2, 4)} | options
        with pytest.raises(ValueError, match=message):
            Sparsifier(Net(), **settings)

    def test_transposed_convolutions(self) -> None:
        with pytest.raises(ValueError, match=r"not for the transposed ones of weight; .*exclude=\['weight'\]"):
            make_problem(nn.ConvTranspose2d(8, 8, 2), 0.5, pattern=NM(2, 4))

    def test_depthwise_convolutions(self) -> None:
        with pytest.raises(ValueError, match="does not divide the 1 inputs"):
            make_problem(nn.Conv2d(8, 8, 3, groups=8), 0.5, pattern=NM(2, 4))

    @pytest.mark.parametrize(("n", "m"), [(0, 4), (4, 4), (5, 4), (-1, 4), (2.0, 4), (True, 4), ("2", "4")])
    def test_numbers(self, n: Any, m: Any) -> None:
        with pytest.raises(ValueError, match="NM: n=.*0 < n < m"):
            NM(n, m)
