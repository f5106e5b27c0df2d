"""Whole runs with kernels against the same runs in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import IMP, NM, Block, Channel, Flops, Sparsifier, Spartan, TopKAST, Unstructured, constant, linear
from spartan.methods.acdc import ACDC
from spartan.methods.base import Method
from spartan.methods.feather import Feather
from spartan.methods.movement import Movement
from spartan.methods.optg import OptG
from spartan.methods.rigl import RigL
from spartan.methods.set import SET
from spartan.methods.soft_threshold import STR
from spartan.methods.spartan_learned import SpartanLearned
from spartan.methods.srste import SRSTE
from spartan.methods.st3 import ST3
from spartan.methods.static import Static
from spartan.methods.svite import SViTE
from spartan.problem.patterns import Pattern
from spartan.solvers.triton.frozen import FrozenTritonSolver
from tests.contract.kinds import Hurried
from tests.solvers.triton import DEVICE
from tests.waiting import check_no_step_waits

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)


def net(dtype: torch.dtype = torch.float32, channels_last: bool = False, odd: bool = False) -> nn.Sequential:
    """Weights of 16×16, 32×64 and 16×32, for blocks, or numbers that nothing divides; the convolution's kernel is 2×2."""
    torch.manual_seed(0)
    n, last = (31, 17) if odd else (32, 16)
    layers = nn.Conv2d(4, 16, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, n), nn.ReLU(), nn.Linear(n, last)
    order = torch.channels_last if channels_last else torch.preserve_format
    return nn.Sequential(*layers).to(DEVICE, dtype).to(memory_format=order)  # type: ignore[call-overload]


NET = {"dtype": torch.float32, "channels_last": False, "odd": False}


def run(
    kernels: str, method: Method | str, steps: int = 6, skip: int | None = None, **options: Any
) -> tuple[Any, Any, Any]:
    """Two steps of warm-up, two with all that is to go gone, two with the mask fixed."""
    model = net(*(options.pop(key, default) for key, default in NET.items()))
    dtype = next(model.parameters()).dtype
    if options.pop("flops", False):
        options["cost"] = Flops(torch.zeros(1, 4, 3, 3, device=DEVICE, dtype=dtype), value_power=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    defaults = {"sparsity": 0.8, "total_steps": 6, "warmup": 0.34, "finetune": 0.34, "method": method}
    settings: dict[str, Any] = {**defaults, **options}
    sparsifier = Sparsifier(model, kernels=kernels, **settings).attach(optimizer)
    rng = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x = torch.randn(16, 4, 3, 3, generator=rng).to(DEVICE, dtype)
        y = torch.randint(16, (16,), generator=rng).to(DEVICE)
        # One layer that the loss does not reach, now and then.
        out = model(x) if step != skip else model[3:](torch.randn(16, 64, generator=rng).to(DEVICE, dtype))
        loss = nn.functional.cross_entropy(out.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, sparsifier, losses


def same(method: Method, **options: Any) -> Sparsifier:
    """The run in plain torch and by the kernels; returns the latter."""
    plain, of_plain, losses = run("torch", method, **options)
    fast, of_fast, fast_losses = run("triton", method, **options)
    assert fast_losses == pytest.approx(losses, rel=1e-5)
    for (key, mask), other in zip(of_plain.masks().items(), of_fast.masks().values(), strict=True):
        assert torch.equal(mask, other), key
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert torch.equal(a == 0, b == 0)
    assert of_fast.stats.density == of_plain.stats.density
    if of_plain.stats.mu is not None:
        assert of_fast.stats.mu == pytest.approx(of_plain.stats.mu, rel=1e-3, abs=1e-4)
    return of_fast


METHODS = {
    "spartan": Spartan(beta=linear(1, 50)),
    "spartan-hard": Spartan(beta=constant(float("inf"))),
    "spartan-soft": Spartan(project=False),
    "spartan-sinkhorn": Spartan(solver="sinkhorn", init="cached"),
    "topkast": TopKAST(),
    "topkast-b": TopKAST(backward_sparsity=0.1, exploration=1e-2),
    "imp": IMP(),
    "movement": Movement(),
    "optg": OptG(epochs=4, steepness=2),
    "paced": Hurried(),
    "feather": Feather(),
    "feather-2": Feather(p=2.5, pruned_gradient=0.25),
    "st3": ST3(),
    "st3-plain": ST3(rescale=False),
    "srste": SRSTE(),
    "topkast-every": TopKAST(backward_sparsity=0.1, exploration=1e-2, every=2),
    "spartan-learned": SpartanLearned(beta=linear(1, 5)),
    "acdc": ACDC(first_dense=0.2, phase=0.17, last_dense=0.17),
    "rigl": RigL(every=2),
    "set": SET(every=2),
    "svite": SViTE(every=2),
    "static": Static(),
    "str": STR(init=-2.0),
    "st3-sigma": ST3(sigma=True),
}


@pytest.mark.parametrize("name", list(METHODS))
def test_a_run_is_the_same(name: str) -> None:
    assert "by triton\n" in repr(same(METHODS[name], skip=3))


@pytest.mark.parametrize("name", ["spartan", "topkast", "imp"])
def test_ends_of_any_length(name: str) -> None:
    """Kernels move 16 bytes at a time but for the last few entries of such weights."""
    sparsifier = same(METHODS[name], skip=3, odd=True)
    (solver,) = sparsifier._run.weights.frozen
    assert isinstance(solver, FrozenTritonSolver)
    assert any(p.numel() % 8 for p in solver.kernels.parameters)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("name", ["spartan", "movement"])
def test_a_budget_for_every_layer(name: str, odd: bool) -> None:
    same(METHODS[name], skip=2, budget="erk", steps=5, odd=odd)


def test_gradients_that_lie_anywhere() -> None:
    """A gradient is what a hook makes of it: a view that does not start at a multiple of 16 bytes, for one step."""

    def moved(g: Tensor, step: list[int] = [0]) -> Tensor:  # noqa: B006
        step[0] += 1
        room = torch.empty(g.numel() + 1, device=g.device)
        return g if step[0] != 3 else room[1:].view_as(g).copy_(g)

    losses: dict[bool, list[float]] = {}
    for place in (False, True):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        Sparsifier(model, 0.8, 20, METHODS["spartan"], warmup=0.0, finetune=0.2, kernels="triton").attach(optimizer)
        if place:
            model.get_parameter("3.weight").register_hook(moved)
        x, y = torch.randn(16, 4, 3, 3, device=DEVICE), torch.randint(16, (16,), device=DEVICE)
        for _ in range(6):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(place, []).append(loss.item())
    assert losses[True] == losses[False]


BLOCKS = [Block(2, 2), Block(16, 16), Block(1, -1), Channel()]


@pytest.mark.parametrize("pattern", BLOCKS, ids=repr)
def test_blocks(pattern: Pattern) -> None:
    assert "by triton\n" in repr(same(METHODS["spartan"], skip=3, pattern=pattern))


@pytest.mark.parametrize("name", ["spartan-hard", "spartan-soft", "topkast-b", "imp"])
def test_blocks_of_every_method(name: str) -> None:
    same(METHODS[name], skip=3, pattern=Block(4, 8))


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, pattern: Pattern) -> None:
    """The same up to a step; ties are the rule, and are cut alike."""
    for method in (METHODS["spartan"], METHODS["imp"]):
        _, plain, _ = run("torch", method, steps=0, dtype=dtype, warmup=0.0, pattern=pattern)
        _, fast, losses = run("triton", method, steps=0, dtype=dtype, warmup=0.0, pattern=pattern)
        for (key, mask), other in zip(plain.masks().items(), fast.masks().values(), strict=True):
            assert torch.equal(mask, other), key
    _, fast, losses = run("triton", METHODS["spartan"], steps=3, dtype=dtype, warmup=0.0, finetune=0.7, pattern=pattern)
    assert all(loss < 10 for loss in losses)
    assert 0 <= fast.stats.target_cost - fast.stats.cost < fast._run.problem.unit_costs[0]


@pytest.mark.parametrize(
    "options", [{"flops": True}, {"channels_last": True}, {"flops": True, "pattern": Block(1, -1)}]
)
def test_costs_and_memory_formats(options: dict[str, Any]) -> None:
    sparsifier = same(METHODS["spartan"], **options)
    assert "by triton\n" in repr(sparsifier)
    assert "by triton\n" in repr(run("triton", METHODS["spartan"], steps=3, **options)[1])  # before the mask is fixed


def test_what_runs_where_kernels_do_not() -> None:
    assert "by torch (kernels='torch')\n" in repr(run("torch", IMP(), steps=0)[1])
    assert "by torch (weights of float64)\n" in repr(run("triton", IMP(), steps=0, dtype=torch.float64)[1])
    nm: dict[str, Any] = {"pattern": NM(1, 4), "sparsity": 0.75, "warmup": 0.0}
    for steps in (0, 6):  # finetuning knows no pattern
        assert "by triton\n" in repr(run("triton", IMP(), steps=steps, **nm)[1])
    if DEVICE.type == "cpu":
        assert "by torch (few weights)\n" in repr(run("auto", IMP(), steps=0)[1])
    blocks = run("triton", "powerprop", steps=0, pattern=Block(2, 2))[1]
    assert "by triton for thresholds, torch for weights and gradients" in repr(blocks)


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("pattern", [Unstructured(), Block(4, 4)], ids=repr)
def test_through_a_checkpoint(pattern: Pattern, steps: int) -> None:
    model, sparsifier, _ = run("triton", METHODS["spartan"], steps=steps, pattern=pattern)
    state = sparsifier.state_dict()
    # A state of one path goes on in the other.
    for kernels in ("triton", "torch"):
        other, again, _ = run(kernels, METHODS["spartan"], steps=0, pattern=pattern)
        other.load_state_dict(model.state_dict())
        again.load_state_dict(state)
        pairs = list(zip(model.parameters(), other.parameters(), strict=True))
        apart = sum(int(((a == 0) != (b == 0)).sum()) for a, b in pairs)
        # On a GPU torch sums a unit of several weights in another order: the first that is not kept may come out above.
        loose = kernels == "torch" and steps == 3 and not pattern.single and DEVICE.type == "cuda"
        assert apart <= (pattern.unit_size((16, 16)) if loose else 0)
        for a, b in pairs:
            same = (a == 0) == (b == 0)
            torch.testing.assert_close(a[same], b[same], rtol=0 if kernels == "triton" else 1e-5, atol=0)
    assert (sparsifier.stats.phase == "finetune") == (steps == 5)


def test_to_the_end() -> None:
    model, sparsifier, _ = run("triton", METHODS["spartan"])
    assert sparsifier.stats.phase == "finetune"
    sparsifier.finalize()
    zeros = sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)
    assert zeros == sum(p.numel() for p in model.parameters() if p.ndim > 1) - sparsifier.stats.cost


@pytest.mark.skipif(DEVICE.type != "cuda", reason="on a CPU there is nothing to wait for")
@pytest.mark.parametrize("finetune", [0.0, 0.9], ids=["soft", "finetune"])
@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2), Block(16, 16)], ids=repr)
@pytest.mark.parametrize("name", ["spartan", "topkast", "imp"])
def test_no_step_waits_for_the_device(name: str, pattern: Pattern, finetune: float) -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(model, 0.8, 40, METHODS[name], pattern=pattern, warmup=0.0, finetune=finetune)
    sparsifier.attach(optimizer)
    x, y = torch.randn(16, 4, 3, 3, device=DEVICE), torch.randint(16, (16,), device=DEVICE)
    check_no_step_waits(model, optimizer, x, y)
    assert sparsifier.stats.phase == ("finetune" if finetune else "intermediate")


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2)], ids=repr)
def test_two_runs_give_the_same_bits(pattern: Pattern) -> None:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        first, second = (run("triton", METHODS["spartan"], pattern=pattern)[0] for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_mask_off_its_budget_is_told_once() -> None:
    _, sparsifier, _ = run("triton", METHODS["spartan"], steps=2)
    guard, residuals = sparsifier._run.guard, sparsifier._run.weights.residuals
    assert 0 < residuals[0, 1].item() < 1e-5
    residuals[0, 1] = 0.02
    with pytest.warns(
        RuntimeWarning, match="the soft mask of 0.weight, 3.weight, 5.weight was 2.00% off its budget at step 2"
    ):
        guard.look(wait=True)
    guard.look(wait=True)  # a second one would be an error


def test_the_override_says_what_it_accepts() -> None:
    with pytest.raises(ValueError, match="kernels='cuda' is unknown; accepted: 'auto', 'triton', 'torch'"):
        run("cuda", IMP())
