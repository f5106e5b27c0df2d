"""Copies and pickles of a model, its optimizer and its sparsifier: together they train on; alone they refuse to."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from spartan import Sparsifier
from tests.training import SETTINGS, exactly_sparse, loss_of, net, same, train, values


def again(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


both_ways = pytest.mark.parametrize("copied", [copy.deepcopy, again])


@both_ways
@pytest.mark.parametrize("start", [0, 7, 17])
@pytest.mark.parametrize("method", ["spartan", "rigl", "movement", "str", "probmask", "dense"])
def test_all_three_together(method: str, start: int, copied: Callable[[Any], Any]) -> None:
    """The copy goes on as the original does, bit for bit, and neither touches the other."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(model, method=method, **SETTINGS).attach(optimizer)
    train(model, optimizer, start)
    other, its_optimizer, its_sparsifier = copied((model, optimizer, sparsifier))
    train(other, its_optimizer, 20 - start, start)
    assert sparsifier.stats.step == start
    assert its_sparsifier.stats.step == 20
    train(model, optimizer, 20 - start, start)
    assert same(values(model), values(other))
    for each in (sparsifier, its_sparsifier):
        each.finalize()


@both_ways
def test_under_a_learning_rate_schedule(copied: Callable[[Any], Any]) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, **SETTINGS).attach(optimizer)
    lr_scheduler.StepLR(optimizer, 5)
    other, its_optimizer, its_sparsifier = copied((model, optimizer, sparsifier))
    train(other, its_optimizer, 3)
    assert (sparsifier.stats.step, its_sparsifier.stats.step) == (0, 3)
    assert exactly_sparse(its_sparsifier)


@both_ways
def test_without_the_sparsifier_a_copy_refuses_to_train(copied: Callable[[Any], Any]) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, **SETTINGS).attach(optimizer)
    train(model, optimizer, 5)
    other, its_optimizer = copied((model, optimizer))
    before = values(other)
    loss_of(other).backward()
    with pytest.raises(RuntimeError, match="copy of .*attached.* together, or attach"):
        its_optimizer.step()
    assert same(values(other), before)
    its_optimizer.zero_grad()
    mine = Sparsifier(other, **SETTINGS)
    mine.load_state_dict(sparsifier.state_dict())
    mine.attach(its_optimizer)
    train(other, its_optimizer, 15, 5)
    train(model, optimizer, 15, 5)
    assert same(values(model), values(other))


def test_a_state_loaded_into_a_plain_optimizer_is_no_copy() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(model, **SETTINGS).attach(optimizer)
    train(model, optimizer, 20)
    state = optimizer.state_dict()
    sparsifier.finalize()
    sparsifier.detach()
    other = SGD(net().parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(state)
    other.step()
    assert torch.is_tensor(state["param_groups"][0]["spartan"]["weights"]["0.weight"]["theta"])
