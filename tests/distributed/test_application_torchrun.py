"""Under torchrun itself: a killed worker, a polite end, an error that all share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from spartan.app.train.checkpoint import checkpoints
from tests.distributed.launching import ROOT, free_port, launch, wait_for, weights

SETS = ("epochs=6", "batch_size=128", "data.pad=1", "checkpoint_steps=5")
RECIPE = ["digits", *(x for s in SETS for x in ("--set", s))]


@contextmanager
def torchrun(
    folder: Path, *arguments: object, restarts: int = 0, standalone: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Two processes by torchrun; a session of their own, as a terminal would make."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    command += [
        "--standalone" if standalone else f"--master-port={free_port()}",
        "--monitor-interval=0.1",
        "-m",
        "spartan",
        *map(str, arguments),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    folder.mkdir(exist_ok=True)
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=err, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def worker(launcher: int, rank: int) -> int:
    """The process id of a worker."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"torchrun has no worker {rank}")


def steps(run: Path) -> int:
    return max((int(p.stem.removeprefix("step-")) for p in checkpoints(run)), default=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    launch(folder, 2, "train", *RECIPE, "--out", "run")
    return folder / "run"


def same(run: Path, reference: Path) -> None:
    for name, weight in weights(reference).items():
        assert torch.equal(weights(run)[name], weight), name
    assert (run / "masks.npz").read_bytes() == (reference / "masks.npz").read_bytes()


@pytest.mark.parametrize(
    ("rank", "standalone"),
    [(1, False), pytest.param(0, False, marks=pytest.mark.slow), pytest.param(1, True, marks=pytest.mark.slow)],
)
def test_a_killed_worker_changes_nothing(undisturbed: Path, tmp_path: Path, rank: int, standalone: bool) -> None:
    run = tmp_path / "run"
    with torchrun(tmp_path, "train", *RECIPE, "--out", run, restarts=1, standalone=standalone) as process:
        wait_for(lambda: steps(run) >= 10)
        os.kill(worker(process.pid, rank), signal.SIGKILL)
        assert process.wait(120) == 0, (tmp_path / "err").read_text()
    said = (tmp_path / "out").read_text()
    assert f"continuing {run} on 2 processes" in said
    assert said.count("epoch 6/6") == 1
    same(run, undisturbed)


@pytest.mark.slow
def test_a_restart_finds_a_folder_that_nobody_named(undisturbed: Path, tmp_path: Path) -> None:
    launch(tmp_path, 1, "train", "digits", "--set", "epochs=1", "--quiet")  # another recipe under the same name
    run = tmp_path / "runs/digits-spartan-0.95-seed0-2"
    with torchrun(tmp_path, "train", *RECIPE, restarts=1) as process:
        wait_for(lambda: steps(run) >= 10)
        os.kill(worker(process.pid, 1), signal.SIGKILL)
        assert process.wait(120) == 0, (tmp_path / "err").read_text()
    assert len(list((tmp_path / "runs").iterdir())) == 2
    same(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_end_and_a_new_beginning(undisturbed: Path, tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM reaches the launcher, Ctrl-C everyone in the terminal and the workers twice."""
    run, recipe = tmp_path / "run", [*RECIPE, "--set", "checkpoint_steps=0", "--set", "checkpoint_epochs=99"]
    with torchrun(tmp_path, "train", *recipe, "--out", run) as process:
        wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
        process.send_signal(number) if number == signal.SIGTERM else os.killpg(process.pid, number)
        assert process.wait(25) != 0, "well before the launcher loses its patience and kills"
    assert f"stopped by {number.name}; continue with: spartan train --resume {run}" in (tmp_path / "err").read_text()
    assert len(checkpoints(run)) == 1
    assert not (run / "summary.json").exists()
    with torchrun(tmp_path, "train", "--resume", run) as process:
        assert process.wait(120) == 0, (tmp_path / "err").read_text()
    same(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"),
    [("nan_gradients", "error: the gradient of 1.weight holds NaN"), ("fails", "error: process 0 has had enough")],
)
def test_an_error_ends_all(tmp_path: Path, model: str, words: str) -> None:
    sets = ["--set", f"model=tests.app.train.small_models:{model}", "--set", "model_args={rank: 0}"]
    with torchrun(tmp_path, "train", "digits", *sets, "--out", "run") as process:
        assert process.wait(60) != 0
    assert (tmp_path / "err").read_text().count(words) == 2, "both say so"
