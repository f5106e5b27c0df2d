"""Mixed and low precision: loss scaling, skipped steps, fused optimizers, autocast, half-precision parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from spartan import Sparsifier, Spartan
from tests.training import (
    KEPT,
    METHODS,
    WEIGHTS,
    exactly_sparse,
    gradients_for_w,
    loss_of,
    net,
    same,
    thetas,
    values,
    vjp,
)

each_method = pytest.mark.parametrize("method", METHODS)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: AdamW(ps, lr=0.01),
    "fused sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "fused adam": lambda ps: Adam(ps, lr=0.01, fused=True),
    "fused adamw": lambda ps: AdamW(ps, lr=0.01, fused=True),
}


def start(method: Any, optimizer: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Optimizer, Sparsifier, Any]:
    model = net(dtype=dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    # A growth interval out of reach, so that only skipped steps change the scale.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    return model, opt, Sparsifier(model, 0.75, 20, method).attach(opt), scaler


def scaled_step(run: Any, step: int, *, explicit: bool = False, spoil: int | None = None, clip: float = 0.0) -> None:
    """One step with a loss scaler; `spoil` is the layer whose gradient overflows."""
    model, optimizer, sparsifier, scaler = run
    scaler.scale(loss_of(model, step, dtype=torch.float32)).backward()
    if spoil is not None:
        model[spoil].weight.grad[0, 0] = float("inf")
    if explicit:
        scaler.unscale_(optimizer)
        sparsifier.backward()
    if clip:
        clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()


@each_method
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("explicit", [False, True])
def test_scaled_training_equals_plain_training(method: str, kind: str, explicit: bool) -> None:
    """A power of two scales exactly in float32 (no gradient of the mask underflows here)."""
    run, plain = start(method, kind), start(method, kind)
    for step in range(10):
        scaled_step(run, step, explicit=explicit)
        run[1].zero_grad()
        loss_of(plain[0], step, dtype=torch.float32).backward()
        plain[1].step()
        plain[1].zero_grad()
    for name, w in values(run[0]).items():
        torch.testing.assert_close(w, values(plain[0])[name], rtol=1e-4, atol=1e-6)
    assert run[2].stats.step == 10
    assert exactly_sparse(run[2])


@each_method
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("begin", [2, 8, 17])
def test_a_skipped_step_advances_nothing(method: str, kind: str, explicit: bool, set_to_none: bool, begin: int) -> None:
    """A run with two skipped steps goes on as one without them."""
    run, twin = start(method, kind), start(method, kind)
    for step in range(begin):
        for each in (run, twin):
            scaled_step(each, step, explicit=explicit)
            each[1].zero_grad(set_to_none=set_to_none)
    before, theta, stats = values(run[0]), thetas(run[2]), run[2].stats
    for _ in range(2):
        scaled_step(run, begin, explicit=explicit, spoil=2, clip=1.0 if explicit else 0.0)
        assert same(values(run[0]), before)
        assert same(thetas(run[2]), theta)
        assert run[2].stats == stats
        run[1].zero_grad(set_to_none=set_to_none)
    assert run[3].get_scale() == 2.0**8
    twin[3].update(2.0**8)
    for each in (run, twin):
        for step in range(begin, begin + 2):
            scaled_step(each, step, explicit=explicit)
            each[1].zero_grad(set_to_none=set_to_none)
    assert same(values(run[0]), values(twin[0]))
    assert run[2].stats.step == begin + 2


@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
def test_a_skipped_step_does_not_move_a_cached_dual(kind: str) -> None:
    """Solving anew from the last dual would give other weights."""
    run = start(Spartan(solver="sinkhorn", init="cached"), kind)
    for step in range(6):
        scaled_step(run, step)
        run[1].zero_grad()
    before, stats = values(run[0]), run[2].stats
    scaled_step(run, 6, spoil=2)
    assert run[2].stats == stats
    assert same(values(run[0]), before)


@each_method
@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
def test_unscale_backward_clip_step(method: str, kind: str) -> None:
    """Clipping sees the unscaled gradient for θ, and what it leaves is what θ moves by."""
    model, optimizer, sparsifier, scaler = run = start(method, kind)
    for step in range(6):
        scaled_step(run, step)
        optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    before = thetas(sparsifier)
    loss = loss_of(model, 6, dtype=torch.float32)
    targets = {name: p for name, p in model.named_parameters() if name in WEIGHTS}
    expected = vjp(sparsifier, gradients_for_w(model, loss))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(list(targets.values()), 0.01)
    by_hand = torch.stack([g.norm() for g in expected.values()]).norm()
    torch.testing.assert_close(norm, by_hand, rtol=1e-4, atol=1e-7)
    scaler.step(optimizer)
    scaler.update()
    for name, theta in thetas(sparsifier).items():
        moved = 0.1 * expected[name] * (0.01 / by_hand)
        torch.testing.assert_close(before[name] - theta, moved, rtol=1e-3, atol=1e-6)


@each_method
@pytest.mark.parametrize("kind", ["sgd", "fused sgd"])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("begin", [3, 17])
def test_overflow_in_one_of_two_optimizers(method: str, kind: str, explicit: bool, begin: int) -> None:
    """The scaler skips an optimizer by its own gradients: the other one must not be spoilt through the shared budget."""
    model = net(dtype=torch.float32)
    a = OPTIMIZERS[kind](model[0].parameters())
    b = OPTIMIZERS[kind]([*model[2].parameters(), *model[4].parameters()])
    sparsifier = Sparsifier(model, 0.75, 20, method).attach(a, b)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(begin + 3):
        scaler.scale(loss_of(model, step, dtype=torch.float32)).backward()
        if step == begin:
            assert model[0].weight.grad is not None
            kept = sparsifier.masks()["0.weight"].nonzero()[0].tolist()
            model[0].weight.grad[kept[0], kept[1]] = float("inf")
            before = values(model[0])
        if explicit:
            scaler.unscale_(a)
            scaler.unscale_(b)
            sparsifier.backward()
        scaler.step(a)
        scaler.step(b)
        scaler.update()
        a.zero_grad()
        b.zero_grad()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert all(torch.isfinite(v).all() for o in (a, b) for s in o.state.values() for v in s.values())
        if step == begin:
            assert torch.equal(model[0].bias, before["bias"])
        assert exactly_sparse(sparsifier)


@each_method
def test_fused_step_under_a_scheduler_and_a_scaler(method: str) -> None:
    """GradScaler reads the signature of the step that a scheduler and the sparsifier have wrapped in turn."""
    for before in (True, False):
        model = net(dtype=torch.float32)
        optimizer = OPTIMIZERS["fused adamw"](model.parameters())
        sparsifier = Sparsifier(model, 0.75, 20, method)
        if not before:
            sparsifier.attach(optimizer)
        rates = lr_scheduler.StepLR(optimizer, 5)
        if before:
            sparsifier.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(6):
            scaled_step((model, optimizer, sparsifier, scaler), step)
            optimizer.zero_grad()
            rates.step()
        assert sparsifier.stats.step == 6
        assert exactly_sparse(sparsifier)


# ---------------------------------------------------------------------- autocast and half-precision parameters


@each_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_theta_in_full_precision(method: str, dtype: torch.dtype) -> None:
    model, optimizer, sparsifier, scaler = start(method, "sgd")
    for step in range(20):
        with torch.autocast("cpu", dtype=dtype):
            assert model(torch.zeros(1, 6)).dtype == dtype
            loss = loss_of(model, step, dtype=torch.float32)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert exactly_sparse(sparsifier)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())
    sparsifier.finalize()
    assert nonzero(model) == KEPT


def nonzero(model: torch.nn.Module) -> int:
    return sum(int((p != 0).sum()) for name, p in model.named_parameters() if name in WEIGHTS)


@each_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_half_precision_parameters(method: str, dtype: torch.dtype, kind: str) -> None:
    model = net(dtype=dtype)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "adamw":
        optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-4)
    sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
    first = loss_of(model, 0, dtype=dtype).item()
    for step in range(20):
        loss_of(model, step % 2, dtype=dtype).backward()
        sparsifier.backward()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        masks = sparsifier.masks()
        assert sum(int(mask.sum()) for mask in masks.values()) == int(sparsifier.stats.target_cost + 1e-6)
        held: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters() if n in WEIGHTS}
        assert all(not w[~masks[n]].any() and not torch.signbit(w)[~masks[n]].any() for n, w in held.items())
        assert all(torch.isfinite(w).all() and w.dtype == dtype for w in held.values())
        assert all(theta.dtype == dtype for theta in thetas(sparsifier).values())
    assert loss_of(model, 0, dtype=dtype).item() < first
    sparsifier.finalize()
    assert nonzero(model) == KEPT


@each_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_of_half_precision_weights_meet_the_budget(method: str, dtype: torch.dtype) -> None:
    model = net(dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 8).round() / 8 + 0.125)  # a handful of values, none zero in most places
    optimizer = SGD(model.parameters(), lr=0.125)
    sparsifier = Sparsifier(model, 0.75, 10, method, warmup=0).attach(optimizer)
    for step in range(10):
        assert sum(layer.kept for layer in sparsifier.layers()) == KEPT
        loss_of(model, step, dtype=dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sum(layer.kept for layer in sparsifier.layers()) == KEPT
