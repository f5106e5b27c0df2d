"""Whole runs with the kernels of N:M against the same runs in plain torch; checkpoints from one to the other."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import IMP, NM, Sparsifier, Spartan, TopKAST, constant, linear
from spartan.methods.base import Method
from spartan.methods.feather import Feather
from spartan.methods.srste import SRSTE
from spartan.methods.st3 import ST3
from tests.contract.kinds import Hurried
from tests.solvers.triton import DEVICE
from tests.waiting import check_no_step_waits

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)

METHODS: dict[str, Method] = {
    "spartan": Spartan(beta=linear(1, 50)),
    "spartan-hard": Spartan(beta=constant(float("inf"))),
    "spartan-soft": Spartan(project=False),
    "topkast": TopKAST(),
    "topkast-b": TopKAST(backward_sparsity=0.25, exploration=1e-2),
    "imp": IMP(),
    "srste": SRSTE(),
    "st3": ST3(),
    "paced": Hurried(),
    "feather": Feather(),
}
STEPS = 6  # two of warm-up, two with all that is to go gone, two with the mask fixed


def build(kernels: str, method: Method, channels_last: bool = False, **options: Any) -> tuple[Any, Any, Sparsifier]:
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 16, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)
    order = torch.channels_last if channels_last else torch.preserve_format
    model = nn.Sequential(*layers).to(DEVICE).to(memory_format=order)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    defaults = {"sparsity": 0.5, "warmup": 0.34, "finetune": 0.34, "pattern": NM(2, 4)}
    settings: dict[str, Any] = {**defaults, **options}
    sparsifier = Sparsifier(model, total_steps=STEPS, method=method, kernels=kernels, **settings)
    return model, optimizer, sparsifier.attach(optimizer)


def train(model: Any, optimizer: Any, steps: range, skip: int | None = None) -> list[float]:
    losses = []
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 8, 3, 3, generator=rng), torch.randint(16, (16,), generator=rng)
        out = model(x.to(DEVICE)) if step != skip else model[3:](x.flatten(1)[:, :64].to(DEVICE))
        loss = nn.functional.cross_entropy(out, y.to(DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(method: Method, skip: int | None = None, **options: Any) -> str:
    """The run in plain torch and by the kernels; tells what did the latter at first."""
    plain, optimizer, of_plain = build("torch", method, **options)
    losses = train(plain, optimizer, range(STEPS), skip)
    fast, optimizer, of_fast = build("triton", method, **options)
    path = repr(of_fast)
    assert train(fast, optimizer, range(STEPS), skip) == pytest.approx(losses, rel=1e-5)
    for (key, mask), other in zip(of_plain.masks().items(), of_fast.masks().values(), strict=True):
        assert torch.equal(mask, other), key
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert torch.equal(a == 0, b == 0)
    assert of_fast.stats == of_plain.stats
    return path


@pytest.mark.parametrize("name", list(METHODS))
def test_a_run_is_the_same(name: str) -> None:
    assert "by triton\n" in same(METHODS[name], skip=3)


@pytest.mark.parametrize("options", [{"channels_last": True}, {"budget": "uniform"}, {"cost": {"0.*": 3.0, "*": 1.0}}])
def test_a_run_with(options: dict[str, Any]) -> None:
    assert "by triton\n" in same(METHODS["spartan"], **options)


@pytest.mark.parametrize("name", ["spartan", "imp"])
@pytest.mark.parametrize("stop", [3, 5])
def test_through_a_checkpoint(name: str, stop: int) -> None:
    """The same bits in the kernels that it comes from; in the other path the same up to rounding."""
    for kernels in ("triton", "torch"):
        model, optimizer, sparsifier = build(kernels, METHODS[name])
        train(model, optimizer, range(stop))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
        train(model, optimizer, range(stop, STEPS))
        for other in ("triton", "torch"):
            again = build(other, METHODS[name])
            file.seek(0)
            for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
                part.load_state_dict(state)
            train(again[0], again[1], range(stop, STEPS))
            for a, b in zip(model.parameters(), again[0].parameters(), strict=True):
                if other == kernels:
                    assert torch.equal(a, b)
                else:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_what_is_saved_is_what_plain_torch_saves() -> None:
    """n and β: the masks of every few weights follow from θ."""
    states = []
    for kernels in ("triton", "torch"):
        model, optimizer, sparsifier = build(kernels, METHODS["spartan"])
        train(model, optimizer, range(3))
        states.append(sparsifier.state_dict()["segments"])
    assert states[0] == states[1]
    assert states[0][0]["a"]["n"] == 2
    assert states[0][0]["dual"]["beta"] > 1


@pytest.mark.parametrize("method", [IMP(), Spartan()], ids=lambda m: m.name)
def test_a_step_that_fails_is_taken_back(method: Method) -> None:
    """Within a step that calls its closure several times: θ and masks are what they were before."""
    model, _, sparsifier = build("triton", method, warmup=0.0)
    sparsifier.detach()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    sparsifier.attach(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 8, 3, 3, device=DEVICE)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert calls == 3
    for p, old in zip(model.parameters(), before, strict=True):
        if p.ndim > 1:
            assert torch.equal(p, old)
    assert all(int(mask.sum()) * 2 == mask.numel() for mask in sparsifier.masks().values())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="on a CPU nothing runs beside the host")
@pytest.mark.parametrize("name", ["spartan", "topkast", "imp"])
def test_no_step_waits_for_the_device(name: str) -> None:
    model, optimizer, _ = build("auto", METHODS[name], warmup=0.0, finetune=0.0)
    x, y = torch.randn(16, 8, 3, 3, device=DEVICE), torch.randint(16, (16,), device=DEVICE)
    check_no_step_waits(model, optimizer, x, y)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter runs one program after the other")
def test_two_runs_give_the_same_bits() -> None:
    found = []
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        for _ in range(2):
            model, optimizer, _ = build("triton", METHODS["spartan"])
            train(model, optimizer, range(STEPS))
            found.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
