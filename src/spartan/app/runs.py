"""Reads run folders, however their runs ended, and tells which runs are the same experiment."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spartan.app.train.config import Config, RecipeError, load_recipe
from spartan.app.train.recipe_text import parse_yaml
from spartan.methods import entries
from spartan.wording import shortened

# Keys that say where and how a run is done, not what it computes.
INCIDENTAL = (
    "description",
    "device",
    "parallel",
    "checkpoint_epochs",
    "checkpoint_steps",
    "checkpoint_async",
    "tracker",
)
INCIDENTAL_DATA = ("path", "download", "workers")
# What a summary has at least, each a number or null.
FIGURES = [
    *("top1", "top5", "test_loss", "train_loss", "seconds", "images_per_s", "epochs", "achieved_sparsity", "nonzero"),
    *("parameters", "model_parameters", "flops_dense", "flops_sparse", "model_bytes", "dense_bytes"),
]


@dataclass(frozen=True)
class Measure:
    """What runs on some kind of data are compared by.

    Args:
        key: in a summary, and in the records of epochs.
        name: for people.
        percent: whether it is a fraction, shown in percent.
        lower: whether less is better.
        unit: what examples are called.
    """

    key: str
    name: str
    percent: bool
    lower: bool
    unit: str

    @property
    def label(self) -> str:
        """The name, with its unit and, where less is better, that."""
        return f"{self.name} (%)" if self.percent else f"{self.name} (lower is better)" if self.lower else self.name

    @property
    def heading(self) -> str:
        """The name, short, over a column of numbers."""
        return f"{self.name} %" if self.percent else self.name

    @property
    def digits(self) -> int:
        """Decimal places that tell runs apart."""
        return 2 if self.percent else 4

    def scaled(self, value: Any) -> float | None:
        """The value as it is shown: a percentage, or itself; None where it is no number."""
        found = number(value)
        return found if found is None or not self.percent else 100 * found

    def text(self, value: Any) -> str:
        """The value for people; a dash where it is none."""
        found = self.scaled(value)
        return "–" if found is None else f"{found:.{self.digits}f}" + "%" * self.percent


TOP1 = Measure("top1", "top-1", percent=True, lower=False, unit="images")
BITS = Measure("bits_per_byte", "bits per byte", percent=False, lower=True, unit="sequences")


def measure_of(record: Mapping[str, Any]) -> Measure:
    """What a summary, or the record of an epoch, is compared by."""
    return BITS if BITS.key in record else TOP1


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, each read when it is first asked for. A run is finished if and only if it has a summary.

    What is missing, cut off or damaged counts as not there: a report can be had of every run. Only `config` insists on
    a recipe that could be run; `read_run` is for those who cannot go on without one.
    """

    folder: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @cached_property
    def config(self) -> Config:
        """The recipe, checked."""
        path = self.folder / "recipe.yaml"
        try:
            return load_recipe(path)
        except RecipeError as error:
            named = str(error).startswith(str(path))
            raise error if named else RecipeError(f"{path}: {error}") from None

    @cached_property
    def recipe_text(self) -> str:
        """recipe.yaml as it stands there."""
        return _text(self.folder / "recipe.yaml")

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe, unchecked; empty where it is no YAML."""
        return _table(self.recipe_text, lambda text: parse_yaml(text, "recipe.yaml")) or {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and command."""
        return _table(_text(self.folder / "environment.json"), json.loads) or {}

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """The results; None while the run is unfinished, or where they are damaged."""
        return None if self.damage else _table(_text(self.folder / "summary.json"), json.loads)

    @cached_property
    def damage(self) -> str:
        """What is wrong with summary.json, if it is there; empty where nothing is."""
        values = _table(_text(self.folder / "summary.json"), json.loads)
        if not is_finished(self.folder):
            return ""
        if values is None:
            return "it is not a JSON object"
        for key in FIGURES:
            if key not in values:
                return f"it lacks {key}"
            if not (values[key] is None or _is_number(values[key])):
                return f"{key} is {shortened(repr(values[key]))}, which is no number"
        layers = values.get("layers")
        if not isinstance(layers, list) or not all(map(_is_layer, layers)):
            return "its layers are not a list of tables, each with the name and the shape of a weight"
        return ""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary is not None

    @property
    def status(self) -> str:
        """Finished, or how far it came."""
        return "finished" if self.finished else f"unfinished, {len(self.epochs)} of {self.planned_epochs} epochs"

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.recipe.get("method", Config.method))

    @property
    def dense(self) -> bool:
        """Whether the method leaves the model dense."""
        return never_sparse(self.method)

    @property
    def sparsity(self) -> float:
        """The sparsity asked for; a dense run has none, whatever its recipe says."""
        return 0.0 if self.dense else number(self.recipe.get("sparsity")) or 0.0

    @property
    def seed(self) -> int:
        """The seed of its recipe."""
        return int(number(self.recipe.get("seed")) or 0)

    @property
    def planned_epochs(self) -> int:
        """Epochs in the recipe."""
        return int(number(self.recipe.get("epochs")) or 0)

    @cached_property
    def _metrics(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
        """Steps and epochs in order, and how many lines could not be read; of lines for the same step the last counts."""
        found: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "epoch": {}}
        damaged = 0
        for line in filter(str.strip, _text(self.folder / "metrics.jsonl").splitlines()):
            record = read_metric(line)
            if record is None:
                damaged += 1
            elif record["kind"] in found:
                found[record["kind"]][record[record["kind"]]] = record
        steps, epochs = ([records[k] for k in sorted(records)] for records in found.values())
        return steps, epochs, damaged

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps of metrics.jsonl, in order."""
        return self._metrics[0]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The epochs of metrics.jsonl, in order."""
        return self._metrics[1]

    @property
    def damaged_lines(self) -> int:
        """Lines of metrics.jsonl that could not be read, such as one cut short by a kill."""
        return self._metrics[2]


def measure_of_run(run: RunFolder) -> Measure:
    """What a run is compared by."""
    data = run.recipe.get("data")
    return BITS if isinstance(data, dict) and data.get("source") == "text" else TOP1


def read_metric(line: str | bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl, of a step or an epoch that has a number; None where it is none."""
    record = _table(line, json.loads)
    at = None if record is None else record.get(str(record.get("kind")))
    return record if isinstance(at, int) and not isinstance(at, bool) and 0 < at < 1 << 53 else None


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if _is_number(value) and math.isfinite(value) else None


def _is_layer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("shape"), list)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, float) or abs(value) < 1 << 1000  # what a float can hold


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _table(text: str | bytes, parse: Callable[[Any], Any]) -> dict[str, Any] | None:
    try:
        values = parse(text)
    except (ValueError, RecursionError):  # JSON may be nested deeper than Python can follow
        return None
    return values if isinstance(values, dict) else None


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (folder / "recipe.yaml").is_file()


def is_finished(folder: Path) -> bool:
    """Whether the run came to its end: its summary is written last."""
    return (folder / "summary.json").is_file()


def read_run(folder: Path) -> RunFolder:
    """The run in a folder; ValueError where it has no recipe that can be run, or a summary that cannot be read."""
    if not is_run(folder):
        raise ValueError(f"{folder} is no run folder: it holds no recipe.yaml")
    run = RunFolder(folder)
    _ = run.config  # or its error
    if run.damage:
        raise ValueError(
            f"{folder / 'summary.json'} is damaged: {run.damage}; remove it, and spartan train --resume {folder} writes it "
            "anew from the last checkpoint"
        )
    return run


def find_runs(paths: Iterable[Path]) -> list[RunFolder]:
    """The runs in these folders and below them, each once, in the order of their names."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no folder {path}")
        folders = [path] if is_run(path) else sorted(recipe.parent for recipe in path.rglob("recipe.yaml"))
        folders = [f for f in folders if f == path or not f.name.startswith(".")]  # half-made by a killed start
        if not folders:
            raise ValueError(f"{path} holds no run: there is no recipe.yaml in it or below it")
        for folder in folders:
            found.setdefault(folder.resolve(), folder)
    return [read_run(folder) for folder in found.values()]


def epochs_done(folder: Path) -> int:
    """How many epochs a run has behind it, from the end of its metrics (the whole may be long)."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        ended = re.findall(rb'"epoch": (\d{1,15})\b', file.read())
    return max(0, int(ended[-1]) - 1) if ended else 0


def result_line(summary: Mapping[str, Any]) -> str:
    """A run's result in half a line."""
    formats, by = {"achieved_sparsity": ".2%", "nonzero": ",", "seconds": ".1f"}, measure_of(summary)
    found = {k: "–" if number(summary[k]) is None else format(summary[k], how) for k, how in formats.items()}
    rest = "sparsity {achieved_sparsity}, {nonzero} nonzero weights, {seconds} s".format(**found)
    return f"{by.name} {by.text(summary[by.key])}, {rest}"


def data_name(config: Config) -> str:
    """The data set in a word: its source and, where that alone does not say, the name of its file or folder."""
    source, path = config.data.source, config.data.path
    files = ("npz", "imagefolder", "webdataset", "text")
    return f"{source}:{Path(path).stem}" if path and source in files else source


def never_sparse(method: str) -> bool:
    """Whether a method leaves the model dense."""
    return any(entry.name == method and entry.sparse_from == "never" for entry in entries())


def settings(config: Config) -> dict[str, Any]:
    """Everything that makes one experiment differ from another, the seed aside, by dotted key."""
    flat: dict[str, Any] = {"data": data_name(config)}
    for key, value in dataclasses.asdict(config).items():
        if isinstance(value, dict) and key in ("data", "optimizer"):
            flat |= {f"{key}.{k}": v for k, v in value.items() if key != "data" or k not in INCIDENTAL_DATA}
        elif key not in INCIDENTAL and key != "seed":
            flat[key] = value
    return flat | ({"sparsity": 0.0} if never_sparse(config.method) else {})


def fixed_settings(config: Config) -> dict[str, Any]:
    """Everything that a run that goes on must not change, by dotted key, as plain values that a checkpoint can hold."""
    flat: dict[str, Any] = {}
    for key, value in json.loads(json.dumps(dataclasses.asdict(config))).items():
        if key in ("data", "optimizer"):
            flat |= {f"{key}.{k}": v for k, v in value.items() if key != "data" or k not in INCIDENTAL_DATA}
        elif key not in INCIDENTAL:
            flat[key] = value
    return flat


def identity(config: Config, seed: bool = True) -> str:
    """Text that is equal for equal experiments (with `seed`: for the same run)."""
    return json.dumps(settings(config) | ({"seed": config.seed} if seed else {}), sort_keys=True)
