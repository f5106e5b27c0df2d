"""Averages of the dense weights, weights edited or swapped by hand, and copies of the model and the run."""

import contextlib
import gc
import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spartan import Sparsifier
from tests.training import (
    KEPT,
    METHODS,
    SETTINGS,
    WEIGHTS,
    batch,
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

pytestmark = pytest.mark.parametrize("method", METHODS)


# ---------------------------------------------------------------------- dense_weights


@pytest.mark.parametrize("start", [6, 17])
def test_dense_weights_lends_theta_and_changes_nothing(method: str, start: int) -> None:
    (model, optimizer, sparsifier), twin = setup(method), setup(method)
    train(model, optimizer, start)
    train(*twin[:2], start)
    w = values(model)
    with sparsifier.dense_weights():
        inside = values(model)
        if start < 16:
            assert same({n: inside[n] for n in WEIGHTS}, thetas(twin[2]))
    assert same(values(model), w)
    train(model, optimizer, 3, start)
    train(*twin[:2], 3, start)
    assert same(values(model), values(twin[0]))


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_the_projected_average_is_exactly_sparse(method: str, kind: str) -> None:
    model, optimizer, sparsifier = setup(method)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5) if kind == "ema" else None)
    expected: dict[str, torch.Tensor] = {}
    for step in range(14):
        train(model, optimizer, 1, step)
        with sparsifier.dense_weights():
            average.update_parameters(model)
        for i, (name, theta) in enumerate(thetas(sparsifier).items()):
            assert i < 3
            rate = 0.5 if kind == "ema" else 1 / (step + 1)
            expected[name] = theta if step == 0 else torch.lerp(expected[name], theta, rate)
        assert exactly_sparse(sparsifier)
    mean = values(average.module)
    close({n: mean[n] for n in WEIGHTS}, expected)
    with sparsifier.dense_weights():
        model.load_state_dict(average.module.state_dict())
    assert same(thetas(sparsifier), {n: mean[n] for n in WEIGHTS})
    assert exactly_sparse(sparsifier)
    train(model, optimizer, 1, 14)
    sparsifier.finalize()
    assert sum(int((p != 0).sum()) for n, p in model.named_parameters() if n in WEIGHTS) == KEPT


@pytest.mark.parametrize("start", [6, 17])
def test_averaging_in_finetuning_keeps_the_set(method: str, start: int) -> None:
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, start)
    average = AveragedModel(model)
    for step in range(start, 20):
        train(model, optimizer, 1, step)
        with sparsifier.dense_weights():
            average.update_parameters(model)
    keep = sparsifier.masks()
    with sparsifier.dense_weights():
        model.load_state_dict(average.module.state_dict())
    assert all(torch.equal(sparsifier.masks()[n], keep[n]) for n in WEIGHTS)
    assert exactly_sparse(sparsifier)


def test_weights_edited_inside_dense_weights_become_theta(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, 8)
    with sparsifier.dense_weights(), torch.no_grad():
        model[0].weight.mul_(-3.0)
        model[2].weight[0].fill_(7.0)
        expected = values(model)
    assert same(thetas(sparsifier), {n: expected[n] for n in WEIGHTS})
    assert sparsifier.masks()["2.weight"][0].all()
    assert exactly_sparse(sparsifier)
    train(model, optimizer, 12, 8)
    assert exactly_sparse(sparsifier)


def _error(*_: Any) -> None:
    raise ZeroDivisionError


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _nest(sparsifier: Sparsifier, *_: Any) -> None:
    with sparsifier.dense_weights():
        pass


FAILURES: dict[str, tuple[Callable[[Sparsifier, Any, Any], Any], type[BaseException], str | None]] = {
    "error": (_error, ZeroDivisionError, None),
    "interrupt": (_interrupt, KeyboardInterrupt, None),
    "nested": (_nest, RuntimeError, "inside dense_weights"),
    "step": (lambda s, o, m: o.step(), RuntimeError, "inside dense_weights"),
    "backward": (lambda s, o, m: s.backward(), RuntimeError, "inside dense_weights"),
    "finalize": (lambda s, o, m: s.finalize(), RuntimeError, "inside dense_weights"),
    "nan": (lambda s, o, m: m[2].weight.fill_(float("nan")), RuntimeError, r"2\.weight"),
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("start", [6, 17])
def test_a_failure_inside_dense_weights_changes_nothing(method: str, what: str, start: int) -> None:
    (model, optimizer, sparsifier), twin = setup(method), setup(method)
    train(model, optimizer, start)
    train(*twin[:2], start)
    before, theta = values(model), thetas(sparsifier)
    fail, error, message = FAILURES[what]

    def block() -> None:
        with sparsifier.dense_weights(), torch.no_grad():
            model[2].weight.add_(1.0)
            fail(sparsifier, optimizer, model)

    with pytest.raises(error, match=message):
        block()
    assert same(values(model), before)
    assert same(thetas(sparsifier), theta)
    assert sparsifier.stats.step == start
    train(model, optimizer, 2, start)
    train(*twin[:2], 2, start)
    assert same(values(model), values(twin[0]))


# ---------------------------------------------------------------------- a model changed under the sparsifier


@pytest.mark.parametrize("start", [2, 8, 17])
def test_swapping_an_average_in_and_out_is_fine(method: str, start: int) -> None:
    (model, optimizer, sparsifier), twin = setup(method), setup(method)
    train(model, optimizer, start)
    train(*twin[:2], start)
    stored = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
        loss_of(model)
        for p, old in zip(model.parameters(), stored, strict=True):
            p.copy_(old)
    train(model, optimizer, 2, start)
    train(*twin[:2], 2, start)
    assert same(values(model), values(twin[0]))
    assert exactly_sparse(sparsifier)


@pytest.mark.parametrize("start", [0, 8, 17])
def test_a_changed_weight_is_an_error(method: str, start: int) -> None:
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, start)
    with torch.no_grad():
        model[2].weight[1, 1] += 1.0
    for call in (loss_of(model).backward, optimizer.step, sparsifier.backward, sparsifier.finalize):
        with pytest.raises(RuntimeError, match=r"2\.weight was changed.*load_state_dict.*dense_weights"):
            call()
    with pytest.raises(RuntimeError, match=r"2\.weight"), sparsifier.dense_weights():
        pass


def test_moving_the_model_is_an_error(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, 2)
    model.float()
    with pytest.raises(RuntimeError, match=r"0\.weight was moved, cast or replaced.*Build the sparsifier after"):
        sparsifier.backward()


@pytest.mark.parametrize("start", [3, 9, 18])
def test_loading_a_checkpoint_needs_both_states(method: str, start: int) -> None:
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, start)
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], saved)
    train(model, optimizer, 20 - start, start)

    saved.seek(0)
    weights, momenta, state = torch.load(saved, weights_only=True)
    again, its_optimizer, its_sparsifier = setup(method)
    train(again, its_optimizer, 1, 50)
    again.load_state_dict(weights)
    momenta["param_groups"][0].pop("spartan")  # as if it had been saved without a sparsifier
    its_optimizer.load_state_dict(momenta)
    with pytest.raises(RuntimeError, match=r"weight was changed.*load_state_dict"):
        loss_of(again, start).backward()
    its_optimizer.zero_grad()
    its_sparsifier.load_state_dict(state)
    assert its_sparsifier.stats.step == start
    assert same({n: p.detach() for n, p in again.named_parameters()}, weights)
    train(again, its_optimizer, 20 - start, start)
    assert same(values(again), values(model))
    assert its_sparsifier.stats == sparsifier.stats


@pytest.mark.parametrize("explicit", [False, True])
def test_going_back_within_one_process(method: str, explicit: bool) -> None:
    """A state loaded in the middle of a step, from a run that was frozen already."""
    model, optimizer, sparsifier = setup(method)
    train(model, optimizer, 5)
    saved = deepcopy([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()])
    train(model, optimizer, 12, 5)
    reference = values(model)
    loss_of(model, 40).backward()
    if explicit:
        sparsifier.backward()
    optimizer.zero_grad(set_to_none=False)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    sparsifier.load_state_dict(saved[2])
    train(model, optimizer, 12, 5)
    assert same(values(model), reference)


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize("start", [0, 8, 17])
@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copied_model_is_free(method: str, how: str, start: int) -> None:
    (model, optimizer, sparsifier), twin = setup(method), setup(method)
    train(model, optimizer, start)
    train(*twin[:2], start)
    if how == "deepcopy":
        copied = deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert same(values(copied), values(model))
    assert all(not p._backward_hooks for p in copied.parameters())
    its_optimizer = SGD(copied.parameters(), lr=0.1)
    its_sparsifier = Sparsifier(copied, 0.9, 20, method).attach(its_optimizer)
    with pytest.warns(UserWarning, match="zero already") if start else contextlib.nullcontext():
        train(copied, its_optimizer, 5)
    assert exactly_sparse(its_sparsifier)
    train(model, optimizer, 3, start)
    train(*twin[:2], 3, start)
    assert same(values(model), values(twin[0]))  # the copy has not disturbed the run
    assert exactly_sparse(sparsifier)


def test_names_and_parameters_stay(method: str) -> None:
    model = net()
    names, params = list(model.state_dict()), list(model.parameters())
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, method=method, **SETTINGS).attach(optimizer)
    for stop in (0, 4, 18, 20):
        train(model, optimizer, stop - sparsifier.stats.step, sparsifier.stats.step)
        assert list(model.state_dict()) == names
        assert [n for n, _ in model.named_parameters()] == names
        assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
        assert not list(model.buffers())
        fresh = net(seed=5)
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh(batch()[0]), model(batch()[0]))
    sparsifier.finalize()
    assert list(model.state_dict()) == names
    assert all(not p._backward_hooks for p in model.parameters())


def test_one_sparsifier_per_model(method: str) -> None:
    model, optimizer, sparsifier = setup(method)
    with pytest.raises(RuntimeError, match=r"0\.weight already belongs"):
        Sparsifier(model, 0.5, 10, method)
    sparsifier.detach()
    del sparsifier
    gc.collect()
    Sparsifier(model, 0.5, 10, method).attach(optimizer)
    train(model, optimizer, 3)


def test_a_discarded_run_is_forgotten(method: str) -> None:
    """With its optimizer, which held on to it."""
    model, optimizer, sparsifier = setup(method)
    loss_of(model).backward()
    sparsifier.backward()
    del optimizer, sparsifier
    gc.collect()
    loss_of(model).backward()  # nothing watches the gradients any more
    model.zero_grad()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.5, 10, method).attach(optimizer)
    train(model, optimizer, 3)
    assert exactly_sparse(sparsifier)
