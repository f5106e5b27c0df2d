"""The report: what it reads, what it computes, and that the page needs nothing from outside."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from spartan.app.report.charts import correlation, downsample, kept_bits, mask_correlations, phases
from spartan.app.report.page import to_script, write_report
from spartan.app.runs import RunFolder
from tests.app.report.folders import masks_of, write_masks, write_run

VOID = {"meta", "link", "input", "br", "img", "hr"}


def data_of(page: Path) -> dict[str, Any]:
    """The JSON inside a page."""
    text = page.read_text("utf-8")
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    return dict(json.loads(match[1], parse_constant=lambda name: pytest.fail(f"{name} in the page's JSON")))


def charts_of(page: Path) -> dict[str, dict[str, Any]]:
    return {chart["id"]: chart for chart in data_of(page)["charts"]}


class Tags(HTMLParser):
    """Checks that tags are balanced, and collects attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data + " "


def tags_of(page: Path) -> Tags:
    tags = Tags()
    tags.feed(page.read_text("utf-8"))
    assert not tags.open, f"never closed: {tags.open}"
    return tags


def append(run: Path, *records: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def assert_self_contained(page: Path) -> None:
    text = page.read_text("utf-8")
    for tag, key, value in tags_of(page).attributes:
        if key in ("src", "href", "action", "srcset", "data", "poster"):
            assert not re.match(r"(?i)\s*(https?:)?//", value), f"<{tag} {key}={value!r}> leads outside"
    assert not re.search(r"(?i)@import|url\(\s*['\"]?(https?:)?//|\bfetch\(|XMLHttpRequest|import\(", text)
    assert "default-src 'none'" in text


# ---------------------------------------------------------------------- one run


def test_finished_run(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run"))
    assert page == tmp_path / "run" / "report.html"
    assert_self_contained(page)
    assert list(charts_of(page)) == ["accuracy", "loss", "lr", "density", "beta", "histogram", "correlation", "layers"]
    text = " ".join(tags_of(page).text.split())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"{summary['top1']:.2%}" in text
    assert "95.00%" in text
    assert "Accuracy is that of the last epoch on the test data, not the best one" in text
    assert f"{summary['nonzero']:,} of {summary['parameters']:,}" in text
    assert "spartan train run/recipe.yaml --out run-again" in text
    assert "spartan train --resume run" in text
    assert "NVIDIA H200" in text
    assert "block2.0.shortcut.weight" in text
    assert "64×32×1×1" in text
    # the last epoch, not the best one
    top1 = next(s for s in charts_of(page)["accuracy"]["series"] if s["name"] == "top-1")["y"]
    assert top1[-1] == pytest.approx(100 * summary["top1"], rel=1e-5)


def test_no_draft_is_left(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=2)
    before = set(run.iterdir())
    assert write_report(run) == run / "report.html"
    assert set(run.iterdir()) == before | {run / "report.html"}


def test_phases_are_the_sparsifiers(tmp_path: Path) -> None:
    charts = charts_of(write_report(write_run(tmp_path / "own", epochs=10, steps_per_epoch=100)))
    assert [(b["name"], b["from"], b["to"]) for b in charts["beta"]["bands"]] == [
        ("warm-up", 0, 200),
        ("intermediate", 200, 800),
        ("finetune", 800, 1000),
    ]
    given = write_run(tmp_path / "given", epochs=10, steps_per_epoch=100, warmup=0.0, finetune=0.25)
    assert [(b["name"], b["to"]) for b in phases(RunFolder(given))] == [("intermediate", 750), ("finetune", 1000)]
    killed = write_run(tmp_path / "killed", epochs=10, steps_per_epoch=100, done=3)
    assert phases(RunFolder(killed))[-1]["to"] == 1000, "a killed run's phases are those it would have had"


def test_dense_run_has_no_sparse_charts(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", method="dense", epochs=3))
    assert list(charts_of(page)) == ["accuracy", "loss", "lr"]
    assert "A dense run: every weight is kept." in tags_of(page).text


def test_hard_masks_have_no_beta_and_no_histogram(tmp_path: Path) -> None:
    charts = charts_of(write_report(write_run(tmp_path / "run", method="imp", epochs=3)))
    assert "beta" not in charts
    assert "histogram" not in charts
    assert {"density", "correlation", "layers"} <= set(charts)


def test_unfinished_run_with_a_cut_last_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=17)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "step": 3316, "los\xff')
    page = write_report(run)
    text = " ".join(tags_of(page).text.split())
    assert "unfinished, 17 of 40 epochs" in text
    assert "1 line of metrics.jsonl could not be read" in text
    assert "The layer table is written when the run finishes." in text
    series = charts_of(page)["correlation"]["series"]
    assert series[0]["name"] == "with the latest mask"


def test_a_line_written_again_replaces_the_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=2, steps_per_epoch=10)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    append(run, last | {"loss": 99.0})
    found = RunFolder(run)
    assert [s["step"] for s in found.steps] == list(range(1, 21))
    assert found.steps[-1]["loss"] == 99.0


@pytest.mark.parametrize("gone", ["environment.json", "metrics.jsonl", "masks.npz", "summary.json"])
@pytest.mark.parametrize("damaged", [False, True], ids=["missing", "damaged"])
def test_without_a_file(gone: str, damaged: bool, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=4)
    whole = (run / gone).read_bytes()
    (run / gone).unlink()
    if damaged:
        (run / gone).write_bytes(whole[: len(whole) // 2])
    page = write_report(run)
    assert_self_contained(page)
    assert all(chart.get("series") or chart["views"] for chart in charts_of(page).values())


def test_only_a_recipe(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=4)
    for file in run.iterdir():
        if file.name != "recipe.yaml":
            file.unlink()
    page = write_report(run)
    assert charts_of(page) == {}
    assert "unfinished, 0 of 4 epochs" in tags_of(page).text


def test_first_epoch_under_way(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=4, done=0)
    append(run, *({"kind": "step", "step": s, "epoch": 1, "loss": 2.3, "lr": 0.1} for s in (1, 2, 3)))
    charts = charts_of(write_report(run))
    assert charts["loss"]["x"]["label"] == "step"
    assert [s["x"] for s in charts["loss"]["series"]] == [[1, 2, 3]]


def test_nan_is_a_gap_and_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=4, steps_per_epoch=50, done=2)
    common = {"lr": math.nan, "target_density": 0.05, "density": None, "beta": math.inf, "mu": None, "passes": 1}
    append(run, {"kind": "step", "step": 101, "epoch": 3, "loss": math.nan, **common})
    append(run, {"kind": "step", "step": 102, "epoch": 3, "loss": None, **common})
    nothing = dict.fromkeys(["train_loss", "test_loss", "top1", "top5", "images_per_s"], math.nan)
    append(run, {"kind": "epoch", "epoch": 3, "step": 150, "seconds": 1.0, "density": 0.05, "phase": "x", **nothing})
    page = write_report(run)
    charts = charts_of(page)
    assert charts["loss"]["series"][0]["y"][-2:] == [None, None]
    assert charts["accuracy"]["series"][0]["y"][-1] is None
    assert "The training loss was no longer a number at step 101." in tags_of(page).text


def test_summary_of_nulls(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=3)
    summary = json.loads((run / "summary.json").read_text())
    empty = {k: None for k in summary if k != "layers"}
    layers = [layer | {"flops": None, "sparse_flops": None} for layer in summary["layers"]]
    (run / "summary.json").write_text(json.dumps(empty | {"layers": layers, "top1": math.nan}))
    page = write_report(run)
    assert "FLOPs, dense" not in tags_of(page).text


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src="https://x.example/a.png">'
    run = write_run(tmp_path / "a <b> & c", epochs=2, description=evil)
    summary = json.loads((run / "summary.json").read_text())
    summary["layers"][0]["name"] = evil
    (run / "summary.json").write_text(json.dumps(summary))
    page = write_report(run)
    assert_self_contained(page)
    assert page.read_text().count("<script") == 3
    view = charts_of(page)["layers"]
    assert view["names"][0] == evil, "the JSON gives the name back unchanged"


def test_json_round_trip() -> None:
    value = {"a": [1, 2.5, None, math.nan, -math.inf, np.pi], "t": "</script>\u2028<!--&", "n": {"deep": (1e-9, True)}}
    text = to_script(value)
    assert "<" not in text
    assert "\u2028" not in text
    want = {"a": [1, 2.5, None, None, None, 3.14159], "t": value["t"], "n": {"deep": [1e-9, True]}}
    assert json.loads(text) == want


def test_long_runs_stay_small(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", epochs=40, steps_per_epoch=400))
    for chart in charts_of(page).values():
        for series in chart.get("series", []):
            assert len(series["x"]) == len(series["y"]) <= 2000
    assert page.stat().st_size < 400_000


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("holes", [0, 3, 4000])
@pytest.mark.parametrize("limit", [10, 2000])
def test_downsampling_keeps_ends_peaks_and_gaps(holes: int, limit: int) -> None:
    rng = np.random.default_rng(0)
    n = 10_001
    x, y = list(range(n)), [float(v) for v in rng.standard_normal(n)]
    y[4321], y[777] = 50.0, -50.0
    values: list[float | None] = list(y)
    for hole in rng.choice(np.setdiff1d(np.arange(1, n - 1), [4321, 777]), holes, replace=False):
        values[int(hole)] = None
    xs, ys = downsample(x, values, limit)
    assert len(xs) == len(ys) <= limit
    assert xs == sorted(set(xs))
    assert (xs[0], xs[-1]) == (0, n - 1)
    assert all(values[int(a)] == b for a, b in zip(xs, ys, strict=True))
    assert {50.0, -50.0} <= set(ys)
    assert (None in ys) == bool(holes)
    assert downsample(x[:5], values[:5], limit) == (x[:5], values[:5])


def test_correlations_are_numpys(tmp_path: Path) -> None:
    masks = masks_of(3, 12, 12)[:, :4_999]  # not a multiple of 8
    run = write_run(tmp_path / "run", epochs=12)
    write_masks(run, masks)
    read = kept_bits(RunFolder(run))
    assert read is not None
    assert (read == masks).all()
    want = np.corrcoef(masks.astype(float))
    with_last, with_previous = mask_correlations(read)
    np.testing.assert_allclose(np.array(with_last, float), want[-1], atol=1e-12)
    np.testing.assert_allclose(np.array(with_previous, float), np.diag(want, 1), atol=1e-12)
    series = charts_of(write_report(run))["correlation"]["series"]
    np.testing.assert_allclose(series[0]["y"], want[-1], atol=1e-5)
    assert series[0]["x"] == list(range(1, 13))
    np.testing.assert_allclose(series[1]["y"], np.diag(want, 1), atol=1e-5)
    assert series[1]["x"] == list(range(2, 13))


def test_a_constant_mask_has_no_correlation() -> None:
    ones = np.ones(8, dtype=bool)
    assert correlation(ones, ones) is None
    assert correlation(ones, np.arange(8) > 3) is None


# ---------------------------------------------------------------------- several runs


def write_sweep(folder: Path) -> None:
    for method in ("spartan", "imp"):
        for sparsity in (0.9, 0.98):
            for seed in range(3):
                name = f"{method}-{sparsity}-{seed}"
                write_run(folder / name, method=method, sparsity=sparsity, seed=seed, epochs=3, steps_per_epoch=20)
    write_run(folder / "dense-0", method="dense", epochs=3, steps_per_epoch=20)
    write_run(folder / "killed run", method="imp", sparsity=0.99, epochs=3, steps_per_epoch=20, done=1)


def test_comparison_means_are_numpys(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    write_report(tmp_path / "sweep" / "imp-0.9-0")
    page = write_report(tmp_path / "sweep")
    assert page == tmp_path / "sweep" / "report.html"
    assert_self_contained(page)
    charts = charts_of(page)
    assert set(charts) == {"sparsity-0", "flops-0"}
    assert charts["sparsity-0"]["lines"][0]["name"] == "dense"
    by_name = {s["name"]: s for s in charts["sparsity-0"]["series"]}
    assert set(by_name) == {"spartan", "imp"}
    text = " ".join(tags_of(page).text.split())
    for method in ("spartan", "imp"):
        assert by_name[method]["x"] == [90, 98]
        for i, sparsity in enumerate((0.9, 0.98)):
            files = (tmp_path / "sweep").glob(f"{method}-{sparsity}-*/summary.json")
            top1 = [100 * json.loads(f.read_text())["top1"] for f in files]
            assert len(top1) == 3
            assert by_name[method]["y"][i] == pytest.approx(np.mean(top1), rel=1e-5)
            assert by_name[method]["error"][i] == pytest.approx(np.std(top1, ddof=1), rel=1e-4)
            assert f"{np.mean(top1):.2f}% ± {np.std(top1, ddof=1):.2f}" in text
    assert "13 finished runs, 1 unfinished (listed, not in the means)" in text
    assert "unfinished, 1 of 3 epochs" in text


def test_comparison_links_lead_to_the_runs(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    write_report(tmp_path / "sweep" / "imp-0.9-0")
    (tmp_path / "sweep" / "imp-0.9-1").rename(tmp_path / "sweep" / "imp 0.9 #1")
    page = write_report(tmp_path / "sweep")
    links = [v for tag, key, v in tags_of(page).attributes if (tag, key) == ("a", "href")]
    assert len(links) == 14
    for link in links:
        assert (page.parent / unquote(link)).exists(), link
    assert sum(link.endswith("imp-0.9-0/report.html") for link in links) == 1
    assert "imp%200.9%20%231" in links


def test_comparison_of_unfinished_runs_only(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", epochs=3, done=1)
    page = write_report(tmp_path / "runs")
    assert charts_of(page) == {}
    assert "No run has finished yet." in tags_of(page).text


def test_models_are_not_averaged_together(tmp_path: Path) -> None:
    for model in ("wrn-22-2", "wrn-40-2"):
        write_run(tmp_path / "runs" / model, model=model, epochs=2, steps_per_epoch=5)
    charts = charts_of(write_report(tmp_path / "runs"))
    assert [c["title"] for c in charts.values() if "sparsity" in c["title"]] == [
        "Accuracy against sparsity: wrn-22-2 on torchvision/CIFAR10",
        "Accuracy against sparsity: wrn-40-2 on torchvision/CIFAR10",
    ]


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        write_report(tmp_path / "nowhere")
