"""Killed at any moment and resumed, a run ends with the weights of an undisturbed one, bit for bit.

Real processes and real signals; each child is forked from this one, so that nothing is imported anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spartan.app.train.checkpoint import checkpoints
from spartan.app.train.config import Config, RecipeError, load_recipe
from spartan.app.train.loop import resume, train
from spartan.files import read

RECIPE = ["epochs=4", "data.pad=1", "checkpoint_steps=5", "batch_size=128"]


def config(*sets: str) -> Config:
    return load_recipe("digits", [*RECIPE, *sets])


def child(work: Callable[[], Any]) -> int:
    """Run in a process of its own; returns its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read(run / "model.safetensors")


def epochs(run: Path) -> list[dict[str, Any]]:
    """The epoch records without their times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if k not in ("seconds", "images_per_s")} for x in lines if x["kind"] == "epoch"]


def steps(run: Path) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if x["kind"] == "step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    started = time.monotonic()
    assert wait(child(lambda: train(config(), run, quiet=True))) == 0
    return run, time.monotonic() - started


def same(run: Path, reference: Path) -> None:
    for name, weight in weights(reference).items():
        assert torch.equal(weights(run)[name], weight), name
    assert epochs(run) == epochs(reference)
    assert steps(run) == steps(reference)
    assert (run / "masks.npz").read_bytes() == (reference / "masks.npz").read_bytes()


def length(run: Path) -> int:
    """Lines of metrics that a run has written."""
    path = run / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_sigkill_at_ten_random_moments(undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    reference, duration = undisturbed
    moments = random.Random(0)
    killed = 0
    for i in range(10):
        run = tmp_path / f"run{i}"
        pid = child(lambda run=run: train(config(), run, quiet=True))  # type: ignore[misc]
        # Several blows, so that resumed runs are killed as well.
        for _ in range(1 + i % 3):
            # By how far the run has come, not by the clock: on a busy machine a run may be done before a blow falls.
            far = moments.randrange(length(reference))
            while length(run) < far and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.002)
            time.sleep(moments.uniform(0.0, 0.05 * duration))
            os.kill(pid, signal.SIGKILL)
            killed += wait(pid) == -signal.SIGKILL
            pid = child(lambda run=run: resume(run, quiet=True) if run.exists() else train(config(), run, quiet=True))  # type: ignore[misc]
        assert wait(pid) == 0
        same(run, reference)
    assert killed >= 10, "most blows must hit a living process"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_signal_saves_and_says_how_to_go_on(
    undisturbed: tuple[Path, float], tmp_path: Path, number: signal.Signals
) -> None:
    reference, _ = undisturbed
    run = tmp_path / "run"
    pid = child(lambda: train(config("checkpoint_steps=0", "checkpoint_epochs=99"), run, quiet=True))
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(pid, number)
    assert wait(pid) == 128 + number
    assert len(checkpoints(run)) == 1, "a signal saves even where no checkpoint was due"
    assert not (run / "summary.json").exists()
    assert wait(child(lambda: resume(run, quiet=True))) == 0
    for name, weight in weights(reference).items():
        assert torch.equal(weights(run)[name], weight), name


def test_a_run_in_progress_is_not_resumed_beside_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid = child(lambda: train(config("epochs=40"), run, quiet=True))
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    with pytest.raises(RecipeError, match="is being trained by another process"):
        resume(run, quiet=True)
    os.kill(pid, signal.SIGKILL)
    wait(pid)


def test_a_finished_run_is_left_alone(undisturbed: tuple[Path, float]) -> None:
    reference, _ = undisturbed
    before = {p: p.stat().st_mtime_ns for p in reference.rglob("*")}
    assert resume(reference, quiet=True) == json.loads((reference / "summary.json").read_text())
    assert before == {p: p.stat().st_mtime_ns for p in reference.rglob("*")}


def test_a_run_killed_after_its_last_checkpoint_is_finished(undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    reference, _ = undisturbed
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    for name in ("summary.json", "model.safetensors", "masks.npz"):
        (run / name).unlink()
    assert wait(child(lambda: resume(run, quiet=True))) == 0
    same(run, reference)


def test_a_damaged_checkpoint_falls_back(
    undisturbed: tuple[Path, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reference, _ = undisturbed
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    (run / "summary.json").unlink()
    newest = checkpoints(run)[0]
    newest.write_bytes(newest.read_bytes()[:-1000])
    assert wait(child(lambda: resume(run, quiet=True))) == 0
    assert f"{newest.name} is damaged" in capfd.readouterr().err
    same(run, reference)


@pytest.mark.parametrize(
    "sets",
    [
        ["model=tests.app.train.small_models:dropout"],
        ["method=topkast", "amp=bf16"],
        ["method=imp", "mixup=0.2", "clip=1.0", "micro_batch=64"],
        ["method=probmask", "micro_batch=64"],
        ["method=rigl", "method_args.every=3"],
    ],
)
def test_other_settings_resume_too(tmp_path: Path, sets: list[str]) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert wait(child(lambda: train(config(*sets), whole, quiet=True))) == 0
    pid = child(lambda: train(config(*sets), cut, quiet=True))
    while not (cut.exists() and checkpoints(cut)):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    wait(pid)
    assert wait(child(lambda: resume(cut, quiet=True))) == 0
    same(cut, whole)
