"""Averaged models of others: they average θ, hold it projected, and are refused where nobody follows them."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spartan import Sparsifier, verify
from tests.foreign import library
from tests.training import METHODS, SETTINGS, WEIGHTS, close, exactly_sparse, net, same, setup, thetas, train, values


class ExponentialMovingAverage(AveragedModel):
    """As in torchvision's reference training script."""

    def __init__(self, model: nn.Module, decay: float, device: str = "cpu") -> None:
        def ema_avg(averaged: Tensor, current: Tensor, num_averaged: Tensor | int) -> Tensor:
            return decay * averaged + (1 - decay) * current

        super().__init__(model, torch.device(device), ema_avg, use_buffers=True)


class ByHand:
    """As in many a repository: a frozen copy in `ema`, and `update(model)`."""

    def __init__(self, model: nn.Module) -> None:
        self.ema = copy.deepcopy(model).eval().requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        own = model.state_dict()
        for name, x in self.ema.state_dict().items():
            x *= 0.5
            x += 0.5 * own[name].detach()


class Timm:
    """ModelEmaV3, imported when it is needed."""

    def __new__(cls, model: nn.Module) -> Any:
        return library("timm.utils").ModelEmaV3(model, decay=0.5)


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "swa": AveragedModel,
    "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
    "torchvision": lambda model: ExponentialMovingAverage(model, 0.5),
    "timm": Timm,
    "by hand": ByHand,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def inside(averaged: Any) -> dict[str, Tensor]:
    return values(averaged.ema if isinstance(averaged, ByHand) else averaged.module)


def update(averaged: Any, model: nn.Module) -> None:
    (averaged.update_parameters if isinstance(averaged, AveragedModel) else averaged.update)(model)


def zeros(weights: dict[str, Tensor]) -> int:
    return sum(int((weights[name] == 0).sum()) for name in WEIGHTS)


@every_kind
@pytest.mark.parametrize("method", [*METHODS, "rigl"])
def test_it_averages_theta_and_is_as_sparse_as_the_model(kind: str, method: str) -> None:
    (model, optimizer, sparsifier), twin = setup(method), setup(method)
    averaged = KINDS[kind](model)
    assert sparsifier.follow(averaged) is sparsifier
    expected: dict[str, Tensor] = {}
    start = thetas(sparsifier) | {n: p for n, p in values(model).items() if n not in WEIGHTS}
    for step in range(20):
        train(model, optimizer, 1, step)
        train(*twin[:2], 1, step)
        update(averaged, model)
        held = inside(averaged)
        assert zeros(held) >= sum(layer.parameters - layer.kept for layer in sparsifier.layers())
        assert same(values(model), values(twin[0]))  # nothing is disturbed
        if sparsifier.stats.phase != "finetune":  # then what is gone is gone from θ too
            now = thetas(sparsifier) | {n: p for n, p in values(model).items() if n not in WEIGHTS}
            rate = 1 / (step + 1) if kind == "swa" else 0.5
            first = {} if kind in ("timm", "by hand") else now  # the others begin with a copy
            expected = {n: torch.lerp((expected or first or start)[n], x, rate) for n, x in now.items()}
            saved = sparsifier.state_dict()["averages"][0]
            close({n: saved[n] for n in WEIGHTS}, {n: expected[n] for n in WEIGHTS})
            close(
                {n: x for n, x in held.items() if n not in WEIGHTS},
                {n: x for n, x in expected.items() if n not in WEIGHTS},
            )
            if method == "imp":  # w is θ where it is kept
                least = torch.cat([expected[n].abs().flatten() for n in WEIGHTS]).topk(
                    sum(x.kept for x in sparsifier.layers())
                )
                cut = float(least.values[-1])
                close(
                    {n: held[n] for n in WEIGHTS},
                    {n: torch.where(expected[n].abs() >= cut, expected[n], 0.0) for n in WEIGHTS},
                )
    sparsifier.finalize()
    verify(averaged.ema if kind == "by hand" else averaged.module, 0.75)
    with pytest.raises(RuntimeError, match=r"after finalize\(\)"):
        update(averaged, model)


def test_one_that_was_built_before_the_sparsifier() -> None:
    model = net()
    averaged, dense = library("timm.utils").ModelEmaV3(model, decay=0.9), values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 20, "imp", warmup=0.0).attach(optimizer).follow(averaged)
    assert same(inside(averaged), values(model))  # projected at once
    assert same(sparsifier.state_dict()["averages"][0], {n: dense[n] for n in WEIGHTS})
    train(model, optimizer, 1)
    averaged.set(model)
    assert same(inside(averaged), values(model))
    assert same(sparsifier.state_dict()["averages"][0], thetas(sparsifier))


@every_kind
@pytest.mark.parametrize("order", ["average first", "average last", "followed last"])
def test_it_resumes_bit_for_bit(kind: str, order: str) -> None:
    """From the average's, the model's and the optimizer's state; its dense weights ride in the latter."""
    model, optimizer, sparsifier = setup("spartan")
    averaged = KINDS[kind](model)
    sparsifier.follow(averaged)

    def go_on(model: nn.Module, optimizer: Any, averaged: Any, start: int, stop: int) -> None:
        for step in range(start, stop):
            train(model, optimizer, 1, step)
            if step % 2:
                update(averaged, model)

    def of(averaged: Any) -> nn.Module:
        return averaged.ema if isinstance(averaged, ByHand) else averaged

    go_on(model, optimizer, averaged, 0, 9)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), of(averaged).state_dict()], file)
    go_on(model, optimizer, averaged, 9, 20)
    file.seek(0)
    weights, momenta, mean = torch.load(file, weights_only=True)
    again, its_optimizer, its_sparsifier = setup("spartan")
    its_averaged = KINDS[kind](again)
    if order != "followed last":
        its_sparsifier.follow(its_averaged)
    if order == "average first":
        of(its_averaged).load_state_dict(mean)
    again.load_state_dict(weights)
    its_optimizer.load_state_dict(momenta)
    if order == "followed last":
        its_sparsifier.follow(its_averaged)
    if order != "average first":
        of(its_averaged).load_state_dict(mean)
    go_on(again, its_optimizer, its_averaged, 9, 20)
    assert same(values(model), values(again))
    assert same(inside(averaged), inside(its_averaged))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "by hand"])
@pytest.mark.parametrize("first", [False, True])
def test_one_that_nobody_follows_refuses_to_be_updated(kind: str, first: bool) -> None:
    """At its first update, whether it was built before the sparsifier or after."""
    model = net()
    averaged = KINDS[kind](model) if first else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, **SETTINGS).attach(optimizer)
    averaged = averaged or KINDS[kind](model)
    train(model, optimizer, 1)
    before = inside(averaged)
    with pytest.raises(RuntimeError, match=r"update\w*\(\) would average the sparse weights.*sparsifier\.follow.*ema"):
        update(averaged, model)
    assert same(inside(averaged), before)
    other = net(seed=1)
    update(KINDS[kind](other), other)  # another model's is none of ours
    sparsifier.follow(averaged)
    update(averaged, model)
    assert zeros(inside(averaged)) >= zeros(values(model))


def test_what_is_averaged_freely() -> None:
    """Inside dense_weights(), with nothing sparse to lose, and after detach()."""
    model, optimizer, sparsifier = setup("imp")
    averaged = AveragedModel(model)
    train(model, optimizer, 5)
    with sparsifier.dense_weights():
        averaged.update_parameters(model)
    assert same({n: inside(averaged)[n] for n in WEIGHTS}, thetas(sparsifier))
    sparsifier.detach()
    averaged.update_parameters(model)
    model, optimizer, sparsifier = setup("dense")
    averaged = AveragedModel(model)
    train(model, optimizer, 2)
    averaged.update_parameters(model)
    assert same(inside(averaged), values(model))


@pytest.mark.parametrize("stop", [8, 20])
def test_a_model_that_holds_the_average_is_final(stop: int) -> None:
    """SWA puts it there at the end, before finalize() or after; its last update may be from a time of more weights."""
    model, optimizer, sparsifier = setup("spartan")
    averaged = AveragedModel(model)
    sparsifier.follow(averaged)
    for step in range(20):
        train(model, optimizer, 1, step)
        if step < stop:
            averaged.update_parameters(model)
    for p, mean in zip(model.parameters(), averaged.module.parameters(), strict=True):
        p.data.copy_(mean)
    own = values(model)
    sparsifier.finalize()
    assert same(values(model), inside(averaged))
    assert stop < 20 or same(values(model), own)
    verify(model, 0.75)
    assert sum(layer.kept for layer in sparsifier.layers()) == sum(int((values(model)[n] != 0).sum()) for n in WEIGHTS)


def test_copies_of_the_average() -> None:
    model, optimizer, sparsifier = setup("imp")
    averaged = AveragedModel(model)
    sparsifier.follow(averaged)
    train(model, optimizer, 3)
    averaged.update_parameters(model)
    for copied in (copy.deepcopy(averaged), pickle.loads(pickle.dumps(averaged))):
        assert same(inside(copied), inside(averaged))
        other = net(seed=3)
        copied.update_parameters(other)
        close(inside(copied), {n: torch.lerp(x, values(other)[n], 0.5) for n, x in inside(averaged).items()})
    with pytest.raises(RuntimeError, match="would average"):
        copy.deepcopy(averaged).update_parameters(model)
    other, its_optimizer, its_sparsifier, its_averaged = copy.deepcopy((model, optimizer, sparsifier, averaged))
    its_sparsifier.follow(its_averaged)
    for each in ((model, optimizer, averaged), (other, its_optimizer, its_averaged)):
        train(each[0], each[1], 1, 3)
        each[2].update_parameters(each[0])
    assert same(inside(averaged), inside(its_averaged))


def test_a_failed_update_changes_nothing() -> None:
    model, optimizer, sparsifier = setup("spartan")
    calls = []

    def once(averaged: Tensor, current: Tensor, n: Tensor | int) -> Tensor:
        calls.append(n)
        if len(calls) == 3:
            raise ZeroDivisionError
        return (averaged + current) / 2

    averaged = AveragedModel(model, avg_fn=once)
    sparsifier.follow(averaged)
    train(model, optimizer, 6)
    averaged.update_parameters(model)
    before = {n: x.clone() for n, x in sparsifier.state_dict()["averages"][0].items()}
    train(model, optimizer, 1, 6)
    own = values(model)
    with pytest.raises(ZeroDivisionError):
        averaged.update_parameters(model)
    assert same(values(model), own)
    assert same(sparsifier.state_dict()["averages"][0], before)
    assert zeros(inside(averaged)) >= zeros(values(model))
    train(model, optimizer, 1, 7)
    assert exactly_sparse(sparsifier)


def test_what_cannot_be_followed() -> None:
    _, _, sparsifier = setup("imp")
    with pytest.raises(ValueError, match=r"follow\(\) got Linear; an averaged model is needed.*sparsifier\.ema"):
        sparsifier.follow(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="averages another model"):
        sparsifier.follow(AveragedModel(nn.Linear(2, 2)))


def test_a_model_inside_another_that_is_averaged() -> None:
    """As Lightning's module holds a network that is sparse."""
    model, optimizer, sparsifier = setup("imp")
    outer = nn.ModuleDict({"net": model, "head": nn.Linear(4, 2)})
    averaged = AveragedModel(outer)
    sparsifier.follow(averaged)
    train(model, optimizer, 20)
    averaged.update_parameters(outer)
    train(model, optimizer, 1, 20)
    averaged.update_parameters(outer)
    verify(averaged.module["net"], 0.75)  # type: ignore[index]
