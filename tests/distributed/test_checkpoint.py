"""Saved on N processes, loaded on M, training continues as if it had never stopped."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spartan.state.sharded import load_sharded, save_sharded
from tests.distributed.cases import STEPS, Case, run, shard, train, weights
from tests.distributed.workers import on

Stops = list[tuple[Case, int]]
# A step while masks still change, and one when they are fixed; stored masks, learned scores, N:M's many duals.
SOME: Stops = [(Case("spartan"), 7), (Case("spartan"), 17), (Case("movement"), 7)]
OTHERS: Stops = [
    (Case("spartan", "block", even=True), 7),
    (Case("spartan", "nm", "global"), 7),
    (Case("str"), 7),
    (Case("probmask"), 7),
    (Case("rigl"), 7),
    (Case("rigl"), 17),
]


def name(case: Case, stop: int, how: str) -> str:
    return f"{case.method}-{case.pattern}-{stop}-{how}"


def save(rank: int, folder: str, stops: Stops, how: str, asynchronous: bool = False) -> None:
    for case, stop in stops:
        model = shard(case.model(), how)
        s, o = case.sparsifier(model)
        for _ in train(model, s, o, how, range(stop)):
            pass
        writing = save_sharded(Path(folder) / name(case, stop, how), model, o, s, asynchronous)
        if asynchronous:
            writing.result()


@functools.cache
def never_stopped(case: Case) -> list[dict[str, Tensor]]:
    return run(case, "alone")[0]


def go_on(rank: int, folder: str, stops: Stops, saved: str, how: str) -> list[str]:
    """What is different from a run that was never stopped, after going on from a saved one."""
    found = []
    for case, stop in stops:
        expected = never_stopped(case)
        model = shard(case.model(), how)
        s, o = case.sparsifier(model)
        load_sharded(Path(folder) / name(case, stop, saved), model, o, s)
        steps = [weights(model), *train(model, s, o, how, range(stop, STEPS))]
        for step, (a, b) in enumerate(zip(expected[stop:], steps, strict=True), stop):
            for key in a:
                what = f"{name(case, stop, saved)} on {how}: {key} at step {step}"
                if not torch.equal(a[key] != 0, b[key] != 0):
                    found.append(f"support of {what}")
                elif float((a[key] - b[key]).abs().max()) > 1e-12:
                    found.append(f"{what} by {float((a[key] - b[key]).abs().max()):.1e}")
    return found[:5]


def both(rank: int, folder: str, stops: Stops) -> None:
    save(rank, folder, stops, "fsdp", asynchronous=True)
    save(rank, folder, stops, "ddp")


def all_ways(rank: int, folder: str, stops: Stops) -> list[str]:
    ways = (("fsdp", "fsdp"), ("alone", "fsdp"), ("fsdp", "ddp"))
    return [x for saved, how in ways[: 2 if stops == SOME else 3] for x in go_on(rank, folder, stops, saved, how)]


@pytest.mark.parametrize("stops", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_saved_on_2_and_loaded_on_1_and_4(tmp_path: Path, stops: Stops) -> None:
    folder = str(tmp_path)
    on(2, both, folder, stops)
    assert go_on(0, folder, stops, "fsdp", "alone") == []
    assert go_on(0, folder, stops, "ddp", "alone") == []
    save(0, folder, stops, "alone")
    for found in on(4, all_ways, folder, stops):
        assert found == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as save_something

    case = Case("imp")
    model = case.model()
    s, o = case.sparsifier(model)
    with pytest.warns(UserWarning, match="single process"):
        save_something({"x": torch.zeros(2)}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="holds no training state"):
        load_sharded(tmp_path, model, o, s)
