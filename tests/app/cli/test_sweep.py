"""Sweeps: the grid, and real runs of it that finish, fail, are skipped and continued."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spartan.app.cli import app
from spartan.app.runs import epochs_done, is_finished, read_run
from spartan.app.train.config import RecipeError
from spartan.app.train.sweep import Outcome, Sweep, SweepDisplay, grid, out_of_time, plan, split_values
from spartan.app.train.time_limit import LAST_RUNS, STOP_SECONDS, TimeLimit
from tests.app.cli.test_compare import make_run


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net is small: threads that wait for one another on busy cores make it many times slower."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (".9,.95", [".9", ".95"]),
        ("imp", ["imp"]),
        ("", [""]),
        ("[16, 16],unstructured", ["[16, 16]", "unstructured"]),
        ("{beta: [1, 5]}, {beta: [1, 10]}", ["{beta: [1, 5]}", "{beta: [1, 10]}"]),
        ("'a,b',c", ["'a,b'", "c"]),
    ],
)
def test_commas_split_outside_brackets(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_the_grid_is_every_combination() -> None:
    points = grid(["method=a,b", "epochs=1"], seeds=2)
    assert points == [
        ("method=a", "epochs=1", "seed=0"),
        ("method=a", "epochs=1", "seed=1"),
        ("method=b", "epochs=1", "seed=0"),
        ("method=b", "epochs=1", "seed=1"),
    ]
    assert grid(["seed=4,7"]) == [("seed=4",), ("seed=7",)]


@pytest.mark.parametrize(
    ("sets", "seeds", "words"),
    [
        (["epochs"], None, "write key=value"),
        (["sparsity=.9,,.95"], None, "write key=value"),
        (["sparsity=.9", "sparsity=.95"], None, "given twice"),
        (["seed=1,2"], 3, "give one of them"),
        ([], 0, "at least 1"),
    ],
)
def test_a_bad_grid_is_refused(sets: list[str], seeds: int | None, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        grid(sets, seeds)


def test_the_plan(tmp_path: Path) -> None:
    sets = ["method=imp,dense", "sparsity=.9,.95", "optimizer.lr=.1,.05", "model_args={a: 1},{}"]
    names = [job.folder.name for job in plan("digits", sets[:3], 2, tmp_path)]
    assert len(names) == 2 * 2 * 2 + 2 * 2  # dense once a seed and learning rate, whatever the sparsity
    assert "imp-0.95-optimizer.lr=.05-seed1" in names
    assert len(set(names)) == len(names)
    odd = plan("digits", sets[3:], None, tmp_path)
    assert [job.folder.name for job in odd] == [
        "paced-0.95-model_args=_a_1_-seed0",
        "paced-0.95-model_args=_-seed0",
    ]


def test_a_run_that_is_there_keeps_its_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "by-hand", "method=imp", "sparsity=.9", top1=0.9)
    make_run(tmp_path / "imp-0.95-seed0", "method=imp", "label_smoothing=0.3", top1=0.9)
    first, second = plan("digits", ["epochs=2", "method=imp", "sparsity=.9,.95"], None, tmp_path)
    assert first.folder.name == "by-hand"
    assert second.folder.name.startswith("imp-0.95-seed0-")  # the name is taken by a different run


def test_mistakes_in_the_grid_are_found_before_anything_runs(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    result = invoke("sweep", "digits", "--set", "sparsity=.9,1.5", "--out", out)
    assert result.exit_code == 2
    assert "sparsity: 1.5" in result.stderr
    assert not out.exists()
    run = make_run(tmp_path / "run", top1=0.9)
    assert "is a run itself" in invoke("sweep", "digits", "--out", run).stderr


def test_a_sweep_survives_failing_runs_and_skips_what_is_finished(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    sets = ["--set", "epochs=1", "--set", "sparsity=.9,.95", "--jobs", 2, "--out", out]
    result = invoke("sweep", "digits", *sets, "--set", "method=spartn,dense")
    assert result.exit_code == 1, result.output
    assert sorted(p.name for p in out.iterdir()) == ["dense-0.9-seed0", "logs", "report.html"]  # nothing half-made
    assert is_finished(out / "dense-0.9-seed0")
    assert result.stderr.count("error: method='spartn' is unknown (did you mean spartan?)") == 2
    assert result.stderr.count("failed: ") == 2
    assert "2 of 3 runs failed" in result.stderr
    assert "[3/3]" in result.stdout
    table = [line.split() for line in result.stdout.splitlines() if line.startswith("digits ")]
    assert [line[2:5] for line in table] == [["dense", "0", "1"]]  # once, whatever the sparsity

    before = (out / "dense-0.9-seed0" / "summary.json").stat().st_mtime_ns
    again = invoke("sweep", "digits", *sets, "--set", "method=dense")
    assert again.exit_code == 0, again.output
    assert "[1/1] skipped dense-0.9-seed0" in again.stdout
    assert (out / "dense-0.9-seed0" / "summary.json").stat().st_mtime_ns == before


def test_a_stopped_sweep_goes_on(tmp_path: Path) -> None:
    arguments = ["sweep", "digits", "--set", "epochs=12", "--out", str(tmp_path / "sweep")]
    command = [sys.executable, "-m", "spartan", *arguments, "--set", "method=imp,dense"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = tmp_path / "sweep" / "imp-0.95-seed0"
    deadline = time.monotonic() + 60
    while not list(first.glob("checkpoints/*.pt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command goes on" in err
    stopped = read_run(first)
    assert not stopped.finished
    assert not (tmp_path / "sweep" / "dense-0.95-seed0").exists()

    result = invoke(*arguments, "--set", "method=imp")
    assert result.exit_code == 0, result.output
    assert [line["epoch"] for line in read_run(first).epochs] == list(range(1, 13))
    assert read_run(first).finished


def test_a_limit_lets_runs_begin_that_would_end_by_what_others_took(tmp_path: Path) -> None:
    jobs = plan("digits", ["epochs=1,10,100"], None, tmp_path)
    alone = {1: 10.0, 10: 100.0, 100: 1000.0}
    limit = TimeLimit(time.monotonic() + 500 + STOP_SECONDS, lambda job: alone[job.config.epochs])
    assert all(map(limit.allows, jobs))  # nothing is known yet
    limit.add(jobs[0], 40.0)
    limit.add(jobs[0], 20.0)  # the slowest counts
    assert list(map(limit.allows, jobs)) == [True, True, False]
    other = dataclasses.replace(jobs[1], recipe="another")
    assert limit.allows(other)  # by those of other recipes, until there is one of its own
    limit.add(other, 600.0)
    assert not limit.allows(other)
    assert limit.allows(jobs[1])
    for _ in range(LAST_RUNS):
        limit.add(other, 100.0)  # the first ones had to compile
    assert limit.allows(other)
    # Three quarters of the longest are done.
    jobs[2].folder.mkdir()
    (jobs[2].folder / "metrics.jsonl").write_text('{"kind": "epoch", "epoch": 90}\n')
    assert limit.allows(jobs[2])
    late = TimeLimit(time.monotonic() + STOP_SECONDS - 1)
    assert not late.allows(jobs[0])


def test_at_the_end_of_its_time_a_sweep_has_stopped_what_runs(tmp_path: Path) -> None:
    """With everything known to be too long but the first, which is begun since nothing is known before it."""
    jobs = plan("digits", ["epochs=4000", "method=imp,dense"], None, tmp_path)
    began = time.monotonic()
    sweeper = Sweep(tmp_path, 1, TimeLimit(began + STOP_SECONDS + 12))
    with SweepDisplay(jobs, plain=True) as display:
        outcomes = sweeper.run(jobs, display)
    assert 12 <= time.monotonic() - began < STOP_SECONDS + 12
    assert not sweeper.stopped  # by no signal
    assert [outcome.state for outcome in outcomes] == ["stopped", "left"]
    assert out_of_time(outcomes) == "out of time: 2 of 2 runs are left; the same command goes on with them"
    assert list(jobs[0].folder.glob("checkpoints/*.pt"))
    assert not jobs[1].folder.exists()


def test_progress_is_read_from_the_end_of_the_metrics(tmp_path: Path) -> None:
    assert epochs_done(tmp_path) == 0
    lines = "".join(f'{{"kind": "step", "step": {i}, "epoch": {1 + i // 100}}}\n' for i in range(1000))
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert epochs_done(tmp_path) == 9


def test_the_bar_counts_what_is_left(tmp_path: Path) -> None:
    make_run(tmp_path / "done", "seed=0", top1=0.9)
    jobs = plan("digits", ["epochs=2"], 3, tmp_path)
    with SweepDisplay(jobs, plain=False) as display:
        (task,) = display._bar.tasks
        assert task.total == 4
        display.outcome(Outcome(jobs[0], "skipped"))
        display.show_epochs(1)
        assert (task.completed, task.description) == (1, "1/3 runs")
        display.outcome(Outcome(jobs[1], "failed"))
        assert (task.completed, task.description) == (2, "2/3 runs")


def test_runs_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert Sweep(tmp_path, 4)._environment()["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in Sweep(tmp_path, 1)._environment()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Sweep(tmp_path, 4)._environment()["OMP_NUM_THREADS"] == "3"
