"""A sparsifier among the states that torch.distributed.checkpoint saves and loads, as torchtitan does: exactly resumed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from spartan.integrations.torchtitan import Checkpointed
from tests.distributed.cases import STEPS, Case, run, shard, train, weights
from tests.distributed.workers import on

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# While masks still change, and when they are fixed; a method that keeps masks of its own; one that learns scores.
STOPS = [(Case("spartan"), 7), (Case("spartan"), 17), (Case("rigl"), 7), (Case("rigl"), 17)]


class Trained:
    """The model and the optimizer, as one of the states."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)


def begin(case: Case, how: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    model = shard(case.model(), how)
    sparsifier, optimizer = case.sparsifier(model)
    return model, sparsifier, optimizer, {"trained": Trained(model, optimizer), "sparsifier": Checkpointed(sparsifier)}


def stopped(rank: int, folder: str, how: str) -> None:
    for i, (case, stop) in enumerate(STOPS):
        model, sparsifier, optimizer, states = begin(case, how)
        for _ in train(model, sparsifier, optimizer, how, range(stop)):
            pass
        save(states, checkpoint_id=f"{folder}/{i}")


@functools.cache
def never_stopped(case: Case) -> list[dict[str, Tensor]]:
    return run(case, "alone")[0]


def go_on(rank: int, folder: str, how: str) -> list[str]:
    """What is different from a run that was never stopped."""
    found = []
    for i, (case, stop) in enumerate(STOPS):
        model, sparsifier, optimizer, states = begin(case, how)
        load(states, checkpoint_id=f"{folder}/{i}")
        steps = [weights(model), *train(model, sparsifier, optimizer, how, range(stop, STEPS))]
        for step, (a, b) in enumerate(zip(never_stopped(case)[stop:], steps, strict=True), stop):
            for key in a:
                if not torch.equal(a[key] != 0, b[key] != 0) or float((a[key] - b[key]).abs().max()) > 1e-12:
                    found.append(f"{case.method} stopped at {stop}: {key} at step {step}")
    return found[:5]


def test_alone(tmp_path: Path) -> None:
    stopped(0, str(tmp_path), "alone")
    assert go_on(0, str(tmp_path), "alone") == []


def both(rank: int, folder: str) -> list[str]:
    stopped(rank, folder, "fsdp")
    return go_on(rank, folder, "fsdp")


def test_in_shards_and_then_alone(tmp_path: Path) -> None:
    for found in on(2, both, str(tmp_path)):
        assert found == []
    assert go_on(0, str(tmp_path), "alone") == []
