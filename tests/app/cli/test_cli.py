"""The command line as its users meet it: what works, and one clear line for everything that does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import spartan
from spartan.app.cli import app
from spartan.app.train.config import load_recipe, recipe_names, to_yaml

FAST = ("--set", "epochs=1")


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
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one epoch."""
    out = tmp_path_factory.mktemp("runs") / "imp"
    result = invoke("train", *FAST, "--set", "method=imp", "--out", out, "--quiet")
    assert result.exit_code == 0, result.output
    return out


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "spartan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, **options)


# ---------------------------------------------------------------------- what works


def test_a_run_leaves_its_files(trained: Path) -> None:
    for name in (
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "model.safetensors",
        "summary.json",
        "report.html",
    ):
        assert (trained / name).is_file(), name
    assert load_recipe(trained / "recipe.yaml") == load_recipe("digits", ["epochs=1", "method=imp"])
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["achieved_sparsity"] == pytest.approx(0.95, abs=1e-4)


def test_default_folders_are_named_and_never_reused() -> None:
    settings = (*FAST, "--set", "method=imp", "--quiet")
    for _ in range(2):
        result = invoke("train", *settings)
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\n") == 1
    assert sorted(p.name for p in Path("runs").iterdir()) == ["digits-imp-0.95-seed0", "digits-imp-0.95-seed0-2"]


def test_show_prints_a_recipe_that_loads(tmp_path: Path) -> None:
    result = invoke("train", "resnet50-imagenet", "--set", "seed=3", "--show")
    assert result.exit_code == 0
    (tmp_path / "mine.yaml").write_text(result.stdout, "utf-8")
    assert load_recipe("mine.yaml") == load_recipe("resnet50-imagenet", ["seed=3"])
    assert not Path("runs").exists()


def test_resuming_a_finished_run_says_so(trained: Path) -> None:
    result = invoke("train", "--resume", trained)
    assert result.exit_code == 0
    assert "is finished: top-1" in result.stdout


def test_a_run_without_a_checkpoint_starts_again(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "recipe.yaml").write_bytes((trained / "recipe.yaml").read_bytes())
    (folder / "metrics.jsonl").write_text('{"kind": "step", "st')
    result = invoke("train", "--resume", folder, "--quiet")
    assert result.exit_code == 0, result.output
    assert (folder / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spartan", "train", "--set", "epochs=300", "--out", "stopped"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("stopped/checkpoints/*.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.strip() == "stopped by SIGTERM; continue with: spartan train --resume stopped"
    assert "epoch 1/300" in out
    assert "unfinished" in invoke("compare", "stopped").output
    assert "unfinished" in invoke("evaluate", "stopped").stderr


def test_evaluate_a_run_and_a_file(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    by_run = invoke("evaluate", trained, "--set", "device=cpu")
    assert by_run.exit_code == 0, by_run.output
    file = trained / "model.safetensors"
    by_file = invoke("evaluate", file, "--recipe", "digits")
    assert by_file.exit_code == 0, by_file.output
    for result in (by_run, by_file):
        lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
        assert lines["top-1"] == f"{summary['top1']:.2%}"
        assert lines["sparsity"] == "95.00%"
        assert lines["nonzero"].startswith(f"{summary['nonzero']:,} of {summary['parameters']:,} ")


def test_evaluate_says_what_is_wrong(trained: Path, tmp_path: Path) -> None:
    file = trained / "model.safetensors"
    (tmp_path / "broken.safetensors").write_bytes(file.read_bytes()[:1000])
    cases: dict[tuple[object, ...], str] = {
        (file,): "--recipe",
        ("nowhere",): "no such run folder or file",
        (trained, "--recipe", "digits"): "run folder and has its own",
        ("broken.safetensors", "--recipe", "digits"): "cannot be read as safetensors",
        (file, "--recipe", "digits", "--set", "model=wrn-16-1"): "do not fit model wrn-16-1",
    }
    for arguments, words in cases.items():
        result = invoke("evaluate", *arguments)
        assert result.exit_code == 2, result.output
        assert words in one_line(result.stderr)


def test_report_prints_where_it_is(trained: Path) -> None:
    for target in (trained, trained.parent):
        result = invoke("report", target)
        assert result.exit_code == 0, result.output
        assert Path(result.stdout.strip()) == target / "report.html"
        assert "<html" in (target / "report.html").read_text("utf-8")
    assert invoke("report", "nowhere").exit_code == 2


def test_lists_are_complete_and_plain() -> None:
    result = python("recipes")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == recipe_names()
    assert not any(c in result.stdout for c in "\x1b─│┃━")
    result = invoke("methods")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == [e.name for e in spartan.methods()]


def test_help_and_version() -> None:
    assert invoke("--version").stdout == f"spartan {spartan.__version__}\n"
    for command in ("train", "recipes", "methods", "evaluate", "compare", "sweep", "report"):
        assert command in invoke("--help").stdout
        result = invoke(command, "--help")
        assert result.exit_code == 0
        assert f"Usage: root {command}" in result.stdout
    assert "spartan train --resume runs/imp" in invoke("train", "-h").stdout


# ---------------------------------------------------------------------- what does not

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"epoch": 3}, "epoch: there is no such key (did you mean epochs?)"),
    "unknown key in a section": ({"optimizer": {"learning_rate": 1}}, "optimizer.learning_rate: "),
    "wrong type": ({"epochs": "many"}, "epochs: 'many'"),
    "wrong type in a list": ({"exclude": [1]}, "exclude[0]: 1"),
    "no section": ({"data": "digits"}, "data: 'digits'"),
    "missing file": ({"data": {"source": "npz", "path": "nowhere.npz"}}, "nowhere.npz"),
    "missing folder": ({"data": {"source": "imagefolder", "path": "nowhere"}}, "nowhere"),
    "path not given": ({"data": {"source": "npz"}}, "data.path"),
    "bad glob": ({"exclude": ["conv9.*"]}, "conv9.*"),
    "bad include": ({"include": ["nothing"]}, "nothing"),
    "unknown model": ({"model": "digits-cn"}, "digits-cn"),
    "unknown torchvision model": ({"model": "torchvision/resnet51"}, "resnet51"),
    "unknown module": ({"model": "nowhere:net"}, "nowhere"),
    "sparsity": ({"sparsity": 1.5}, "sparsity: 1.5"),
    "batch": ({"batch_size": 5000}, "batch_size: 5000"),
    "micro batch": ({"micro_batch": 5}, "micro_batch: 5"),
    "unknown method": ({"method": "spartn"}, "method='spartn' is unknown (did you mean spartan?); accepted: acdc, "),
    "method argument": (
        {"method": "spartan", "method_args": {"bta": 1}},
        "method_args.bta=1: spartan has no such argument (did you mean beta?)",
    ),
    "unknown data": ({"data": {"source": "digit"}}, "digit"),
    "unknown device": ({"device": "abacus"}, "device: 'abacus'"),
    "blocks that do not fit": ({"pattern": [16, 16]}, "exclude"),
}


def one_line(text: str) -> str:
    """The text, which must be a single line with an error in it."""
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    assert text.startswith("error: ")
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line(kind: str, tmp_path: Path) -> None:
    change, words = MISTAKES[kind]
    recipe = yaml.safe_load(to_yaml(load_recipe("digits", ["epochs=1"])))
    for key, value in change.items():
        recipe[key] = recipe[key] | value if isinstance(value, dict) else value
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    result = invoke("train", "mine.yaml", "--out", "folder/run")
    assert result.exit_code == 2, result.output
    assert words in one_line(result.stderr)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digit"], "'digit' is unknown (did you mean digits?)"),
        (["nowhere.yaml"], "there is no file nowhere.yaml"),
        (["--set", "epochs"], "write key=value"),
        (["--set", "exclude=[1"], "'exclude=[1': the value cannot be read"),
        (["--set", "epochs.x=1"], "epochs is a value, not a section"),
        (["--resume", "nowhere"], "nowhere is no run folder"),
        (["--resume", "nowhere", "--set", "epochs=2"], "cannot be combined with --set"),
        (["digits", "--resume", "nowhere"], "cannot be combined with RECIPE"),
        (["--out", "taken"], "taken holds a run already; continue it with --resume taken"),
        (["--out", "full"], "full is there already"),
    ],
)
def test_a_wrong_command_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    for folder, name in (("taken", "recipe.yaml"), ("full", "thesis.tex")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("seed: 0\n")
    result = invoke("train", *arguments)
    assert result.exit_code == 2, result.output
    assert words in one_line(result.stderr)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["full", "recipe.yaml", "taken", "thesis.tex"]


def test_a_mistake_in_a_real_process(tmp_path: Path) -> None:
    result = python("train", "--set", "batch_size=5000")
    assert result.returncode == 2
    assert "batch_size: 5000" in one_line(result.stderr)
    assert not list(tmp_path.iterdir())


def test_divergence_is_one_line(tmp_path: Path) -> None:
    result = invoke("train", *FAST, "--set", "optimizer.lr=1e30", "--set", "optimizer.warmup_epochs=0", "--out", "run")
    assert result.exit_code == 1, result.output
    assert "learning rate" in one_line(result.stderr)


def test_a_fault_that_is_not_the_users_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spartan.app.train.loop.train", lambda *a, **k: torch.zeros(2) @ torch.zeros(3))
    assert isinstance(invoke("train").exception, RuntimeError)


def test_tracebacks_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTAN_TRACEBACK", "1")
    assert isinstance(invoke("train", "digit").exception, ValueError)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m spartan recipes | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("name")
    assert result.stderr == ""
