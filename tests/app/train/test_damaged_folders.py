"""Run folders that were edited, cut short, damaged or taken twice: one clear line from every command that reads them."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from spartan.app.cli import app
from spartan.app.report.page import write_report
from spartan.app.runs import RunFolder, fixed_settings, read_metric
from spartan.app.train import folder
from spartan.app.train.checkpoint import checkpoints
from spartan.app.train.config import RecipeError, load_recipe
from spartan.app.train.loop import resume, train
from spartan.files import read
from tests.app.report.folders import write_run
from tests.app.train.test_resume import child, wait

RECIPE = ["epochs=3", "batch_size=256", "checkpoint_steps=2", "method=spartan", "method_args={beta: [1, 10]}"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    train(load_recipe("digits", RECIPE), run, quiet=True)
    return run


@pytest.fixture
def killed(finished: Path, tmp_path: Path) -> Path:
    """The run as a kill leaves it, some steps after its last checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "summary.json").unlink()
    newest = checkpoints(run)[0]
    newest.unlink()
    newest.with_suffix(".sha256").unlink()
    return run


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def told(*arguments: object) -> str:
    """What a command that cannot do its work says, in a line."""
    result = invoke(*arguments)
    assert result.exit_code == 2, (arguments, result.output, result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert len(lines[0]) < 600
    assert lines[0].startswith("error: ")
    return lines[0]


def edit(run: Path, before: str, after: str) -> None:
    text = (run / "recipe.yaml").read_text()
    assert text.count(before) == 1, text
    (run / "recipe.yaml").write_text(text.replace(before, after))


# ---------------------------------------------------------------------- an edited recipe


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("epochs: 3\n", "epochs: 5\n", "epochs is 5, but the run was trained with 3"),
        ("\nseed: 0\n", "\nseed: 1\n", "seed is 1, but the run was trained with 0"),
        ("sparsity: 0.95", "sparsity: 0.9", "sparsity is 0.9, but"),
        ("  lr: 0.1\n", "  lr: 0.2\n", "optimizer.lr is 0.2, but the run was trained with 0.1"),
        ("  pad: 0", "  pad: 1", "data.pad is 1, but the run was trained with 0"),
        ("  - 10\n", "  - 20\n", 'method_args is {"beta": [1, 20]}, but the run was trained with {"beta": [1, 10]}'),
        ("label_smoothing: 0.1\n", "label_smoothing: 0.0\n", "label_smoothing is 0.0, but"),
    ],
)
def test_an_edited_recipe_is_refused(killed: Path, before: str, after: str, words: str) -> None:
    edit(killed, before, after)
    files = {p: p.read_bytes() for p in killed.rglob("*") if p.is_file() and p.name != ".lock"}
    line = told("train", "--resume", killed)
    assert f"{killed}/recipe.yaml: {words}" in line
    assert f"up to {checkpoints(killed)[0].name}; put it back" in line
    assert files == {p: p.read_bytes() for p in killed.rglob("*") if p.is_file() and p.name != ".lock"}


def test_what_changes_no_result_may_be_edited(killed: Path, finished: Path) -> None:
    edit(killed, "checkpoint_steps: 2", "checkpoint_steps: 0")
    edit(killed, "  workers: 8", "  workers: 2")
    edit(killed, "sparsity: 0.95", "sparsity: 0.950")
    resume(killed, quiet=True)
    same(killed, finished)


def test_before_its_first_checkpoint_a_run_begins_with_the_recipe_that_is_there(killed: Path) -> None:
    shutil.rmtree(killed / "checkpoints")
    edit(killed, "epochs: 3\n", "epochs: 2\n")
    assert resume(killed, quiet=True)["epochs"] == 2
    assert [e["epoch"] for e in RunFolder(killed).epochs] == [1, 2]


def test_a_checkpoint_keeps_what_must_not_change() -> None:
    config = load_recipe("digits", ["data.path=x", "device=cpu", "method_args={beta: .inf}"])
    kept = fixed_settings(config)
    assert not {"device", "description", "data.path", "data.workers", "parallel"} & set(kept)
    assert {"seed", "epochs", "data.source", "optimizer.lr", "min_density"} <= set(kept)
    folder.check_recipe(Path("run"), config, "step", kept)
    with pytest.raises(
        RecipeError, match=r"optimizer.betas is \[0.9, 0.999\], but the run was trained with \[1.0, 1.0\]"
    ):
        folder.check_recipe(Path("run"), config, "step", kept | {"optimizer.betas": [1.0, 1.0]})


# ---------------------------------------------------------------------- metrics


def same(run: Path, reference: Path) -> None:
    weights: dict[str, Tensor] = read(run / "model.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in read(reference / "model.safetensors").items())


@pytest.mark.parametrize("kind", ["cut", "cut in a line", "missing", "garbage", "noise", "half a line longer", "whole"])
def test_metrics_that_are_amiss_are_told_and_never_padded(
    kind: str, killed: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = killed / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    state = torch.load(checkpoints(killed)[0], weights_only=True)
    at, gone, spoilt = state["metrics_bytes"], 0, 0
    if kind.startswith("cut"):
        left = b"".join(lines[:3]) + (lines[3][:10] if kind == "cut in a line" else b"")
        path.write_bytes(left)
        gone = sum(map(len, lines[:3]))
        words = f"it has {gone:,} of the {at:,} bytes that belong to the checkpoint"
    elif kind == "missing":
        path.unlink()
        words = f"it has 0 of the {at:,} bytes that belong to the checkpoint"
    elif kind == "garbage":
        lines[1], lines[4] = b"\0" * (len(lines[1]) - 1) + b"\n", b"[1]" + b" " * (len(lines[4]) - 4) + b"\n"
        path.write_bytes(b"".join(lines))
        spoilt, words = 2, "2 of its lines cannot be read;"
    elif kind == "noise":
        path.write_bytes(random.Random(0).randbytes(at + 1000))
        words = "is damaged: "
    elif kind == "half a line longer":
        lines[0] = lines[0][:-2] + b', "more": 1}\n'
        path.write_bytes(b"".join(lines))
        words = "bytes that belong to the checkpoint"
    resume(killed, quiet=True)
    same(killed, finished)
    told = [line for line in capfd.readouterr().err.splitlines() if "metrics.jsonl" in line]
    assert len(told) == (kind != "whole")
    assert all(words in line and line.startswith("warning: ") for line in told)
    data = path.read_bytes()
    if kind not in ("garbage", "noise"):
        assert b"\0" not in data
        assert all(read_metric(line) for line in data.splitlines())
    assert data.endswith(b"}\n")
    found, expected = RunFolder(killed), RunFolder(finished)
    if kind in ("whole", "half a line longer", "garbage"):
        assert [e["epoch"] for e in found.epochs] == [1, 2, 3]
        lost = 1 if kind == "half a line longer" else spoilt  # the last line before the checkpoint crosses its end
        assert len(found.steps) == len(expected.steps) - lost
    assert found.steps[-1]["loss"] == expected.steps[-1]["loss"]
    assert (found.summary or {})["top1"] == (expected.summary or {})["top1"]


# ---------------------------------------------------------------------- summaries, recipes and the rest

SUMMARIES = {
    "{}": "it lacks top1",
    "": "it is not a JSON object",
    "[1]": "it is not a JSON object",
    '{"top1": 0.': "it is not a JSON object",
    "[" * 100_000: "it is not a JSON object",
    "TOP1 'high'": "top1 is 'high', which is no number",
    "TOP1 True": "top1 is True, which is no number",
    f"TOP1 {10**400}": "top1 is 1000",
    "LAYERS 3": "its layers are not a list of tables",
    "LAYERS [3]": "its layers are not a list of tables",
    "LAYERS [{'name': 3}]": "its layers are not a list of tables",
}


def damage(run: Path, how: str) -> None:
    """Write what stands there, or the run's own summary with one value replaced."""
    key, _, value = how.partition(" ")
    if key in ("TOP1", "LAYERS"):
        summary = json.loads((run / "summary.json").read_text()) | {key.lower(): ast.literal_eval(value)}
        how = json.dumps(summary)
    (run / "summary.json").write_text(how)


@pytest.mark.parametrize("how", SUMMARIES, ids=lambda how: how[:20])
def test_a_damaged_summary(how: str, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "sweep" / "run"
    shutil.copytree(finished, run)
    damage(run, how)
    words = f"{run}/summary.json is damaged: {SUMMARIES[how]}"
    commands: list[tuple[object, ...]] = [
        ("train", "--resume", run),
        ("evaluate", run),
        ("export", run),
        ("bench", run),
    ]
    commands += [
        ("compare", run),
        ("sweep", "digits", "--set", "epochs=1", "--out", run.parent),
        ("report", run.parent),
    ]
    for command in commands:
        assert words in told(*command)
        assert f"remove it, and spartan train --resume {run} writes it anew" in told(*command)
    # A report of the run itself can always be had.
    assert invoke("report", run).exit_code == 0
    assert SUMMARIES[how].split(" '")[0] in (run / "report.html").read_text()


def test_the_remedy_for_a_damaged_summary_helps(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "summary.json").unlink()
    assert invoke("train", "--resume", run, "--quiet").exit_code == 0
    before, after = (json.loads((r / "summary.json").read_text()) for r in (finished, run))
    assert after == before


def test_a_summary_of_other_layers(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    damage(run, "LAYERS [{'name': 'nobody', 'shape': [3]}]")
    assert "summary.json is damaged: its layers are not those of model.safetensors" in told("evaluate", run)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"epochs: [", "recipe.yaml cannot be read: "),
        (b"", None),
        (b"- a\n", "recipe.yaml must be a table of keys and values"),
        (b"epohs: 3\n", "recipe.yaml: epohs: there is no such key (did you mean epochs?)"),
        (b"epochs: &a [*a]\n", "recipe.yaml cannot be read: an alias"),
        ("description: grün".encode("latin-1"), "recipe.yaml is not UTF-8 text"),
        (b"\0" * 100, "recipe.yaml is no text: it holds NUL bytes"),
    ],
)
def test_a_damaged_recipe(content: bytes, words: str | None, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "sweep" / "run"
    shutil.copytree(finished, run)
    (run / "recipe.yaml").write_bytes(content)
    commands: list[tuple[object, ...]] = [
        ("train", "--resume", run),
        ("evaluate", run),
        ("export", run),
        ("compare", run),
    ]
    commands += [("sweep", "digits", "--set", "epochs=1", "--out", run.parent), ("report", run.parent)]
    for command in commands if words is not None else ():
        line = told(*command)
        assert str(words) in line
        assert line.count("recipe.yaml") == 1
    assert invoke("report", run).exit_code == 0
    if words is None:  # an empty recipe is one of defaults only, which is not what the run was trained with
        (run / "summary.json").unlink()
        assert "was trained with" in told("train", "--resume", run)


def test_a_report_can_be_had_of_any_folder(tmp_path: Path) -> None:
    """Files with values of the wrong kind anywhere: a page, or an error in words, never a fault of ours."""
    odd = [None, True, -1, 0, 1e308, 10**400, "text", [], {}, [None], {"a": 1}, math.nan, "1", [[1]]]
    for seed in range(40):
        chance = random.Random(seed)
        run = write_run(tmp_path / f"run{seed}", epochs=3)
        summary = json.loads((run / "summary.json").read_text())
        for table in (summary, chance.choice(summary["layers"])):
            table[chance.choice(list(table))] = chance.choice(odd)
        (run / "summary.json").write_text(json.dumps(summary))
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for record in records:
            if chance.random() < 0.3:
                record[chance.choice(list(record))] = chance.choice(odd)
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + "[" * 5000)
        (run / "environment.json").write_text(json.dumps(chance.choice([*odd, {"versions": chance.choice(odd)}])))
        if seed % 3 == 0:
            raw = bytearray((run / "masks.npz").read_bytes())
            for _ in range(5):
                raw[chance.randrange(len(raw))] ^= 0xFF
            (run / "masks.npz").write_bytes(raw)
        assert write_report(run).is_file()
        invoke_compare = invoke("compare", run)
        assert invoke_compare.exit_code in (0, 2), invoke_compare.exception


# ---------------------------------------------------------------------- two starts


def test_two_starts_on_one_folder(tmp_path: Path) -> None:
    """Real processes: one of them trains, and the other is told so; killed, it leaves no lock."""
    run = tmp_path / "runs" / "run"

    def start(number: int) -> None:
        try:
            train(load_recipe("digits", ["epochs=1000"]), run, quiet=True)
        except RecipeError as error:
            (tmp_path / f"said-{number}").write_text(str(error))
            raise SystemExit(2) from None

    both = [child(lambda number=number: start(number)) for number in range(2)]  # type: ignore[misc]
    gone, status = os.wait()
    (winner,) = (pid for pid in both if pid != gone)
    try:
        assert os.waitstatus_to_exitcode(status) == 2
        (said,) = tmp_path.glob("said-*")
        taken, there = (
            "was taken meanwhile by another start; choose another folder",
            "is there already; choose another folder",
        )
        assert any(f"--out: {run} {words}" in said.read_text() for words in (taken, there))
        assert [p.name for p in run.parent.iterdir()] == ["run"], "nothing is left of the start that lost"
        while not checkpoints(run):
            time.sleep(0.02)
        assert "is being trained by another process; wait for it, or stop it first" in told("train", "--resume", run)
    finally:
        os.kill(winner, signal.SIGKILL)
        wait(winner)
    edit(run, "epochs: 1000", "epochs: 3")
    assert "epochs is 3, but the run was trained with 1000" in told("train", "--resume", run), "the lock is free"


def test_a_folder_that_was_taken_meanwhile(tmp_path: Path) -> None:
    config = load_recipe("digits")
    folder.create(tmp_path / "run", config, torch.device("cpu"), [])
    with pytest.raises(RecipeError, match=r"--out: .*run was taken meanwhile by another start; choose another folder"):
        folder.create(tmp_path / "run", config, torch.device("cpu"), [])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_start_killed_half_way_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """In a container every start has the same process number."""
    (tmp_path / f".run.{os.getpid()}").mkdir()
    folder.create(tmp_path / "run", load_recipe("digits"), torch.device("cpu"), [])
    assert (tmp_path / "run" / "recipe.yaml").is_file()


# ---------------------------------------------------------------------- what a checkpoint weighs


@pytest.mark.parametrize("sets", [["optimizer.name=adam"], ["method=movement"], ["method=rigl"]])
def test_a_checkpoint_holds_every_tensor_once(sets: list[str], tmp_path: Path) -> None:
    """Its size is that of the tensors that a resume needs, each of them once, also when the mask is fixed."""
    train(load_recipe("digits", ["epochs=1", "checkpoint_steps=20", *sets]), tmp_path / "run", quiet=True)
    for path in checkpoints(tmp_path / "run"):
        state = torch.load(path, weights_only=True)
        assert "spartan" not in state["optimizer"]["param_groups"][0]
        states = tensors([state[name] for name in ("model", "sparsifier", "optimizer")])
        large = [t.numpy().tobytes() for t in states if t.numel() > 1000 and t.any()]
        assert len(set(large)) == len(large), "a tensor is there twice"
        assert path.stat().st_size < sum(t.nbytes for t in tensors(state)) + 100_000


def tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for inner in state.values() if isinstance(state, dict) else state:
            yield from tensors(inner)


def test_a_checkpoint_of_both_states_is_read_too(killed: Path, finished: Path) -> None:
    """As they were before, and as whoever saves all three state dicts has them."""
    newest = checkpoints(killed)[0]
    state = torch.load(newest, weights_only=True)
    state["optimizer"]["param_groups"][0]["spartan"] = state["sparsifier"]
    torch.save(state, newest)
    newest.with_suffix(".sha256").unlink()
    resume(killed, quiet=True)
    same(killed, finished)
    assert np.load(killed / "masks.npz")["n"] > 0


def test_a_restart_does_not_stumble_over_damaged_neighbours(tmp_path: Path) -> None:
    config = load_recipe("digits", ["device=cpu"])
    for name, content in (("", b""), ("-2", b"epochs: ["), ("-3", b"\xff\xfe")):
        run = tmp_path / "runs" / f"digits-paced-0.95-seed0{name}"
        folder.create(run, config, torch.device("cpu"), [])
        if content:
            (run / "recipe.yaml").write_bytes(content)
    assert folder.choose_folder("digits", config, None, again=True) == (Path("runs/digits-paced-0.95-seed0"), True)
