"""Finds trained models in run folders and files, for `spartan evaluate`, `export`, `inspect --kernels` and `bench`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from spartan.app.runs import read_run
from spartan.app.train.config import Config, RecipeError, load_recipe
from spartan.app.train.data import build_data
from spartan.app.train.setup import build_model
from spartan.files.load import fill, load_named, open_file, read
from spartan.wording import one_line

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trained:
    """A model with its weights, on the CPU, in float32 and eval mode, and what is known about it."""

    name: str
    # the file that its weights are from, and whether that is a packed one
    path: Path
    packed: bool
    model: nn.Module
    # as in the file: model, classes, shape and args
    reference: dict[str, Any]
    # None where neither a run nor --recipe says
    config: Config | None

    @property
    def dense_bytes(self) -> int:
        """What the tensors take when they are stored as they are."""
        return sum(t.nbytes for t in self.model.state_dict().values())

    @property
    def sparsity(self) -> float:
        """The share of zeros in tensors of two or more dimensions."""
        weights = [t for t in self.model.state_dict().values() if t.ndim > 1 and t.is_floating_point()]
        return 1.0 - sum(int(t.count_nonzero()) for t in weights) / max(1, sum(t.numel() for t in weights))

    def noise(self, batch: int) -> Tensor:
        """Inputs of the right shape: images, or sequences of tokens."""
        shape, generator = self.reference.get("shape", (3, 224, 224)), torch.Generator().manual_seed(0)
        if len(shape) == 1:
            return torch.randint(self.reference.get("classes", 256), (batch, *shape), generator=generator)
        return torch.randn(batch, *shape, generator=generator)


def find_trained(target: Path, recipe: str | None = None, sets: Sequence[str] = ()) -> Trained:
    """The model of a finished run, or of a file; ValueError with the remedy where it cannot be built.

    A packed file says by itself which model it holds; a plain one needs the recipe.

    Args:
        target: a run folder or a .safetensors file.
        recipe: for a file: the recipe that names model and data.
        sets: changes to the run's recipe or to `recipe`, each `key=value`.
    """
    name = target.resolve().name.removesuffix(".safetensors")
    if target.is_file() and recipe is None and is_packed(target):
        if sets:
            raise RecipeError("--set changes keys of a recipe, and a file has none; --recipe RECIPE names one")
        contents = open_file(target)
        model = load_named(contents, "--recipe RECIPE names the model")
        return Trained(name, target, True, model.float(), dict(contents.architecture or {}), None)
    config, weights, _ = load_trained(target, recipe, sets)
    path = target / "model.safetensors" if target.is_dir() else target
    packed = is_packed(path)
    # A run's own file says what the data were like, so that they need not be there; another file is not asked.
    reference = dict(open_file(path).architecture or {}) if packed and target.is_dir() else {}
    if not {"classes", "shape"} <= reference.keys():
        data = build_data(config, CPU)
        reference = {"classes": data.classes, "shape": list(data.shape)}
    reference = {"model": config.model, **reference, "args": config.model_args}
    with torch.random.fork_rng(devices=[]):
        model = build_model(config, reference["classes"], reference["shape"])
    fill_model(model, config, weights, path)
    return Trained(name, path, packed, model.eval(), reference, config)


def fill_model(model: nn.Module, config: Config, weights: Mapping[str, Tensor], file: Path) -> None:
    """Put the weights of a file into a recipe's model, which is made narrower where the file's was."""
    contents = open_file(file) if is_packed(file) else None
    try:
        if contents is not None and contents.narrowed is not None:
            fill(contents, model)
        else:
            model.load_state_dict(weights)
    except (RuntimeError, ValueError) as error:
        raise RecipeError(f"the weights do not fit model {config.model}: {one_line(error)}") from None


def load_trained(
    target: Path, recipe: str | None, sets: Sequence[str] = ()
) -> tuple[Config, dict[str, Tensor], dict[str, Any] | None]:
    """Recipe, weights and summary of a finished run; of a file of weights, with the recipe it needs and no summary."""
    summary, file = None, target
    if target.is_dir():
        if recipe is not None:
            raise RecipeError(f"--recipe: {target} is a run folder and has its own; use --set to change keys of it")
        summary = read_run(target).summary
        if summary is None:
            raise ValueError(f"{target} is unfinished; continue it first: spartan train --resume {target}")
        recipe, file = str(target / "recipe.yaml"), target / "model.safetensors"
    elif recipe is None:
        hint = "a file needs --recipe RECIPE" if target.is_file() else "there is no such run folder or file"
        raise RecipeError(f"{target}: {hint}")
    return load_recipe(recipe, sets), read(file) if is_packed(file) else load_file(file), summary


def is_packed(file: Path) -> bool:
    """Whether `spartan.save` wrote a .safetensors file; ValueError where it is none."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    try:
        with safe_open(file, "pt") as opened:
            return "spartan.version" in (opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from None
