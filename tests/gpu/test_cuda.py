"""The core on a CUDA device: the same results as on the CPU, and the loops people run there."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from spartan import Block, Sparsifier, hard_topk, prune, soft_topk
from spartan.methods import as_method
from tests.contract.cases import METHODS, Net, batch, begin
from tests.waiting import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 12


def train(model: nn.Module, optimizer: Any, steps: range, forward: Any = None) -> None:
    parameter, forward = next(model.parameters()), model if forward is None else forward
    for step in steps:
        x, y = (t.to(parameter.device) for t in batch(step))
        nn.functional.cross_entropy(forward(x.to(parameter.dtype)), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def build(
    device: str, method: Any, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> tuple[nn.Module, Any, Sparsifier]:
    torch.manual_seed(0)
    model = begin(Net().to(dtype), as_method(method), 0.7, **kwargs).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, Sparsifier(model, 0.7, STEPS, method, **kwargs).attach(optimizer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 1000, 3_000_001])
def test_operators_agree_with_the_cpu(dtype: torch.dtype, n: int) -> None:
    v = torch.randn(n, generator=torch.Generator().manual_seed(0)).abs().to(dtype)
    c = torch.randint(1, 9, (n,), generator=torch.Generator().manual_seed(1)).float()
    for costs in (None, c):
        k = 0.2 * (n if costs is None else float(costs.sum()))
        on_gpu = None if costs is None else costs.cuda()
        if costs is None:  # v / c rounds alike, but only without costs is the order bound to be the same
            assert torch.equal(hard_topk(v.cuda(), k).cpu(), hard_topk(v, k))
        for beta in (0.0, 1.0, 100.0, 1e6):
            m, info = soft_topk(v.cuda(), k, beta, on_gpu, return_info=True)
            assert abs(float((m.double() * (1.0 if on_gpu is None else on_gpu)).sum()) - k) <= 1e-6 * k
            assert info.residual <= 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pattern", [None, Block(2, 2)])
def test_training_agrees_with_the_cpu(method: str, pattern: Any) -> None:
    here, optimizer, a = build("cpu", METHODS[method], pattern=pattern)
    there, optimizer_there, b = build("cuda", METHODS[method], pattern=pattern)
    train(here, optimizer, range(STEPS))
    train(there, optimizer_there, range(STEPS))
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-7, atol=1e-9)
    for name, mask in a.masks().items():
        assert torch.equal(mask, b.masks()[name].cpu())


@pytest.mark.parametrize("method", METHODS)
def test_resume_is_bit_identical(method: str) -> None:
    model, optimizer, sparsifier = build("cuda", METHODS[method], torch.float32)
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
    train(model, optimizer, range(5, STEPS))
    file.seek(0)
    again, optimizer_again, sparsifier_again = build("cuda", METHODS[method], torch.float32)
    for part, state in zip(
        (again, optimizer_again, sparsifier_again), torch.load(file, weights_only=True), strict=True
    ):
        part.load_state_dict(state)
    train(again, optimizer_again, range(5, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    "kwargs", [{"fused": True}, {"foreach": True}, {"capturable": True}, {"fused": True, "capturable": True}]
)
@pytest.mark.parametrize("method", ["spartan", "topkast", "imp"])
def test_amp_with_a_scaler_and_every_kind_of_adam(method: str, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **kwargs)
    sparsifier = Sparsifier(model, 0.9, STEPS, method, warmup=0.0).attach(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(STEPS):
        x, y = (t.cuda() for t in batch(step))
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x.float()), y)
        scaler.scale(loss).backward()
        poison = step == 4
        if poison:
            grad = model.get_parameter("head.weight").grad
            assert grad is not None
            grad.fill_(float("inf"))
        before, taken = copy.deepcopy(dict(model.named_parameters())), sparsifier.stats.step
        if not kwargs.get("fused"):  # a fused step does the unscaling itself
            scaler.unscale_(optimizer)
            sparsifier.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert sparsifier.stats.step == taken + (not poison)
        if poison:
            assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert sparsifier.stats.cost == 23.0  # a tenth of 72 + 128 + 32 weights


def test_a_scaled_step_asks_the_scaler_before_the_update_and_not_the_device_after_it() -> None:
    """A fused step waits for nothing by itself: a look at the scaler's answer behind it would have the device run dry."""
    torch.manual_seed(0)
    model = Net().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sparsifier = Sparsifier(model, 0.9, 1000, warmup=0.0).attach(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    x, y = (t.cuda() for t in batch(0))

    def steps(n: int) -> None:
        for _ in range(n):
            scaler.scale(nn.functional.cross_entropy(model(x.float()), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    steps(6)  # kernels are compiled, graphs recorded
    with no_waiting():
        steps(20)
    assert sparsifier.stats.step == 26


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_a_model_compiled_by_inductor() -> None:
    model, optimizer, sparsifier = build("cuda", "spartan", torch.float32)
    train(model, optimizer, range(STEPS), torch.compile(model, fullgraph=True, mode="reduce-overhead"))
    eager, optimizer_eager, _ = build("cuda", "spartan", torch.float32)
    train(eager, optimizer_eager, range(STEPS))
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    sparsifier.finalize()
    assert sparsifier.stats.cost == 69.0


def test_moving_the_model_afterwards_raises() -> None:
    model, optimizer, _ = build("cpu", "spartan")
    model.cuda()
    with pytest.raises(RuntimeError, match="was moved, cast or replaced"):
        optimizer.step()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("budget", ["global", "uniform", "erk"])
def test_pruning_at_once_is_the_same_on_a_gpu(budget: str, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 16, 3), nn.Conv2d(16, 8, 1)).to(memory_format=memory_format)  # type: ignore[call-overload]
    there = copy.deepcopy(here).cuda()
    for a, b in zip(
        prune(here, 0.8, budget=budget).parameters(), prune(there, 0.8, budget=budget).parameters(), strict=True
    ):
        assert torch.equal(a, b.cpu())
