"""`spartan train` on several real processes: the same run as on one, and one end for all of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from spartan.app.cli import app
from spartan.app.train.checkpoint import checkpoints
from spartan.app.train.config import RecipeError, from_dict, to_yaml
from spartan.app.train.folder import check_resume_settings, choose_folder, run_name
from spartan.app.train.parallel import distribute
from spartan.app.train.processes import Processes, choose_device, joined, micro_batch
from tests.distributed.launching import Launched, free_port, launch, wait_for, weights

FLOAT64 = ("epochs=2", "batch_size=128", "model=tests.app.train.small_models:float64", "data.pad=1")
BATCH_NORM = ("epochs=3", "batch_size=128", "data.pad=1", "checkpoint_steps=4")


def train(*sets: str, out: str = "run") -> list[object]:
    return ["train", "digits", "--out", out, *(x for s in sets for x in ("--set", s))]


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if x["kind"] == kind]


def close(a: Path, b: Path, most: float) -> None:
    assert weights(a).keys() == weights(b).keys()
    for name, weight in weights(a).items():
        assert torch.equal(weight != 0, weights(b)[name] != 0), name
        assert (weight - weights(b)[name]).abs().max() <= most, name


# ---------------------------------------------------------------------- the same run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    launch(folder, 1, *train(*FLOAT64))
    return folder / "run"


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (2, ()),
        (4, ("micro_batch=16",)),  # gradients accumulate over two passes
        (2, ("micro_batch=128",)),  # more than a process has: it takes what it has
    ],
    ids=["2", "4 accumulating", "2 large"],
)
def test_the_number_of_processes_changes_nothing_but_rounding(
    alone: Path, tmp_path: Path, world: int, more: tuple[str, ...]
) -> None:
    processes = launch(tmp_path, world, *train(*FLOAT64, *more))
    run = tmp_path / "run"
    close(run, alone, 1e-12)
    for mine, theirs in zip(lines(run, "step"), lines(alone, "step"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6), "the loss is the mean over the whole batch"
        assert mine["lr"] == theirs["lr"]
        assert mine["density"] == theirs["density"]
    for mine, theirs in zip(lines(run, "epoch"), lines(alone, "epoch"), strict=True):
        assert (mine["top1"], mine["top5"]) == (theirs["top1"], theirs["top5"]), "every test image counts once"
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-6)
        assert mine["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-6)
    assert f"on {world} processes" in processes.out(0)
    assert [processes.out(r) + processes.err(r) for r in range(1, world)] == [""] * (world - 1), "only one speaks"
    assert json.loads((run / "environment.json").read_text())["processes"] == world


def test_mixing_goes_by_micro_batches_whoever_has_them(tmp_path: Path) -> None:
    """Two processes with 64 images each do what one does in two passes of 64."""
    sets = (*FLOAT64, "epochs=1", "mixup=0.2", "cutmix=1.0")
    launch(tmp_path / "one", 1, *train(*sets, "micro_batch=64"))
    launch(tmp_path / "two", 2, *train(*sets))
    close(tmp_path / "two/run", tmp_path / "one/run", 1e-12)


# ---------------------------------------------------------------------- stopping and going on


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of two processes, with batch norm and so with statistics of each process's own."""
    folder = tmp_path_factory.mktemp("pair")
    launch(folder, 2, *train(*BATCH_NORM))
    return folder / "run"


def test_a_signal_to_one_process_saves_and_stops_all(pair: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Launched(tmp_path, 2, *train(*BATCH_NORM, "epochs=3", "checkpoint_steps=0", "checkpoint_epochs=99")) as both:
        # With steps in it, in which both processes took part: earlier, a signal may find one of them still starting.
        wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
        os.kill(both.pids[1], signal.SIGTERM)
        os.kill(both.pids[1], signal.SIGTERM)  # as a launcher does, once more
        assert both.wait() == [128 + signal.SIGTERM] * 2
        assert both.err(0).strip() == "stopped by SIGTERM; continue with: spartan train --resume run"
        assert both.err(1) == ""
    assert len(checkpoints(run)) == 1
    launch(tmp_path, 2, "train", "--resume", "run", "--quiet")
    for name, weight in weights(pair).items():
        assert torch.equal(weights(run)[name], weight), name
    clean = [{k: v for k, v in x.items() if k not in ("seconds", "images_per_s")} for x in lines(run, "epoch")]
    assert clean == [{k: v for k, v in x.items() if k not in ("seconds", "images_per_s")} for x in lines(pair, "epoch")]


def test_a_run_goes_on_with_another_number_of_processes(alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Launched(tmp_path, 2, *train(*FLOAT64, "checkpoint_steps=3")) as both:
        wait_for(lambda: checkpoints(run))
        os.kill(both.pids[0], signal.SIGTERM)
        assert both.wait() == [128 + signal.SIGTERM] * 2
    assert not (run / "summary.json").exists()
    launch(tmp_path, 1, "train", "--resume", "run", "--quiet")
    close(run, alone, 1e-12)
    losses = [[x["loss"] for x in lines(r, "step")] for r in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_first_process_decides_what_is_done(pair: Path, tmp_path: Path) -> None:
    """On one machine the folder is there already, on another it was not yet."""
    with Launched(tmp_path, 2, *train(*BATCH_NORM)) as both:
        wait_for(lambda: checkpoints(tmp_path / "run"))
        for pid in both.pids.values():
            os.kill(pid, signal.SIGKILL)
        both.wait()
    port = str(free_port())
    with (
        Launched(tmp_path, 2, "train", "--resume", "run", ranks=range(1), MASTER_PORT=port) as first,
        Launched(tmp_path, 2, *train("epochs=99", out="elsewhere"), ranks=range(1, 2), MASTER_PORT=port) as second,
    ):
        assert first.wait() == second.wait() == [0], first.err(0) + second.err(1)
    assert not (tmp_path / "elsewhere").exists()
    for name, weight in weights(pair).items():
        assert torch.equal(weights(tmp_path / "run")[name], weight), name


def test_every_process_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    """Killed and resumed, dropout goes on where it was on each of them."""
    sets = ("epochs=2", "model=tests.app.train.small_models:dropout", "checkpoint_steps=5")
    launch(tmp_path / "whole", 2, *train(*sets))
    with Launched(tmp_path / "cut", 2, *train(*sets)) as both:
        wait_for(lambda: checkpoints(tmp_path / "cut/run"))
        for pid in both.pids.values():
            os.kill(pid, signal.SIGKILL)
        assert both.wait() == [-signal.SIGKILL] * 2
    newest = torch.load(checkpoints(tmp_path / "cut/run")[0], weights_only=True)
    states = [own["rng"]["torch"] for own in newest["own"]]
    assert len(states) == 2
    assert not torch.equal(*states)
    launch(tmp_path / "cut", 2, "train", "--resume", "run", "--quiet")
    for name, weight in weights(tmp_path / "whole/run").items():
        assert torch.equal(weights(tmp_path / "cut/run")[name], weight), name


# ---------------------------------------------------------------------- failing together


@pytest.mark.parametrize(
    ("model", "rank", "code", "words"),
    [
        ("nan_gradients", 0, 1, "error: the gradient of 1.weight holds NaN or infinite values at step 2"),
        ("nan_gradients", 1, 1, "error: the gradient of 1.weight holds NaN or infinite values at step 2"),
        ("fails", 1, 2, "error: process 1 has had enough"),
    ],
)
def test_what_fails_one_fails_all_with_the_same_words(
    tmp_path: Path, model: str, rank: int, code: int, words: str
) -> None:
    sets = (f"model=tests.app.train.small_models:{model}", f"model_args={{rank: {rank}}}")
    with Launched(tmp_path, 2, *train(*sets)) as both:
        assert both.wait(30) == [code] * 2
    last = [both.err(r).splitlines()[-1] for r in range(2)]  # torch may have said something before
    assert last[0].startswith(words)
    assert last[0] == last[1]


def test_a_process_that_vanishes_is_missed(tmp_path: Path) -> None:
    with Launched(tmp_path, 2, *train("model=tests.app.train.small_models:vanishes", "model_args={rank: 1}")) as both:
        assert both.wait(30) == [1, 9]
    words = "error: one of the 2 processes ended or fell silent without a word; process 0 ends too: "
    assert both.err(0).splitlines()[-1].startswith(words)


@pytest.mark.slow
def test_a_process_that_falls_silent_is_waited_for_so_long(tmp_path: Path) -> None:
    with Launched(tmp_path, 2, *train("epochs=99"), SPARTAN_TIMEOUT="5") as both:
        wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists())
        silent = both.pids.pop(1)
        os.kill(silent, signal.SIGSTOP)
        try:
            assert both.wait(40) == [1]
        finally:
            os.kill(silent, signal.SIGKILL)
            os.waitpid(silent, 0)
    assert "one of the 2 processes ended or fell silent" in both.err(0)


def test_a_process_that_never_comes_is_waited_for_so_long(tmp_path: Path) -> None:
    started = time.monotonic()
    with Launched(tmp_path, 2, *train(), ranks=range(1), SPARTAN_TIMEOUT="2") as one:
        assert one.wait(30) == [1]
    assert time.monotonic() - started < 20
    assert one.err(0).startswith("error: process 0 waited for 2 processes to meet at 127.0.0.1:")
    assert "at most 2 s (SPARTAN_TIMEOUT), and they did not all come" in one.err(0)
    assert not (tmp_path / "run").exists()


def test_mistakes_are_found_before_anything_is_written(tmp_path: Path) -> None:
    with Launched(tmp_path, 3, *train("batch_size=128")) as three:
        assert three.wait(30) == [2] * 3
    assert all("batch_size: 128 cannot be divided among 3 processes" in three.err(r) for r in range(3))
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- in one process


@pytest.mark.parametrize(
    ("values", "world", "words"),
    [
        ({"batch_size": 100}, 8, "batch_size: 100 .* must be a multiple of 8"),
        ({"batch_size": 96, "micro_batch": 32}, 2, "micro_batch: 32 must divide 48"),
    ],
)
def test_batches_that_cannot_be_shared(values: dict[str, Any], world: int, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        micro_batch(from_dict(values), world)


def test_devices_belong_to_one_process() -> None:
    assert choose_device("cpu", Processes(1, 2, 1)).type == "cpu"
    with pytest.raises(RecipeError, match="'cuda:0' would be shared by 2 processes"):
        choose_device("cuda:0", Processes(1, 2, 1))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_batch_norm_over_all_processes_needs_gpus(parallel: str) -> None:
    words = "sync_bn: torch's SyncBatchNorm needs GPUs, and the model is on cpu"
    recipe = from_dict({"sync_bn": True, "parallel": parallel})
    with pytest.raises(RecipeError, match=words):
        distribute(recipe, torch.nn.Linear(2, 2), Processes(0, 2), 1, torch.device("cpu"))


def test_copies_are_not_saved_on_the_side() -> None:
    with pytest.raises(RecipeError, match="checkpoint_async: it needs parallel: fsdp2, not ddp"):
        from_dict({"checkpoint_async": True})


def test_what_a_run_computes_does_not_change_on_the_way() -> None:
    check_resume_settings(["parallel=fsdp2", "device=cpu", "data.workers=2"])
    for key in ("epochs", "batch_size", "data.pad", "paralel"):
        with pytest.raises(RecipeError, match=f"cannot be combined with --set {key}, but with --set of .*parallel"):
            check_resume_settings(["parallel=ddp", f"{key}=2"])


def test_a_sweep_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["sweep", "digits", "--set", "sparsity=.9,.95"])
    assert (result.exit_code, "start it once, without torchrun" in result.output) == (2, True)


@pytest.mark.parametrize(("variable", "value"), [("RANK", ""), ("LOCAL_RANK", "first"), ("SPARTAN_TIMEOUT", "soon")])
def test_an_environment_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    monkeypatch.setenv(variable, value)
    with pytest.raises(RecipeError, match=f"{variable}: the environment variable is .*whole number"), joined():
        pass


def test_who_continues_a_run_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, other = from_dict({}), from_dict({"epochs": 3})
    usual = Path("runs") / run_name("digits", config)
    for folder in (usual, tmp_path / "mine"):
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(to_yaml(config))
    # Only torchrun's restart of the very same recipe does so unasked.
    assert choose_folder("digits", config, tmp_path / "mine", again=True) == (tmp_path / "mine", True)
    assert choose_folder("digits", config, tmp_path / "new", again=True) == (tmp_path / "new", False)
    for recipe, again in ((config, False), (other, True)):
        with pytest.raises(RecipeError, match="mine holds a run already"):
            choose_folder("digits", recipe, tmp_path / "mine", again)
    assert choose_folder("digits", config, None, again=True) == (usual, True)
    assert choose_folder("digits", config, None, again=False) == (usual.with_name(usual.name + "-2"), False)
    assert choose_folder("digits", other, None, again=True) == (usual.with_name(usual.name + "-2"), False)
    (usual / "summary.json").write_text("{}")
    assert choose_folder("digits", config, None, again=True) == (usual.with_name(usual.name + "-2"), False)
