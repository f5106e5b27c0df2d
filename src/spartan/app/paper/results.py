"""Keeps what runs gave, without their weights: a line of JSON a run, in the package and in a folder of the user's own.

A line holds a run's scores, how its mask moved from epoch to epoch, how sparse each layer is and, for attention in blocks,
the mean magnitude of every block of the input projections. That is all that the exhibits show.
"""

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from spartan.app.paper.experiments import Experiment, Scale
from spartan.app.report.charts import kept_bits, mask_correlations
from spartan.app.runs import RunFolder, number, settings
from spartan.app.train.config import Config
from spartan.disk import replace_file
from spartan.files import read

Record = dict[str, Any]
# Figures of a summary that are stored as they are.
FIGURES = ("top1", "top5", "test_loss", "train_loss", "achieved_sparsity", "nonzero", "parameters", "seconds")


@dataclass(frozen=True)
class Score:
    """The mean of a figure over seeds, its sample standard deviation where there are several, and how many there are."""

    mean: float
    std: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


def fingerprint(config: Config) -> str:
    """A digest of what a run computes: the method, and every setting that is not the default, the seed aside."""
    usual = settings(Config())
    own = {key: value for key, value in settings(config).items() if value != usual[key] or key == "method"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]


def packaged(scale: Scale) -> Path:
    """The file of results that comes with the package."""
    return Path(str(resources.files("spartan.app.paper") / "results" / f"{scale}.jsonl"))


@dataclass
class Results:
    """The results of one scale: those of the package and, over them, those of a folder.

    Args:
        scale: which runs these are.
        folder: where runs of one's own are kept; None: nowhere.
    """

    scale: Scale
    folder: Path | None = None
    _stale: set[str] = field(default_factory=set)

    @property
    def own(self) -> Path | None:
        """The file of one's own results."""
        return None if self.folder is None else self.folder / "results" / f"{self.scale}.jsonl"

    @cached_property
    def records(self) -> dict[str, Record]:
        """Every result by the name of its run."""
        return _read(packaged(self.scale)) | ({} if self.own is None else _read(self.own))

    def get(self, experiment: Experiment) -> Record | None:
        """The result of a run; None where there is none, or its recipe has changed since."""
        record = self.records.get(experiment.name)
        if record is not None and record["fingerprint"] != fingerprint(experiment.config()):
            self._stale.add(experiment.name)
            return None
        return record

    def missing(self, wanted: Mapping[Experiment, Iterable[str]]) -> list[Experiment]:
        """Those that have no result, or one without some of the figures that are wanted of it."""

        def lacks(experiment: Experiment, keys: Iterable[str]) -> bool:
            record = self.get(experiment)
            return record is None or any(record.get(key) is None for key in keys)

        return [experiment for experiment, keys in wanted.items() if lacks(experiment, keys)]

    def stale(self) -> list[str]:
        """Runs whose results were left aside because their recipe is another by now."""
        return sorted(self._stale)

    def scores(self, experiment: Experiment, key: str = "top1", seeds: int = 10, scale: float = 100.0) -> list[float]:
        """A figure of each seed that there is, in percent."""
        found = (self.get(one) for one in experiment.at_seeds(seeds))
        return [scale * record[key] for record in found if record is not None and record.get(key) is not None]

    def score(self, experiment: Experiment, key: str = "top1", scale: float = 100.0) -> Score | None:
        """The figure over seeds, in percent; None where no seed has it."""
        values = self.scores(experiment, key, scale=scale)
        if not values:
            return None
        return Score(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def add(self, records: Iterable[Record], to: Path) -> None:
        """Put results into a file, each in the place of an older one of the same run; the file is sorted by run."""
        found = _read(to) | {record["run"]: record for record in records}
        text = "".join(json.dumps(found[name], ensure_ascii=False) + "\n" for name in sorted(found))
        to.parent.mkdir(parents=True, exist_ok=True)
        replace_file(to, text.encode())
        self.__dict__.pop("records", None)

    def keep(self, wanted: Iterable[Experiment]) -> int:
        """Put one's own results of these runs into the package, which is meant for a checkout of it; how many."""
        mine = {} if self.own is None else _read(self.own)
        found = [mine[one.name] for one in wanted if one.name in mine and self.get(one) is not None]
        if found:
            self.add(found, packaged(self.scale))
        return len(found)


def _read(path: Path) -> dict[str, Record]:
    if not path.is_file():
        return {}
    records: dict[str, Record] = {}
    for at, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            records[record["run"]] = {"fingerprint": "", **record}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {at} is no result of a run; remove the line, and --rerun") from None
    return records


def record_of(experiment: Experiment, run: RunFolder) -> Record:
    """What is kept of a finished run."""
    summary, environment = run.summary or {}, run.environment
    record: Record = {
        "run": experiment.name,
        "fingerprint": fingerprint(run.config),
        **{key: summary.get(key) for key in FIGURES},
        "flops": summary["flops_sparse"] / summary["flops_dense"] if summary.get("flops_dense") else None,
        "flops_dense": summary.get("flops_dense"),
        "epochs": run.planned_epochs,
        "date": str(environment.get("started", ""))[:10],
        "commit": str(environment.get("commit") or "")[:7],
        "device": environment.get("device"),
        "torch": environment.get("versions", {}).get("torch"),
        "top1_by_epoch": [round(epoch["top1"], 4) for epoch in run.epochs],
    }
    masks = kept_bits(run)
    if masks is not None and len(masks) > 1 and not run.dense:
        with_last, with_previous = mask_correlations(masks)
        record["with_last"], record["with_previous"] = _rounded(with_last), _rounded(with_previous)
    record["layers"] = [[layer["name"], layer["parameters"], layer["kept"]] for layer in summary.get("layers", [])]
    maps = input_projections(run)
    return record | ({"maps": maps} if maps else {})


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]


def input_projections(run: RunFolder) -> dict[str, list[list[float]]]:
    """The mean magnitude of every block of the attention's input projections; empty where a run has none in blocks."""
    pattern, path = run.config.pattern, run.folder / "model.safetensors"
    if isinstance(pattern, str) or run.dense:
        return {}
    found = {}
    for name, weight in read(path).items():
        if name.endswith((".attn.qkv.weight", ".self_attention.in_proj_weight")):
            rows, columns = weight.shape[0] // pattern[0], weight.shape[1] // pattern[1]
            blocks = weight.float().abs().reshape(rows, pattern[0], columns, pattern[1]).mean((1, 3))
            scale = float(blocks.max()) or 1.0
            found[name] = [[round(value, 3) for value in row] for row in (blocks / scale).tolist()]
    return found


def similarity(map_: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Pearson correlations of the block magnitudes of queries, keys and values with one another; None where one is flat."""
    q, k, v = (part.flatten() for part in torch.tensor(map_, dtype=torch.float64).chunk(3, 0))
    pairs = {"queries, keys": (q, k), "queries, values": (q, v), "keys, values": (k, v)}
    return {name: number(float(torch.corrcoef(torch.stack(pair))[0, 1])) for name, pair in pairs.items()}


def provenance(records: Sequence[Mapping[str, Any]]) -> str:
    """Where results are from: devices, versions and commits, each once."""
    machines = sorted({f"{r['device']}, torch {r['torch']}" for r in records if r.get("device")})
    commits = sorted({str(r["commit"]) for r in records if r.get("commit")})
    return f"{'; '.join(machines)}; commits {', '.join(commits)}" if machines else ""
