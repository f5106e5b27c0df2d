"""What is noted is run once, in order, when nobody holds it back any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spartan.solvers.triton.replay import Replay

Noted = tuple[Replay, list[str], Callable[[str], None]]


@pytest.fixture
def noted() -> Noted:
    replay, done = Replay(torch.device("cpu")), list[str]()
    return replay, done, lambda name: replay(name, lambda: done.append(name))


def test_sequences_inside_run_as_one_at_its_end(noted: Noted) -> None:
    replay, done, note = noted
    note("alone")
    with replay.as_one():
        note("teach")
        note("where")
        assert done == ["alone"]
    assert done == ["alone", "teach", "where"]
    note("after")
    assert done[-1] == "after"


def test_inside_a_hold_they_wait_for_its_end(noted: Noted) -> None:
    replay, done, note = noted
    replay.hold()
    note("take")
    with replay.as_one():
        note("teach")
    assert done == []
    replay.release()
    assert done == ["take", "teach"]


def test_an_error_inside_leaves_nothing_held(noted: Noted) -> None:
    replay, done, note = noted

    def fails() -> None:
        with replay.as_one():
            note("teach")
            raise ValueError("none of ours")

    with pytest.raises(ValueError, match="none of ours"):
        fails()
    assert done == ["teach"]
    note("after")
    assert done == ["teach", "after"]


def test_the_same_sequence_twice_runs_twice(noted: Noted) -> None:
    replay, done, note = noted
    with replay.as_one():
        note("teach")
        note("teach")
    assert done == ["teach", "teach"]
