"""`spartan paper`: every exhibit from stored results, one trained anew, its mistakes, and the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from spartan.app.cli import app
from spartan.app.paper import results as stored
from spartan.app.paper.exhibit import exhibits, make
from spartan.app.paper.experiments import SCALES, Scale
from spartan.app.paper.figures import Theme, themed
from spartan.app.paper.page import page
from spartan.app.paper.results import Results

PAGE = Path(__file__).parents[3] / "docs" / "reproduction.md"
ALL = list(exhibits())


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, ["paper", *map(str, words)])


def test_the_list_and_the_help_have_every_exhibit() -> None:
    done = invoke("list")
    assert done.exit_code == 0
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert names == [one.name for one in ALL]
    help_ = " ".join(invoke("--help").stdout.split())
    assert f"Exhibits: {', '.join(sorted(names))}." in help_.replace("- ", "-")


@pytest.mark.parametrize("exhibit", ALL, ids=lambda one: one.name)
@pytest.mark.parametrize("scale", SCALES)
def test_every_exhibit_comes_from_what_is_stored(exhibit: Any, scale: Scale) -> None:
    """No scale needs a GPU, data or training to be shown; what is missing is one line with the command that makes it."""
    made = make(exhibit, Results(scale), None)
    assert made.shown.line
    assert made.shown.tables
    for table in made.shown.tables:
        assert {len(line) for line in table.cells} == {len(table.header)}, table.caption
    if exhibit.kind == "trained":
        assert bool(made.missing) == (scale != "tiny")
        if scale == "tiny":
            assert {claim.verdict for claim in made.shown.claims} <= {"not testable at this scale"}
        if scale == "full":
            assert {claim.verdict for claim in made.shown.claims} <= {"not yet measured"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_have_labels_and_an_opaque_background(theme: Theme) -> None:
    drawn = 0
    for exhibit in ALL:
        shown = exhibit.show(Results("tiny"))
        if shown.draw is None:
            continue
        drawn += 1
        with themed(theme):
            figure = shown.draw()
        assert figure.get_facecolor()[3] == 1.0
        panels = [axes for axes in figure.axes if axes.get_visible()]
        assert panels
        assert any(axes.get_ylabel() for axes in panels)
        for axes in panels:
            assert axes.get_title(), exhibit.name
            assert axes.get_xlabel() or axes.get_xticklabels(), exhibit.name
    assert drawn >= 11


def test_files_are_written(tmp_path: Path) -> None:
    done = invoke("interpolation", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    names = {path.name for path in tmp_path.iterdir()}
    figures = {f"interpolation{dark}.{kind}" for dark in ("", "-dark") for kind in ("png", "svg")}
    assert names == figures | {f"interpolation-{n}.{kind}" for n in (1, 2) for kind in ("md", "csv")}
    assert "cosine" in (tmp_path / "interpolation.svg").read_text(encoding="utf-8").replace("<!-- ", "")
    assert (tmp_path / "interpolation-1.md").read_text(encoding="utf-8").count("\n|") == 4
    assert "confirmed: Spartan reduces to Top-KAST at β = 0" in done.stdout
    first = (tmp_path / "interpolation.svg").read_bytes()
    invoke("interpolation", "--out", tmp_path)
    assert (tmp_path / "interpolation.svg").read_bytes() == first  # the same bytes every time


def test_what_is_missing_is_one_line_with_its_command(tmp_path: Path) -> None:
    done = invoke("vit", "--scale", "full", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("missing: ")]
    assert "21 of 21 runs are not stored at scale full; spartan paper vit --scale full --rerun trains them" in line
    assert not list(tmp_path.glob("*.png"))  # no figure of nothing


def test_a_rerun_trains_what_is_missing_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Results("tiny").records
    monkeypatch.setattr(stored, "packaged", lambda scale: tmp_path / "none.jsonl")
    done = invoke("maps", "--scale", "tiny", "--rerun", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "[1/1] finished" in done.stdout
    (record,) = map(json.loads, (tmp_path / "results" / "tiny.jsonl").read_text(encoding="utf-8").splitlines())
    before = known[record["run"]]
    for key in ("fingerprint", "nonzero", "parameters", "achieved_sparsity", "flops_dense", "epochs"):
        assert record[key] == before[key], key
    assert record["top1"] > 0.15
    assert len(record["with_last"]) == len(record["top1_by_epoch"]) == 10
    assert record["with_last"][-1] == 1.0
    (first, *_) = record["maps"].values()
    assert torch.tensor(first).shape == (3 * 64 // 8, 64 // 8)
    assert (tmp_path / "maps-tiny-dark.png").stat().st_size > 5000
    again = invoke("maps", "--scale", "tiny", "--rerun", "--out", tmp_path)
    assert again.exit_code == 0
    assert "nothing to train: every run has its result" in again.stdout
    # A run whose result was lost is not trained again.
    (tmp_path / "results" / "tiny.jsonl").unlink()
    found = invoke("maps", "--scale", "tiny", "--rerun", "--out", tmp_path)
    assert found.exit_code == 0, found.output
    assert "[1/1] skipped" in found.stdout
    # With --keep results go where the package has them, but for those of a recipe that has changed.
    assert not (tmp_path / "none.jsonl").exists()
    kept = invoke("maps", "--scale", "tiny", "--keep", "--out", tmp_path)
    assert kept.exit_code == 0, kept.output
    assert "kept: 1 result of " in kept.stdout
    assert json.loads((tmp_path / "none.jsonl").read_text(encoding="utf-8")) == record
    (tmp_path / "results" / "tiny.jsonl").write_text(json.dumps(record | {"fingerprint": "another"}))
    assert "kept: 0 results of " in invoke("maps", "--scale", "tiny", "--keep", "--out", tmp_path).stdout
    assert json.loads((tmp_path / "none.jsonl").read_text(encoding="utf-8")) == record


def test_a_result_is_stored_when_its_run_ends(tmp_path: Path) -> None:
    """Killed by force while others run, a call has lost none of those that had ended; the next one trains the others."""
    without = "from pathlib import Path; from spartan.app.paper import results; from spartan.app.cli import app; "
    without += "results.packaged = lambda scale: Path('none.jsonl'); app()"
    words = ["paper", "exploration", "--scale", "tiny", "--rerun", "--out", "out"]
    command = [sys.executable, "-c", without, *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "SPARTAN_COMMIT": "0123456789"}
    own = tmp_path / "out" / "results" / "tiny.jsonl"
    deadline = time.monotonic() + 120
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as process:
        while not own.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    (first, *_) = map(json.loads, own.read_text(encoding="utf-8").splitlines())
    assert first["commit"] == "0123456"
    # Not by its folder either.
    (tmp_path / "out" / "runs").rename(tmp_path / "gone")
    done = subprocess.run([*command, "--seconds", "28"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 runs are left; the same command goes on with them" in done.stdout
    assert "missing: " in done.stdout  # what there is is shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("accuracies",), "'accuracies' is no exhibit (did you mean accuracy?)"),
        (("flops", "--scale", "smal"), "--scale: 'smal' (did you mean small?); one of tiny, small, full is needed"),
        (("flops", "--jobs", "2"), "--jobs is about training; it goes with --rerun"),
        (("flops", "--seconds", "60"), "--seconds is about training; it goes with --rerun"),
        (("page", "--rerun"), "spartan paper all --rerun"),
        (("vit", "--scale", "full", "--rerun"), "--scale full trains on ImageNet-1K, and data/imagenet has no train/"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*words)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_measured_exhibit_names_its_benchmark(tmp_path: Path) -> None:
    done = invoke("overhead", "--rerun", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "python benchmarks/bench_step.py --model resnet50 --sinkhorn" in done.stdout


def test_the_page_is_what_the_results_say() -> None:
    """`spartan paper page --out docs/reproduction.md` writes it anew."""
    results = Results("small")
    made = {exhibit: make(exhibit, results, None) for exhibit in ALL}
    text = page(made, results, "reproduction")
    assert text == PAGE.read_text(encoding="utf-8")
    for verdict in ("**confirmed**", "**not confirmed**", "**not yet measured**"):
        assert verdict in text
    pictures = {PAGE.parent / picture for picture in re.findall(r'(?:src|srcset)="([^"]+)"', text)}
    assert pictures == set(PAGE.with_suffix("").iterdir())
