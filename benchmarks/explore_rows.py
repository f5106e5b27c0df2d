"""Lines and rows of explore.py: what a line asks for, what a row of its CSV says, and which lines have a row already."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from compare import BEFORE

from spartan.app.runs import RunFolder
from spartan.app.train.sweep import Outcome

COLUMNS = ["date", "commit", "device", "torch", "recipe", "settings", "seed", "metric", "result", "seconds", "failure"]


def as_point(line: str) -> tuple[str, tuple[str, ...]]:
    """A line of the list: the recipe, and its settings with a method."""
    recipe, *sets = line.split()
    return recipe, (*(() if any(s.startswith("method=") for s in sets) else ("method=explore",)), *sets)


def settings_of(sets: Sequence[str]) -> str:
    """What stands in a row's column of settings: the seed has its own, and where data are says nothing of a run."""
    return " ".join(s for s in sets if not s.startswith(("data.path", "seed=")))


def rows_of(path: Path) -> set[tuple[str, frozenset[str], str]]:
    """Recipe, settings and seed of every run that a CSV has a result of, by a rule that has not changed since."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["result"]]
    found = set()
    for row in rows:
        words = frozenset(row["settings"].split())
        methods = [word.removeprefix("method=") for word in words if word.startswith("method=")]
        if not any(row["commit"] in BEFORE.get(method, ()) for method in methods):
            found.add((row["recipe"], words, row["seed"]))
    return found


def row_of(outcome: Outcome) -> list[str]:
    """The row of a run, from its recipe on."""
    job, summary = outcome.job, RunFolder(outcome.job.folder).summary or {}
    metric = "" if outcome.state == "failed" else "test_loss" if "bits_per_byte" in summary else "top1"
    result = f"{summary[metric] * (1 if metric == 'test_loss' else 100):.4f}" if metric else ""
    failure = outcome.reason.splitlines()[-1] if outcome.reason else ""
    seconds = max(outcome.seconds, summary.get("seconds", 0.0))  # of a run of an earlier call: its training alone
    return [job.recipe, settings_of(job.sets), str(job.config.seed), metric, result, f"{seconds:.0f}", failure]
