"""Tables and plots from handmade run folders: the figures are numpy's."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from spartan.app.cli import app
from spartan.app.report import compare
from spartan.app.runs import find_runs, identity, read_run
from spartan.app.train.config import load_recipe, to_yaml

SUMMARY = {
    "top5": 0.99,
    "test_loss": 0.3,
    "train_loss": 0.2,
    "epochs": 2,
    "achieved_sparsity": 0.95,
    "flops_dense": 1000,
    "flops_sparse": 80,
    "nonzero": 1234,
    "parameters": 24680,
    "model_parameters": 25000,
    "model_bytes": 100_000,
    "dense_bytes": 2_000_000,
    "images_per_s": 500.0,
}


def make_run(folder: Path, *sets: str, top1: float | None, seconds: float = 2.0) -> Path:
    """A run folder as training leaves it; without top1, as a kill in its second epoch leaves it."""
    config = load_recipe("digits", ["epochs=2", *sets])
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(config), "utf-8")
    lines = [{"kind": "step", "step": 1}, {"kind": "epoch", "epoch": 1, "top1": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "epo')
    if top1 is not None:
        summary: dict[str, Any] = SUMMARY | {"top1": top1, "seconds": seconds, "method": config.method, "layers": []}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    accuracies = {"spartan": [0.971, 0.964, 0.9702], "imp": [0.951, 0.93, 0.949]}
    for method, values in accuracies.items():
        for sparsity in (0.9, 0.95):
            for seed, value in enumerate(values):
                sets = (f"method={method}", f"sparsity={sparsity}", f"seed={seed}")
                make_run(tmp_path / "deep" / f"{method}-{sparsity}-{seed}", *sets, top1=value - (1 - sparsity))
    for sparsity in (0.9, 0.95):
        make_run(tmp_path / f"dense-{sparsity}", "method=dense", f"sparsity={sparsity}", top1=0.98)
    make_run(tmp_path / "killed", "method=imp", "seed=7", top1=None)
    return tmp_path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_means_are_numpys(runs: Path) -> None:
    rows = compare.rows_of(find_runs([runs]))
    assert [(r.method, r.sparsity, len(r.runs)) for r in rows] == [
        ("dense", 0.0, 1),  # its sparsity means nothing, so both are the same run
        ("imp", 0.9, 3),
        ("spartan", 0.9, 3),
        ("imp", 0.95, 3),
        ("spartan", 0.95, 3),
    ]
    spartan = rows[-1]
    values = np.array([0.971, 0.964, 0.9702]) - (1 - 0.95)
    assert spartan.mean("top1") == pytest.approx(values.mean(), abs=1e-12)
    assert spartan.percent("top1") == pytest.approx((100 * values.mean(), 100 * values.std(ddof=1)), abs=1e-10)
    assert spartan.flops == 0.08
    assert [run.folder.name for run in rows[0].repeated] == ["dense-0.9"]
    assert not any(row.extra for row in rows)


def test_the_table_and_the_unfinished_run(runs: Path) -> None:
    result = invoke("compare", runs)
    assert result.exit_code == 0, result.output
    assert "0:92.10 1:91.40 2:92.02" in result.output  # every seed
    assert "91.84 ± 0.38" in result.output
    assert "killed: unfinished, epoch 1 of 2; spartan train --resume" in result.output
    assert "7:" not in result.output
    assert "dense-0.9: left out, a newer run repeats its seed 0" in result.output
    assert all(ord(c) < 0x2500 or ord(c) > 0x257F for c in result.output)  # no box drawing
    assert "100 kB" in result.output
    assert "8.00%" in result.output


def test_csv_and_markdown_parse(runs: Path, tmp_path: Path) -> None:
    files = tmp_path / "t.csv", tmp_path / "t.md"
    result = invoke("compare", runs, "--csv", files[0], "--markdown", files[1])
    assert result.exit_code == 0, result.output
    lines = list(csv.DictReader(io.StringIO(files[0].read_text("utf-8"))))
    assert len(lines) == 13  # one a finished run, the repeated one aside
    assert {line["method"] for line in lines} == {"spartan", "imp", "dense"}
    assert float(lines[-1]["top1"]) == 0.9702 - (1 - 0.95)
    table = [line.strip("|\n").split("|") for line in files[1].read_text("utf-8").splitlines()]
    assert len(table) == 2 + 5
    assert len({len(line) for line in table}) == 1
    assert set(table[1]) == {" --- "}


def test_other_settings_are_not_averaged_away(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "seed=0", top1=0.9)
    make_run(tmp_path / "b", "seed=1", "optimizer.lr=0.05", top1=0.5)
    make_run(tmp_path / "c", "seed=1", "data.workers=2", "device=cpu", "checkpoint_steps=5", top1=0.8)
    rows = compare.rows_of(find_runs([tmp_path]))
    assert [(len(r.runs), r.setting) for r in rows] == [(1, "optimizer.lr=0.05"), (2, "optimizer.lr=0.1")]
    assert "setting" in compare.table(rows)[0]


def test_a_single_seed_has_no_spread(tmp_path: Path) -> None:
    make_run(tmp_path / "a", top1=0.9)
    header, ((*_, accuracy, _seeds, _s, _f, _n, size, _t),) = compare.table(compare.rows_of(find_runs([tmp_path])))
    assert accuracy == "90.00"
    assert "setting" not in header
    assert size == "100 kB of 2 MB"


def test_what_is_damaged_or_absent_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", top1=0.9)
    (folder / "summary.json").write_text('{"top1": 0.')
    result = invoke("compare", tmp_path)
    assert result.exit_code == 2
    assert "summary.json is damaged" in result.output
    (tmp_path / "empty").mkdir()
    assert "holds no run" in invoke("compare", tmp_path / "empty").output
    assert "there is no folder" in invoke("compare", tmp_path / "nowhere").output
    (folder / "summary.json").unlink()
    result = invoke("compare", folder, "--csv", tmp_path / "x.csv")
    assert result.exit_code == 2
    assert "nothing to write" in result.output


def test_reading_a_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", "seed=3", top1=None))
    assert not run.finished
    assert run.seed == 3
    assert [line["epoch"] for line in run.epochs] == [1]
    assert identity(run.config) != identity(load_recipe("digits", ["epochs=2"]))
    assert identity(run.config, seed=False) == identity(load_recipe("digits", ["epochs=2"]), seed=False)
    make_run(tmp_path / ".half.123", top1=None)
    make_run(tmp_path / "b", top1=0.5)
    assert [found.folder.name for found in find_runs([tmp_path, tmp_path / "b"])] == ["a", "b"]


def test_the_plot(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    result = invoke("compare", runs, "--plot", tmp_path / "p.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    result = invoke("compare", runs, "--plot", tmp_path / "p.nonsense")
    assert result.exit_code == 2
    assert "p.nonsense" in result.output


def test_the_plot_says_what_it_needs(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = invoke("compare", runs, "--plot", tmp_path / "p.png")
    assert result.exit_code == 2
    assert "pip install 'spartan-sparsity[plot]'" in result.output
