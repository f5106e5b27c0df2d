"""Claims turn confirmed on results as the paper has them, and not confirmed on the opposite; nothing is judged by halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spartan.app.paper import results as stored
from spartan.app.paper.exhibit import exhibits, show, wanted
from spartan.app.paper.experiments import Experiment
from spartan.app.paper.figures import themed
from spartan.app.paper.results import Record, Results, fingerprint
from spartan.app.train.config import Config

TRAINED = [one for one in exhibits() if one.kind == "trained"]
BETAS = {2.5: 0.0, 5.0: 0.3, 10.0: 1.0, 20.0: 0.4, 40.0: 0.3, 80.0: 0.2, 160.0: 0.1}


def beta_of(config: Config) -> float:
    return float(config.method_args.get("beta", (1, 10))[1])


def as_the_paper_has_it(experiment: Experiment) -> Record:
    """A result that follows the paper's tables and figures in their order, not in their size."""
    config = experiment.config()
    spartan, dense = config.method == "spartan", config.method == "dense"
    blocks = not isinstance(config.pattern, str)
    ablated = config.method_args.get("project") is False
    top1 = 90.0 - (0 if dense else 10 * config.sparsity) + (0.1 if dense else 1.0) * config.epochs / 40
    top1 += {"spartan": 2.0, "imp": -4.0}.get(config.method, 0.0)
    if "vit" in config.model:
        top1 -= 0.0 if dense else (8.0 if blocks and not spartan else -8.5 if spartan and not blocks else -8.3)
    if spartan and config.sparsity == 0.95 and "wrn" in config.model:
        top1 += (-8 + 2 * list(BETAS).index(beta_of(config)) ** 0.5) if ablated else BETAS[beta_of(config)]
    if dense and config.epochs == 120:
        top1 = 87.0  # “peaks at 200 epochs”
    collapsed = config.method == "topkast" and config.sparsity == 0.99 and experiment.seed == 0
    explored = {"imp": 0.95, "topkast": 0.60}.get(config.method, 0.70 + 0.001 * beta_of(config) if spartan else 0.5)
    kept = 0.2 if blocks else 0.1
    layers = [[f"blocks.{i}.attn.proj.weight", 1000, round(1000 * kept)] for i in range(6)]
    one, other = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.2]], [[0.1, 1.0, 0.9], [1.0, 0.0, 0.3]]
    return {
        "run": experiment.name,
        "fingerprint": fingerprint(config),
        "top1": (top1 - 20 * collapsed) / 100,
        "top1_by_epoch": [(top1 - 0.1) / 100] * config.epochs,
        "epochs": config.epochs,
        "achieved_sparsity": 0.96 if config.value_power == 1.0 else 0.90,
        "flops": 0.0576 if config.cost == "flops" else 0.10 if spartan else 0.12,
        "with_last": [explored] * config.epochs,
        "with_previous": [explored] * (config.epochs - 1),
        "layers": layers,
        "maps": {"blocks.0.attn.qkv.weight": [*one, *one, *other]},
        "device": "made up",
        "torch": "0",
        "commit": "0",
    }


def the_opposite(experiment: Experiment) -> Record:
    """Spartan worst, everything flat."""
    record = as_the_paper_has_it(experiment)
    config = experiment.config()
    alike = {"with_last": [0.5] * config.epochs, "with_previous": [0.5] * (config.epochs - 1), "achieved_sparsity": 0.9}
    flat = {"layers": [[f"blocks.{i}.attn.proj.weight", 1000, 100] for i in range(6)], "flops": 0.04}
    one = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.2]]
    maps = {"blocks.0.attn.qkv.weight": [*one, *reversed(one), *one]}
    top1 = (
        0.5 - 0.001 * config.epochs if config.method == "spartan" else 0.9 + (0.05 if config.method == "dense" else 0)
    )
    top1 += 0.01 if config.method_args.get("project") is False else 0.0
    flops = flat["flops"] if config.method != "spartan" or config.value_power != 1.0 else 0.2
    return record | alike | flat | {"maps": maps, "top1": top1, "flops": flops, "top1_by_epoch": [top1]}


def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_up: Any) -> dict[str, str]:
    monkeypatch.setattr(stored, "packaged", lambda scale: tmp_path / "none.jsonl")
    results = Results("small", tmp_path)
    assert results.own is not None
    runs = wanted(TRAINED, "small")
    results.add([made_up(one) for one in runs], results.own)
    assert results.missing(runs) == []
    found: dict[str, str] = {}
    for exhibit in TRAINED:
        shown = show(exhibit, results)
        found |= {claim.text: claim.verdict for claim in shown.claims}
        if shown.draw is not None and made_up is as_the_paper_has_it:
            with themed("light"):
                assert shown.draw().axes
    return found


def test_results_as_the_papers_confirm_every_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = claims(tmp_path, monkeypatch, as_the_paper_has_it)
    assert len(found) == 21
    assert {text: verdict for text, verdict in found.items() if verdict != "confirmed"} == {}


def test_opposite_results_confirm_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = claims(tmp_path, monkeypatch, the_opposite)
    assert {text: verdict for text, verdict in found.items() if verdict != "not confirmed"} == {}
