"""Reading run folders: what is there, how far it came, and which runs are the same experiment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spartan.app.train.config import Config, RecipeError, load_recipe

# Keys that say where and how a run is done, not what it computes.
INCIDENTAL = ("description", "device", "parallel", "checkpoint_epochs", "checkpoint_steps", "checkpoint_async")
INCIDENTAL_DATA = ("path", "download", "workers")


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path
    config: Config
    # summary.json; None while the run is unfinished
    summary: dict[str, Any] | None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary is not None

    @property
    def seed(self) -> int:
        """The seed of its recipe."""
        return self.config.seed

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        """The epoch lines of metrics.jsonl."""
        return [line for line in read_metrics(self.folder) if line.get("kind") == "epoch"]


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (folder / "recipe.yaml").is_file()


def is_finished(folder: Path) -> bool:
    """Whether the run came to its end: its summary is written last."""
    return (folder / "summary.json").is_file()


def free_folder(first: Path) -> Path:
    """This folder or, where it exists, the first of folder-2, folder-3, … that does not."""
    folder, counter = first, 1
    while folder.exists():
        counter += 1
        folder = first.with_name(f"{first.name}-{counter}")
    return folder


def to_continue(recipe: str, config: Config, out: Path | None, again: bool) -> tuple[Path, bool]:
    """The folder of a run, and whether the run is there already, to be continued.

    It is `again` when torchrun starts its processes anew after one has died: then a folder with a run of the very same
    recipe is continued, the one asked for or the last unfinished one under the usual name. Anybody else has to ask for it
    with --resume.
    """
    if out is None:
        usual = Path("runs") / run_name(recipe, config)
        mine = [p for p in usual.parent.glob(f"{usual.name}*") if again and _same_run(p, config) and not is_finished(p)]
        newest = max(mine, key=lambda p: (p / "recipe.yaml").stat().st_mtime_ns, default=None)
        return (free_folder(usual), False) if newest is None else (newest, True)
    if not is_run(out) or (again and _same_run(out, config)):
        return out, is_run(out)
    raise RecipeError(f"--out: {out} holds a run already; continue it with --resume {out}, or choose another folder")


def check_settings_on_the_way(sets: Sequence[str]) -> None:
    """A run that goes on may change where and how it is done, not what it computes."""
    free = [*INCIDENTAL, *(f"data.{key}" for key in INCIDENTAL_DATA)]
    for key in (setting.partition("=")[0].strip() for setting in sets):
        if key not in free:
            raise RecipeError(
                f"--resume continues a run as it was started; it cannot be combined with --set {key}, but with --set of "
                f"{', '.join(free)}"
            )


def _same_run(folder: Path, config: Config) -> bool:
    return is_run(folder) and read_run(folder).config == config


def run_name(recipe: str, config: Config) -> str:
    """What a run's folder is called when nobody says."""
    return f"{Path(recipe).stem}-{config.method}-{config.sparsity:g}-seed{config.seed}".replace("/", "_")


def read_run(folder: Path) -> Run:
    """The run in a folder."""
    if not is_run(folder):
        raise ValueError(f"{folder} is no run folder: it holds no recipe.yaml")
    try:
        config = load_recipe(folder / "recipe.yaml")
    except RecipeError as error:
        raise RecipeError(f"{folder / 'recipe.yaml'}: {error}") from None
    if not is_finished(folder):
        return Run(folder, config, None)
    try:
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        raise ValueError(f"{folder / 'summary.json'} is damaged: it is not a JSON object")
    return Run(folder, config, summary)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one cut short by a kill is left out."""
    path = folder / "metrics.jsonl"
    lines = []
    for text in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def find_runs(paths: Iterable[Path]) -> list[Run]:
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


def result(summary: Mapping[str, Any]) -> str:
    """A run's result in half a line."""
    return (
        f"top-1 {summary['top1']:.2%}, sparsity {summary['achieved_sparsity']:.2%}, "
        f"{summary['nonzero']:,} nonzero weights, {summary['seconds']:.1f} s"
    )


# ---------------------------------------------------------------------- which runs are the same


def data_name(config: Config) -> str:
    """The data set in a word: its source and, where that alone does not say, the name of its file or folder."""
    source, path = config.data.source, config.data.path
    return f"{source}:{Path(path).stem}" if path and source in ("npz", "imagefolder", "webdataset") else source


def asked_sparsity(config: Config) -> float:
    """The sparsity asked for; 0 for a method that never makes the model sparse, whatever the recipe says."""
    import spartan

    dense = any(entry.name == config.method and entry.sparse_from == "never" for entry in spartan.methods())
    return 0.0 if dense else config.sparsity


def settings(config: Config) -> dict[str, Any]:
    """Everything that makes one experiment differ from another, the seed aside, by dotted key."""
    flat: dict[str, Any] = {"data": data_name(config)}
    for key, value in dataclasses.asdict(config).items():
        if isinstance(value, dict) and key in ("data", "optimizer"):
            flat |= {f"{key}.{k}": v for k, v in value.items() if key != "data" or k not in INCIDENTAL_DATA}
        elif key not in INCIDENTAL and key != "seed":
            flat[key] = value
    return flat | {"sparsity": asked_sparsity(config)}


def identity(config: Config, seed: bool = True) -> str:
    """Text that is equal for equal experiments (with `seed`: for the same run)."""
    return json.dumps(settings(config) | ({"seed": config.seed} if seed else {}), sort_keys=True)


# ---------------------------------------------------------------------- weights


def load_trained(
    target: Path, recipe: str | None, sets: Sequence[str] = ()
) -> tuple[Config, dict[str, Any], dict[str, Any] | None]:
    """Recipe, weights and summary of a finished run; of a file of weights, with the recipe it needs and no summary."""
    if not target.is_dir():
        if recipe is None:
            hint = "a file needs --recipe RECIPE" if target.is_file() else "there is no such run folder or file"
            raise RecipeError(f"{target}: {hint}")
        return load_recipe(recipe, sets), load_weights(target), None
    if recipe is not None:
        raise RecipeError(f"--recipe: {target} is a run folder and has its own; use --set to change keys of it")
    run = read_run(target)
    if not run.finished:
        raise ValueError(f"{target} is unfinished; continue it first: spartan train --resume {target}")
    return load_recipe(target / "recipe.yaml", sets), load_weights(target / "model.safetensors"), run.summary


def load_weights(file: Path) -> dict[str, Any]:
    """The tensors of a .safetensors file, packed by `spartan.save` or plain."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from spartan.files import read

    try:
        return read(file) if is_packed(file) else load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from None


def is_packed(file: Path) -> bool:
    """Whether `spartan.save` wrote a .safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    try:
        with safe_open(file, "pt") as opened:
            return "spartan.version" in (opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from None


def count_nonzero(weights: Mapping[str, Any], summary: Mapping[str, Any] | None) -> tuple[int, int, str]:
    """Nonzero and all of the weights that a run counted; without its summary, of the tensors that can be sparse."""
    sizes = {name: (int((w != 0).sum()), w.numel()) for name, w in weights.items() if w.ndim > 1}
    if summary is None:
        kind = "weights in tensors of 2 or more dimensions"
        return sum(n for n, _ in sizes.values()), sum(n for _, n in sizes.values()), kind
    counted = [sizes[layer["name"]] for layer in summary["layers"]]
    zeros, total = sum(size - nonzero for nonzero, size in counted), int(summary["parameters"])
    return total - zeros, total, "counted weights"
