"""Around the optimizer: several of them, every flavour, schedulers, attach and detach."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

from spartan import Sparsifier
from tests.training import (
    METHODS,
    WEIGHTS,
    close,
    exactly_sparse,
    loss_of,
    net,
    same,
    setup,
    thetas,
    train,
    values,
)

each_method = pytest.mark.parametrize("method", METHODS)

# ---------------------------------------------------------------------- several optimizers


def two(method: str, **options: Any) -> tuple[Any, Optimizer, Optimizer, Sparsifier]:
    model = net()
    a = SGD(model[0].parameters(), lr=0.1, **options)
    b = SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1, **options)
    return model, a, b, Sparsifier(model, 0.75, 20, method).attach(a, b)


@each_method
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", ["together", "each after its step"])
def test_two_optimizers_equal_one(method: str, zero: str, set_to_none: bool) -> None:
    model, a, b, sparsifier = two(method, momentum=0.9, weight_decay=1e-2)
    plain = setup(method)
    for step in range(20):
        loss_of(model, step).backward()
        a.step()
        assert sparsifier.stats.step == step
        assert exactly_sparse(sparsifier)
        if zero == "each after its step":
            a.zero_grad(set_to_none=set_to_none)
        b.step()
        assert sparsifier.stats.step == step + 1
        assert exactly_sparse(sparsifier)
        if zero == "together":
            a.zero_grad(set_to_none=set_to_none)
        b.zero_grad(set_to_none=set_to_none)
        train(*plain[:2], 1, step)
        close(values(model), values(plain[0]))


@each_method
def test_schedule_advances_when_one_steps_again(method: str) -> None:
    model, a, b, sparsifier = two(method)
    seen = []
    for step, optimizer in enumerate((a, a, b, b, a, a, a)):
        loss_of(model, step).backward()
        optimizer.step()
        a.zero_grad()
        b.zero_grad()
        seen.append(sparsifier.stats.step)
        assert exactly_sparse(sparsifier)
    assert seen == [0, 1, 2, 2, 3, 3, 4]


@each_method
def test_alternating_optimizers_move_only_their_own_theta(method: str) -> None:
    model, a, b, sparsifier = two(method)
    for step in range(8):
        before = thetas(sparsifier)
        loss_of(model, step).backward()
        (a, b)[step % 2].step()
        a.zero_grad()
        b.zero_grad()
        moved = [name for name, theta in thetas(sparsifier).items() if not torch.equal(theta, before[name])]
        assert moved == [["0.weight"], ["2.weight", "4.weight"]][step % 2]
        assert exactly_sparse(sparsifier)


@each_method
def test_two_models_with_one_optimizer(method: str) -> None:
    one, other, alone = net(0), net(1), setup(method)
    optimizer = SGD([*one.parameters(), *other.parameters()], lr=0.1, momentum=0.9, weight_decay=1e-2)
    first = Sparsifier(one, 0.75, 20, method).attach(optimizer)
    second = Sparsifier(other, 0.5, 20, method).attach(optimizer)
    for step in range(6):
        (loss_of(one, step) + loss_of(other, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(*alone[:2], 1, step)
        assert exactly_sparse(first)
        assert exactly_sparse(second)
        assert same(values(one), values(alone[0]))
    first.detach()
    before = values(one)
    loss_of(other, 6).backward()
    optimizer.step()
    assert exactly_sparse(second)
    assert second.stats.step == 7
    assert same(values(one), before)


# ---------------------------------------------------------------------- every flavour of optimizer

FLAVOURS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd loop": lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd foreach": lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True, nesterov=True),
    "sgd fused": lambda ps: SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "sgd maximize": lambda ps: SGD(ps, lr=1e-3, momentum=0.9, maximize=True),
    "adam amsgrad": lambda ps: Adam(ps, lr=0.05, amsgrad=True, weight_decay=0.1),
    "adam foreach": lambda ps: Adam(ps, lr=0.05, foreach=True, maximize=True),
    "adam fused": lambda ps: Adam(ps, lr=0.05, fused=True),
    "adam capturable": lambda ps: Adam(ps, lr=0.05, capturable=True, foreach=True),
    "adamw fused": lambda ps: AdamW(ps, lr=0.05, fused=True, weight_decay=0.5, amsgrad=True),
    "adamw": lambda ps: AdamW(ps, lr=torch.tensor(0.05), weight_decay=0.5, differentiable=False),
    "rmsprop": lambda ps: RMSprop(ps, lr=0.01, centered=True, momentum=0.9),
}


@each_method
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_weights_are_exactly_sparse_after_every_step(method: str, flavour: str) -> None:
    model = net()
    optimizer = FLAVOURS[flavour](model.parameters())
    sparsifier = Sparsifier(model, 0.75, 20, method).attach(optimizer)
    assert exactly_sparse(sparsifier)
    for step in range(20):
        loss_of(model, step).backward()
        try:
            optimizer.step()
        except AssertionError as error:
            if flavour == "adam capturable" and "capturable" in str(error):
                pytest.skip("capturable optimizers refuse CPU tensors")
            raise
        optimizer.zero_grad()
        assert exactly_sparse(sparsifier)
    sparsifier.finalize()
    assert sum(int((w != 0).sum()) for name, w in model.named_parameters() if name in WEIGHTS) == 58


# ---------------------------------------------------------------------- schedulers, attach, detach

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=21),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.StepLR(o, 5)], milestones=[5]
    ),
}


@each_method
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_before_and_after_attach_agree(method: str, scheduler: str) -> None:
    found = []
    for before in (True, False):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        sparsifier = Sparsifier(model, 0.75, 20, method)
        if not before:
            sparsifier.attach(optimizer)
        rates = SCHEDULERS[scheduler](optimizer)
        if before:
            sparsifier.attach(optimizer)
        for step in range(20):
            train(model, optimizer, 1, step)
            rates.step()
        assert sparsifier.stats.step == 20
        assert exactly_sparse(sparsifier)
        found.append(values(model))
    assert same(*found)


def test_detach_restores_the_step() -> None:
    model, optimizer, sparsifier = setup()
    assert "step" in optimizer.__dict__
    sparsifier.detach()
    assert "step" not in optimizer.__dict__
    rates = lr_scheduler.StepLR(optimizer, 5)
    own = optimizer.step
    sparsifier.attach(optimizer)
    assert optimizer.step is not own
    sparsifier.detach()
    assert optimizer.step is own
    train(model, optimizer, 1)
    rates.step()
    assert int((model[0].weight != 0).sum()) == 72  # a plain step: dense again
    assert sparsifier.stats.step == 0


@each_method
def test_detach_under_a_scheduler_and_attach_again(method: str) -> None:
    (model, optimizer, sparsifier), twin = setup(method), setup(method)
    rates = lr_scheduler.StepLR(optimizer, 100)
    for step in range(10):
        train(model, optimizer, 1, step)
        rates.step()
        sparsifier.detach().attach(optimizer)
    train(*twin[:2], 10)
    assert same(values(model), values(twin[0]))
    assert sparsifier.stats.step == 10
    sparsifier.detach()
    train(model, optimizer, 1)
    assert sparsifier.stats.step == 10


def test_attach_twice_raises() -> None:
    _, optimizer, sparsifier = setup()
    with pytest.raises(RuntimeError, match="detach"):
        sparsifier.attach(optimizer)


def test_attach_needs_an_optimizer_for_every_target() -> None:
    model = net()
    sparsifier = Sparsifier(model, 0.75, 20)
    with pytest.raises(ValueError, match=r"4\.weight"):
        sparsifier.attach(SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1))
    with pytest.raises(ValueError, match="more than one"):
        sparsifier.attach(SGD(model.parameters(), lr=0.1), SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(ValueError, match="optimizer"):
        sparsifier.attach()
    sparsifier.attach(SGD(model.parameters(), lr=0.1))


def test_the_step_keeps_its_signature() -> None:
    """GradScaler, and trainers built on torch, look at the parameters of optimizer.step."""

    class NoClosure(SGD):
        def step(self) -> None:  # type: ignore[override]
            super().step()

    for kind in (SGD, Adam, NoClosure):
        model = net()
        optimizer = kind(model.parameters(), lr=0.1)
        before = inspect.signature(optimizer.step)
        Sparsifier(model, 0.75, 20).attach(optimizer)
        assert inspect.signature(optimizer.step) == before


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer of all parameters, whose step is that of others."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def test_a_container_of_optimizers() -> None:
    """The steps of those inside are wrapped, and it may call them; alone, it would change weights unseen."""
    model, a, b, sparsifier = two("spartan", momentum=0.9, weight_decay=1e-2)
    plain = setup("spartan")
    sparsifier.detach()
    both = Container(a, b)
    sparsifier.attach(both)
    for step in range(20):
        loss_of(model, step).backward()
        both.step()
        both.zero_grad()
        train(*plain[:2], 1, step)
        close(values(model), values(plain[0]))
    assert sparsifier.stats.step == 20
    sparsifier.detach()
    sparsifier.attach(a, b)
    loss_of(model, 20).backward()
    with pytest.raises(RuntimeError, match="another optimizer is attached"):
        both.step()
