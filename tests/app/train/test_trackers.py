"""`tracker:` in a recipe: W&B and MLflow, without a network; a run that is stopped and resumed has one record."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spartan.app.interrupted import Interrupted
from spartan.app.train.config import RecipeError, load_recipe
from spartan.app.train.loop import Trainer, resume, train
from spartan.app.train.metrics import Metrics

pytestmark = pytest.mark.filterwarnings("ignore")
RECIPE = ["epochs=2", "batch_size=128", "sparsity=0.8", "checkpoint_steps=4"]
STEPS = 22


def stopped_and_resumed(folder: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The steps that metrics.jsonl has, of a run that was asked to stop after its first checkpoint."""
    save = Trainer._save_if_due

    def stop(self: Trainer, out: Path, metrics: Metrics, caught: int | None, unfinished: float) -> None:
        save(self, out, metrics, 15 if self.step == 8 else caught, unfinished)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_if_due", stop)
        with pytest.raises(Interrupted):
            train(load_recipe("digits", [*RECIPE, f"tracker={tracker}"]), folder, quiet=True)
    resume(folder, quiet=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


@pytest.mark.slow  # its data base takes seconds to be made
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    steps = stopped_and_resumed(tmp_path / "run", "mlflow", monkeypatch)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("spartan").experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "run" / "tracker.json").read_text())["id"]
    assert run.info.status == "FINISHED"
    assert run.data.params["sparsity"] == "0.8"
    for name in ("loss", "density", "beta"):
        seen = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, f"step/{name}")}
        assert seen == {step["step"]: pytest.approx(step[name]) for step in steps if step[name] is not None}
    assert [m.step for m in client.get_metric_history(run.info.run_id, "epoch/top1")] == [STEPS // 2, STEPS]


def records(file: Path) -> Iterator[bytes]:
    """Of a .wandb file, a log in the format of LevelDB: blocks of 32 KiB, with pieces that have headers of 7 bytes."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # complete, or the last piece
            yield whole
            whole = b""


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    steps = stopped_and_resumed(tmp_path / "run", "wandb", monkeypatch)
    name = json.loads((tmp_path / "run" / "tracker.json").read_text())["id"]
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{name}.wandb"] * 2
    seen: dict[int, float] = {}
    for file in files:
        for data in records(file):
            record = getattr(wandb_internal_pb2, "Record").FromString(data)  # noqa: B009  # its types do not tell
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "step/loss" in items:
                seen[int(items["optimizer_step"])] = float(items["step/loss"])
    assert seen == {step["step"]: pytest.approx(step["loss"]) for step in steps}


def test_one_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RecipeError, match=r"tracker: wandb cannot be imported .*spartan-sparsity\[trackers\]"):
        train(load_recipe("digits", [*RECIPE, "tracker=wandb"]), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
