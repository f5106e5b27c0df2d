"""30 steps of ProbMask follow the paper's equations, written here in a straight line with autograd."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import spartan
from spartan import Block, Flops, Sparsifier, Unstructured
from spartan.methods.probmask import ProbMask
from spartan.problem.schedules import Moment, linear
from tests.contract.algorithm_3 import POSITIONS, spread
from tests.contract.cases import Net, batch
from tests.methods.test_movement import top_k

T, W, FREEZE = 30, 16, 24  # steps, warm-up, first step of finetuning
HOLD, TAU = 0.25, 0.2
SPARSITY, LR, SCORE_LR, MOMENTUM, DECAY = 0.8, 0.1, 0.1, 0.9, 1e-2


def budget(t: int) -> float:
    """What is kept of 1: everything at first, then a cubic down to the end of the warm-up."""
    start = HOLD * W
    x = min(max((t - start) / (W - start), 0.0), 1.0)
    return 1.0 - SPARSITY + SPARSITY * (1.0 - x) ** 3


def nearest(s: dict[str, Tensor], c: dict[str, float], k: float) -> dict[str, Tensor]:
    """The Euclidean projection onto {0 ≤ s ≤ 1, Σ c·s ≤ k}: bisection for the multiplier."""

    def at(v: float) -> dict[str, Tensor]:
        return {n: (x - v * c[n]).clamp(0, 1) for n, x in s.items()}

    def cost(v: float) -> float:
        return sum(c[n] * float(x.sum()) for n, x in at(v).items())

    low, high = 0.0, 100.0
    if cost(0.0) <= k:
        return at(0.0)
    for _ in range(200):
        mid = 0.5 * (low + high)
        low, high = (mid, high) if cost(mid) > k else (low, mid)
    return at(high)


def reference(
    model: nn.Module, side: int, cost: dict[str, float], noise: list[list[list[Tensor]]], clip: float
) -> list[list[dict[str, Tensor]]]:
    """w in every pass of every step, from 0 to T.

    noise holds the uniform numbers of every step and pass, one tensor per target.
    """
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    momentum = {n: torch.zeros_like(p) for n, p in theta.items()}
    s = {n: torch.ones(theta[n].numel() // side**2, dtype=torch.float64) for n in POSITIONS}
    mean, square = ({n: torch.zeros_like(x) for n, x in s.items()} for _ in range(2))
    c = {n: cost[n] * side**2 for n in POSITIONS}
    total = sum(c[n] * s[n].numel() for n in POSITIONS)
    history, fixed, clipped = [], None, 0
    for t in range(T + 1):
        progress = min(1.0, t / FREEZE)
        if fixed is None:
            s = nearest(s, c, total * budget(t))
        if t == FREEZE:
            keep = top_k(s, total * budget(t), c)
            fixed = {n: spread(keep[n], theta[n], side) for n in POSITIONS}
        leaves = {n: x.detach().requires_grad_() for n, x in theta.items()}
        p = {n: x.detach().requires_grad_() for n, x in s.items()}
        seen, loss = [], torch.zeros((), dtype=torch.float64)
        passes = noise[t] if fixed is None else noise[t][:1]
        for uniform in passes:
            mask = fixed
            if mask is None:
                mask = {}
                for n, u in zip(POSITIONS, uniform, strict=True):
                    # ε as the authors have it; logit(u) is the difference of two Gumbel variables
                    logit = torch.log(p[n] + 1e-20) - torch.log(1 - p[n] + 1e-20)
                    xi = torch.log(u.double()) - torch.log1p(-u.double())
                    m = torch.sigmoid((logit + xi) / (1 + (TAU - 1) * progress))
                    # By that ε a certain unit stays certain, but for a sample of ten thousand, whose slope would be 10⁵.
                    m = torch.where((p[n] > 0) & (p[n] < 1), m, p[n].detach())
                    mask[n] = spread(m, theta[n], side)
            w = {n: x * mask[n] if n in mask else x for n, x in leaves.items()}
            seen.append({n: w[n].detach().clone() for n in POSITIONS})
            x, y = batch(t)
            loss = loss + nn.functional.cross_entropy(functional_call(model, {**w, **buffers}, (x,)), y) / len(passes)
        history.append(seen)
        found = torch.autograd.grad(loss, [*leaves.values(), *p.values()], allow_unused=True)
        norm = math.sqrt(sum(float(g.square().sum()) for g in found if g is not None))
        clipped += norm > clip
        grads = [None if g is None else g * min(1.0, clip / (norm + 1e-6)) for g in found]
        if fixed is None:
            rate = SCORE_LR * 0.5 * (1 + math.cos(math.pi * min(1.0, (t + 1) / FREEZE)))
            for n, g in zip(p, grads[len(leaves) :], strict=True):
                assert g is not None
                mean[n] = 0.9 * mean[n] + 0.1 * g
                square[n] = 0.999 * square[n] + 0.001 * g * g
                m_hat, v_hat = mean[n] / (1 - 0.9 ** (t + 1)), square[n] / (1 - 0.999 ** (t + 1))
                s[n] = s[n] - rate * m_hat / (v_hat.sqrt() + 1e-8)
        for (n, value), g in zip(theta.items(), grads, strict=False):
            momentum[n] = MOMENTUM * momentum[n] + g + DECAY * value
            theta[n] = value - LR * momentum[n]
    assert (clipped > 10) == (clip < 3), "the clipping has something to do"
    return history


@pytest.mark.parametrize(
    ("side", "cost", "samples", "clip"),
    [
        pytest.param(1, None, 2, 3.0, id="unstructured"),
        pytest.param(2, None, 2, 3.0, id="block"),
        pytest.param(1, Flops, 2, 3.0, id="flops"),
        pytest.param(2, Flops, 2, 3.0, id="block-flops"),
        pytest.param(1, None, 1, 3.0, id="one-sample"),
        pytest.param(1, None, 3, 0.3, id="three-clipped"),
        pytest.param(2, Flops, 2, 0.3, id="block-clipped"),
    ],
)
def test_thirty_steps(side: int, cost: Any, samples: int, clip: float) -> None:
    torch.manual_seed(0)
    model = Net().double()
    start = copy.deepcopy(model)
    sparsifier = Sparsifier(
        model,
        SPARSITY,
        T,
        ProbMask(samples=samples, clip=clip, score_lr=SCORE_LR, temperature=linear(1, TAU), hold=HOLD),
        pattern=Unstructured() if side == 1 else Block(side, side),
        cost=Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64)) if cost else None,
        warmup=W / T,
        finetune=1 - FREEZE / T,
    )
    (solver,) = sparsifier._run.weights.solving
    seed, sizes = sparsifier._run.at.seed, solver.problem.units
    seeds = [seed, *(hash((seed, number)) % (1 << 31) for number in range(1, samples))]
    noise = [[list(solver.random(Moment(t, T, W, FREEZE, of)).split(sizes)) for of in seeds] for t in range(T + 1)]
    expected = reference(start, side, POSITIONS if cost else dict.fromkeys(POSITIONS, 1.0), noise, clip)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    sparsifier.attach(optimizer)
    for t in range(T + 1):
        if t < FREEZE:
            each = solver.state.per_unit["s"].split(sizes)
            expected_cost = sum(c * float(s.sum()) for s, c in zip(each, solver.problem.unit_costs, strict=True))
            assert expected_cost <= solver.k[0] * (1 + 1e-12)
        x, y = batch(t)
        for weights, share in zip(expected[t], spartan.passes(sparsifier), strict=True):
            for name, w in weights.items():
                got = model.get_parameter(name).detach()
                torch.testing.assert_close(got, w, rtol=0, atol=1e-9, msg=f"step {t}, {name}")
                if t >= FREEZE:
                    assert not got[~sparsifier.masks()[name]].any()
            (nn.functional.cross_entropy(model(x), y) * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()


def test_without_further_passes_a_step_has_one_sample() -> None:
    """In a loop that knows of none, micro-batches share it."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    Sparsifier(model, SPARSITY, T, ProbMask(), warmup=0.0).attach(optimizer)
    for t in range(3):
        held = []
        for _ in range(2):
            held.append(model.hidden.weight.detach().clone())
            x, y = batch(t)
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(*held)
        assert not torch.equal(held[0], model.hidden.weight)


def clipped_run(scale: float | None = None, fused: bool = False, own_clip: float | None = None) -> list[Tensor]:
    """s, its mean gradient and a weight in some steps; with a loss scaler, which a fused optimizer unscales for."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=fused)
    sparsifier = Sparsifier(model, SPARSITY, T, ProbMask(clip=0.3), warmup=0.0).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    found = []
    for t in range(8):
        x, y = batch(t)
        for share in spartan.passes(sparsifier):
            scaler.scale(share * nn.functional.cross_entropy(model(x.float()), y)).backward()
        if own_clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), own_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state = sparsifier._run.weights.solving[0].state.per_unit
        assert "grad" not in state
        assert "more" not in state
        found += [state["s"].clone(), state["mean"].clone(), model.hidden.weight.detach().clone()]
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_the_joint_norm_is_that_of_unscaled_gradients(fused: bool) -> None:
    """The probabilities' gradient is none of the optimizer's, so that a loss scaler cannot unscale it."""
    for plain, scaled in zip(clipped_run(), clipped_run(1024.0, fused), strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-5, atol=1e-7)


def test_clipping_of_the_users_reaches_the_probabilities() -> None:
    """By the same factor: then both are within the joint norm."""
    loose, tight = clipped_run(), clipped_run(own_clip=1e-3)
    assert float(tight[1].norm()) < 0.02 * float(loose[1].norm())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_masks_are_not_drawn_anew_for_gradients_that_still_belong_to_the_last() -> None:
    """As with DDP's no_sync, or gradients that are to be differentiated: they are turned in the step."""
    torch.manual_seed(0)
    model = Net().double()
    sparsifier = Sparsifier(model, SPARSITY, T, ProbMask(), warmup=0.0)
    sparsifier.attach(torch.optim.SGD(model.parameters(), lr=LR))
    x, y = batch(0)
    passes = spartan.passes(sparsifier)
    (next(passes) * nn.functional.cross_entropy(model(x), y)).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"passes\(\): the gradients of the last pass are still those for w"):
        next(passes)
    passes = spartan.passes(sparsifier)
    next(passes)
    sparsifier.backward()  # whoever knows that they are complete says so
    assert next(passes) == 0.5


def test_a_gradient_that_is_no_number_is_named_as_before() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    Sparsifier(model, SPARSITY, T, ProbMask(), warmup=0.0).attach(optimizer)
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    model.hidden.weight.grad[0, 0] = math.nan  # type: ignore[index]
    with pytest.raises(RuntimeError, match="the gradient of hidden.weight holds NaN"):
        optimizer.step()


def test_a_step_that_was_skipped_leaves_no_gradient_behind() -> None:
    """As where a loss scaler found infinite gradients: the next step's must not be added to those."""
    models = []
    for skip in (False, True):
        torch.manual_seed(0)
        model = Net().double()
        model.norm.eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        sparsifier = Sparsifier(model, SPARSITY, T, ProbMask(), warmup=0.0).attach(optimizer)
        if skip:
            for share in spartan.passes(sparsifier):
                (share * nn.functional.cross_entropy(model(batch(9)[0]), batch(9)[1])).backward()
            optimizer.zero_grad()
            with sparsifier.dense_weights():  # draws the first sample of this step again, and learns nothing
                pass
        x, y = batch(0)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        models.append(sparsifier._run.weights.solving[0].state.per_unit["s"])
    torch.testing.assert_close(*models)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("costs", [(1.0,), (3.0, 0.5)])
@pytest.mark.parametrize("kind", ["ones", "uniform", "nearly binary", "skewed", "wild", "zero", "inside"])
def test_the_projection_is_exact(kind: str, costs: tuple[float, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 5000
    s = {
        "ones": lambda: torch.ones(n),
        "uniform": lambda: torch.rand(n),
        "nearly binary": lambda: (torch.rand(n) < 0.3).float() + 0.05 * torch.randn(n),
        "skewed": lambda: torch.exp(-30 * torch.rand(n)),
        "wild": lambda: 10 * torch.randn(n),
        "zero": lambda: torch.zeros(n),
        "inside": lambda: 0.01 * torch.rand(n),
    }[kind]().to(dtype)
    model = nn.Sequential(*[nn.Linear(n // len(costs) // 50, 50, bias=False) for _ in costs])
    price = {f"{i}.weight": c for i, c in enumerate(costs)}
    sparsifier = Sparsifier(model, 0.9, 10, ProbMask(), cost=price, warmup=0.0, include=list(price))
    (solver,) = sparsifier._run.weights.solving
    parts, (k,) = list(s.split(n // len(costs))), solver.k
    got = solver.within_budget(s).split(n // len(costs))
    want = nearest({str(i): x.double() for i, x in enumerate(parts)}, {str(i): c for i, c in enumerate(costs)}, k)
    spent = sum(c * float(x.sum(dtype=torch.float64)) for c, x in zip(costs, got, strict=True))
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    assert spent <= k * (1 + exact)
    for i, x in enumerate(got):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), want[str(i)], rtol=0, atol=exact)


def trained(method: ProbMask, steps: int, **kwargs: Any) -> tuple[nn.Linear, Sparsifier, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(20, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.8, 100, method, **kwargs).attach(optimizer)
    for _ in range(steps):
        model(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, sparsifier, optimizer


def test_the_budget_holds_then_falls_as_a_cubic() -> None:
    ramp = ProbMask().ramp
    for epoch, want in ((0, 0.0), (47, 0.0), (114, 1 - 0.5**3), (180, 1.0), (300, 1.0)):
        assert ramp.at(min(1.0, epoch / 180)) == pytest.approx(want, abs=1e-12)
    assert ProbMask(hold=0.0).ramp.at(0.5) == pytest.approx(1 - 0.5**3)


def test_the_model_is_dense_while_the_budget_is_whole_and_soft_until_finetuning() -> None:
    model, sparsifier, _ = trained(ProbMask(), 14)
    assert sparsifier.stats.density == 1.0
    assert (model.weight != 0).all()
    model, sparsifier, _ = trained(ProbMask(), 90)
    assert sparsifier.stats.density == pytest.approx(0.2)
    assert (model.weight != 0).double().mean() > 0.2
    model, sparsifier, _ = trained(ProbMask(), 100)
    assert int((model.weight != 0).sum()) == 200
    assert sparsifier.stats.phase == "finetune"


def test_the_samples_sharpen() -> None:
    """At a high temperature a mask is near its mean, at a low one near 0 or 1."""
    for tau, near in ((100.0, 0.0), (0.001, 1.0)):
        _, sparsifier, _ = trained(ProbMask(score_lr=0.0, temperature=tau), 40)
        m = sparsifier._run.weights.solving[0].state.per_unit["m"]
        assert ((m < 0.1) | (m > 0.9)).double().mean() == pytest.approx(near, abs=0.02)
        assert sparsifier.stats.beta == pytest.approx(1 / tau)


def test_a_hard_sample_has_the_budget_on_average() -> None:
    _, sparsifier, _ = trained(ProbMask(score_lr=0.0, temperature=1e-4), 60)
    assert sparsifier._run.weights.solving[0].state.per_unit["m"].mean().item() == pytest.approx(0.2, abs=0.05)


def test_probabilities_of_zero_leave_the_choice_to_the_magnitudes() -> None:
    _, sparsifier, _ = trained(ProbMask(), 0, warmup=0.0)
    (solver,) = sparsifier._run.weights.solving
    solver.state.per_unit["s"] = torch.zeros(1000)
    solver.state.per_unit["s"][:7] = 0.5
    keep = sparsifier.method.keep(solver, sparsifier._run.at)
    rest = solver.theta.views[0].reshape(-1).abs().clone()
    assert keep[:7].all()
    assert int(keep.sum()) == 200
    assert rest[7:][keep[7:]].min() >= rest[7:][~keep[7:]].max()


def test_a_second_look_changes_nothing() -> None:
    """`choose` runs again after `dense_weights()`; the probabilities must not learn twice from one gradient."""
    model, sparsifier, _ = trained(ProbMask(), 40)
    state = sparsifier._run.weights.solving[0].state
    before, s = model.weight.clone(), state.per_unit["s"].clone()
    with sparsifier.dense_weights():
        pass
    torch.testing.assert_close(state.per_unit["s"], s, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.weight, before, rtol=1e-3, atol=1e-5)


def test_short_runs_take_longer_strides() -> None:
    for steps, want in ((1_000_000, 0.006), (58_800, 0.006), (5880, 0.06), (100, 0.2)):
        assert ProbMask().score_lr_at(Moment(0, steps + 1, 0, steps)) == pytest.approx(want)
    for step, want in ((0, 0.01), (500, 0.005), (1000, 0.0), (1100, 0.0)):
        assert ProbMask(score_lr=0.01).score_lr_at(Moment(step, 1200, 0, 1000)) == pytest.approx(want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_lr": -1.0}, "ProbMask: score_lr=-1.0"),
        ({"score_lr": math.nan}, "ProbMask: score_lr=nan"),
        ({"temperature": 0.0}, "ProbMask: temperature=0.0"),
        ({"temperature": linear(1, -1)}, "ProbMask: temperature=linear"),
        ({"hold": 1.0}, "ProbMask: hold=1.0"),
        ({"samples": 0}, "ProbMask: samples=0"),
        ({"samples": 1.5}, "ProbMask: samples=1.5"),
        ({"clip": 0.0}, "ProbMask: clip=0.0"),
        ({"clip": math.inf}, "ProbMask: clip=inf"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProbMask(**settings)
