"""torch.distributed.checkpoint's state dicts in one process: they carry the run, and making them changes nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Optimizer

from spartan import Sparsifier
from tests.training import SETTINGS, loss_of, net, same, thetas, train, values

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw, tensor rate": lambda p: AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def start(kind: str, method: str) -> tuple[Any, Optimizer, Sparsifier]:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, Sparsifier(model, method=method, **SETTINGS).attach(optimizer)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("method", ["spartan", "rigl", "dense"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_resumes_and_creating_state_is_no_step(kind: str, method: str, flat: bool) -> None:
    """Before the first step torch makes one itself, with learning rates and gradients of zero, to have state."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    (model, optimizer, sparsifier), twin = start(kind, method), start(kind, method)
    before, theta = values(model), thetas(sparsifier)
    get_state_dict(model, optimizer, options=options)
    assert optimizer.state or kind == "sgd"
    assert sparsifier.stats.step == 0
    assert same(values(model), before)
    assert same(thetas(sparsifier), theta)
    twin_state = copy.deepcopy(optimizer.state_dict()["state"])
    train(model, optimizer, 9)
    if not twin_state:  # what AdamW has counted then is torch's own doing
        train(*twin[:2], 9)
        assert same(values(model), values(twin[0]))
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    train(model, optimizer, 11, 9)
    again, its_optimizer, its_sparsifier = start(kind, method)
    set_state_dict(again, its_optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    assert its_sparsifier.stats.step == 9
    train(again, its_optimizer, 11, 9)
    assert same(values(model), values(again))
    for each in (sparsifier, its_sparsifier):
        each.finalize()


def test_a_schedule_that_begins_at_zero_begins_with_a_step() -> None:
    """Its gradients are not zero."""
    model, optimizer, sparsifier = start("momentum", "spartan")
    optimizer.param_groups[0]["lr"] = 0.0
    loss_of(model).backward()
    optimizer.step()
    assert sparsifier.stats.step == 1
