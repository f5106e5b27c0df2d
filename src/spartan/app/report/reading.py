"""What a run folder says, however the run ended: missing, cut off or damaged files are noted, not fatal."""

from __future__ import annotations

import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from spartan.methods import Method, entries
from spartan.problem.schedules import Moment


@dataclass(frozen=True)
class Run:
    """The files of one run. A run is finished if and only if it has a summary."""

    path: Path
    recipe_text: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    damaged_lines: int
    summary: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.recipe.get("method", "spartan"))

    @property
    def sparsity(self) -> float:
        """The sparsity asked for; a dense run has none, whatever its recipe says."""
        value = number(self.recipe.get("sparsity"))
        return 0.0 if self.method == "dense" or value is None else value

    @property
    def planned_epochs(self) -> int:
        """Epochs in the recipe."""
        return int(number(self.recipe.get("epochs")) or 0)

    @property
    def status(self) -> str:
        """Finished, or how far it came."""
        if self.summary is not None:
            return "finished"
        return f"unfinished, {len(self.epochs)} of {self.planned_epochs} epochs"

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, as far as the files tell."""
        if self.summary and (steps := number(self.summary.get("steps"))):
            return int(steps)
        if self.epochs and (step := number(self.epochs[-1].get("step"))):
            return round(step / self.epochs[-1]["epoch"] * self.planned_epochs)
        return None

    def phases(self) -> list[dict[str, Any]]:
        """Where warm-up, intermediate and finetune phases begin and end, in steps; empty where that is unknown."""
        total = self.total_steps
        method = self._built_method()
        fractions = [number(self.recipe.get(key)) for key in ("warmup", "finetune")]
        if method is not None:
            fractions = [
                own if given is None else given
                for given, own in zip(fractions, (method.warmup, method.finetune), strict=True)
            ]
        warmup, finetune = fractions
        if not total or warmup is None or finetune is None or self.method == "dense":
            return []
        try:
            at = Moment.start(total, warmup, finetune, 0)
        except ValueError:
            return []
        edges = [0, at.warmup_steps, at.freeze_step, total]
        names = ["warm-up", "intermediate", "finetune"]
        return [{"from": a, "to": b, "name": n} for a, b, n in zip(edges[:-1], edges[1:], names, strict=True) if b > a]

    def _built_method(self) -> Method | None:
        """The method with its settings, which may decide how long its phases are; None where it cannot be built."""
        cls = next((e.cls for e in entries() if e.name == self.method), None)
        try:
            return None if cls is None else cls(**(self.recipe.get("method_args") or {}))
        except (TypeError, ValueError):
            return None if cls is None else cls()

    def masks(self) -> npt.NDArray[np.bool_] | None:
        """The kept bits of the sampled weights, [epochs, n]; None where there are none to read."""
        try:
            # Opened here: numpy forgets to close a file that it cannot read.
            with (self.path / "masks.npz").open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                bits, n = file["bits"], int(file["n"])
            if bits.ndim != 2 or bits.dtype != np.uint8 or n < 1 or bits.shape[1] * 8 < n:
                return None
            return np.unpackbits(bits, axis=1, count=n).astype(bool)
        except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
            return None


def read_run(path: Path) -> Run:
    """A run folder, as far as it got."""
    text = _text(path / "recipe.yaml")
    steps, epochs, damaged = _metrics(path / "metrics.jsonl")
    return Run(
        path, text, _recipe(text), _json(path / "environment.json") or {}, steps, epochs, damaged, _summary(path)
    )


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _recipe(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _json(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(_text(path))
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _summary(path: Path) -> dict[str, Any] | None:
    return _json(path / "summary.json")


def _metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Steps and epochs in order, and how many lines could not be read. A line that was written again replaces the first."""
    steps: dict[int, dict[str, Any]] = {}
    epochs: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in _text(path).splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if record["kind"] == "step":
                steps[int(record["step"])] = record
            elif record["kind"] == "epoch":
                epochs[int(record["epoch"])] = record
        except (ValueError, KeyError, TypeError):
            damaged += 1
    return [steps[k] for k in sorted(steps)], [epochs[k] for k in sorted(epochs)], damaged
