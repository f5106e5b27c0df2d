"""`benchmarks/explore.py`: real runs, side by side, whose rows are there as soon as they end and are not made again."""

from __future__ import annotations

import csv
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

EXPLORE = Path(__file__).parents[3] / "benchmarks" / "explore.py"
DENSE = "digits method=dense epochs=1 seed=1"
# The second is of the method explore, which only the script knows.
LINES = [
    "digits method=paced epochs=1",
    "digits epochs=1 method_args.p=3",
    DENSE,
    "digits method=dense epochs=1 seed=2",
]


def explore(tmp_path: Path, lines: list[str], *more: object) -> subprocess.Popen[str]:
    (tmp_path / "list.txt").write_text("\n".join(["# a remark", *lines, ""]))
    command = [sys.executable, str(EXPLORE), "list.txt", "--csv", "rows.csv", "--out", "runs", *map(str, more)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "SPARTAN_COMMIT": "here"}
    return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def rows(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_lines_become_rows_once(tmp_path: Path) -> None:
    """A row of before a method's last change, a failed one and one of another seed stand for no line."""
    (tmp_path / "rows.csv").write_text(
        "date,commit,device,torch,recipe,settings,seed,metric,result,seconds,failure\n"
        "2026-01-01,c14dda9,cpu,2,digits,method=paced epochs=1,0,top1,11.0,1,\n"
        "2026-01-01,abcdef0,cpu,2,digits,epochs=1 method=dense,0,top1,12.0,1,\n"
        "2026-01-01,abcdef0,cpu,2,digits,epochs=1 method=dense,2,top1,13.0,1,\n"
        "2026-01-01,abcdef0,cpu,2,digits,method=dense epochs=1,1,,,1,it broke\n"
    )
    out, err = (first := explore(tmp_path, LINES, "--jobs", 2)).communicate(timeout=300)
    assert first.returncode == 0, err
    assert "4 lines, 1 of them in rows.csv already" in out
    made = rows(tmp_path)[4:]
    assert {row["commit"] for row in made} == {"here"}
    assert {(row["settings"], row["seed"], row["failure"]) for row in made} == {
        ("method=paced epochs=1", "0", ""),
        ("method=explore epochs=1 method_args.p=3", "0", ""),
        ("method=dense epochs=1", "1", ""),
    }
    assert all(row["metric"] == "top1" and 5 < float(row["result"]) <= 100 for row in made)
    assert all(1 <= float(row["seconds"]) < 300 for row in made)
    assert (tmp_path / "rows.log").read_text().startswith("digits method=explore epochs=1 method_args.p=3\tstep=")
    out, err = (again := explore(tmp_path, LINES)).communicate(timeout=300)
    assert again.returncode == 0, err
    assert "4 lines, 4 of them in rows.csv already" in out
    assert len(rows(tmp_path)) == 7


def test_a_failing_line_is_a_row_and_no_end(tmp_path: Path) -> None:
    out, err = (
        process := explore(tmp_path, [DENSE, "digits epochs=1 method=spartn"], "--jobs", 1, "--seconds", 200)
    ).communicate(timeout=300)
    assert process.returncode == 0, err
    assert "digits epochs=1 method=spartn: exit code 2; log: " in out
    failed, good = sorted(rows(tmp_path), key=lambda row: row["failure"], reverse=True)
    assert "'spartn' is unknown" in failed["failure"]
    assert (failed["result"], good["failure"]) == ("", "")


def test_a_mistake_in_a_line_is_found_before_anything_runs(tmp_path: Path) -> None:
    _, err = (process := explore(tmp_path, [DENSE, "digits epoch=1"])).communicate(timeout=300)
    assert process.returncode == 1
    assert err.startswith("digits epoch=1: ")
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere runs outlive those who start them")
def test_killed_it_has_lost_no_finished_run_and_leaves_none_behind(tmp_path: Path) -> None:
    lines = [DENSE, "digits method=dense epochs=500", "digits method=imp epochs=500"]
    process = explore(tmp_path, lines, "--jobs", 1)
    running = tmp_path / "runs" / "here" / "dense-0.95-epochs=500-seed0"
    deadline = time.monotonic() + 120
    while not (running / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert [row["seed"] for row in rows(tmp_path)] == ["1"]
    while not list(running.glob("checkpoints/*.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    size = (running / "metrics.jsonl").stat().st_size
    time.sleep(1.0)
    assert (running / "metrics.jsonl").stat().st_size == size  # it has saved and ended


def test_with_seconds_nothing_is_begun_that_would_not_end(tmp_path: Path) -> None:
    lines = [DENSE, "digits method=dense epochs=4000", "digits method=dense epochs=1 seed=3"]
    began = time.monotonic()
    out, err = (process := explore(tmp_path, lines, "--jobs", 1, "--seconds", 75)).communicate(timeout=300)
    assert process.returncode == 0, err
    assert time.monotonic() - began < 75
    assert "out of time: 1 of 3 runs are left" in out
    assert sorted(row["seed"] for row in rows(tmp_path)) == ["1", "3"]


def test_runs_of_the_papers_exhibits_are_not_missing_in_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with nothing else set: with a β of its own, or another length, a run is another."""
    monkeypatch.syspath_prepend(EXPLORE.parent)
    compare = importlib.import_module("compare")
    runs = [
        *("cifar10-wrn22 method=srste sparsity=0.99 seed=0", "cifar10-vit method=movement pattern=[16, 16] seed=0"),
        *("cifar10-wrn22 method=set sparsity=0.99 epochs=120 seed=0", "bytes-gpt method=svite budget=erk seed=0"),
    ]
    records = {run: {"run": run, "top1": 0.5, "commit": "here"} for run in runs}
    for name in ("cifar10.csv", "bytes_gpt.csv", "explore.csv"):
        (tmp_path / name).write_text("recipe\n")  # no rows
    monkeypatch.setattr(compare, "HERE", tmp_path)
    monkeypatch.setattr(compare, "Results", lambda scale: SimpleNamespace(records={}))
    before = compare.missing(compare.read())
    monkeypatch.setattr(compare, "Results", lambda scale: SimpleNamespace(records=records))
    scores = compare.read()
    gone = set(before) - set(compare.missing(scores))
    assert gone == {
        "cifar10-wrn22 method=srste sparsity=0.99 seed=0",
        "cifar10-vit method=movement sparsity=0.9 pattern=[16,16] seed=0",
    }
    assert scores["cifar10-wrn22", 0.99, ""]["srste"][0] == (50.0, "here")
    assert scores["cifar10-vit", 0.9, "pattern=[16,16]"]["movement"][0] == (50.0, "here")
