"""Reads recipes: YAML with a typed schema. Every mistake names its key and, where there is one, the key that was meant."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import yaml

from spartan.app.train.other_method import drop_old_methods_settings
from spartan.app.train.recipe_text import DEEPEST, LARGEST_NUMBER, is_small, parse_yaml, read_text, too_large
from spartan.app.train.recipe_text import RecipeError as RecipeError
from spartan.problem.costs import cost_by_name
from spartan.problem.patterns import read_pattern
from spartan.wording import nearest, shortened


@contextmanager
def blaming_the_recipe(key: str = "") -> Iterator[None]:
    """Raises as RecipeError whatever ValueError the library has about values that come from a recipe, under that key."""
    try:
        yield
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{key}: {error}" if key else str(error)) from error


@dataclass(frozen=True)
class DataConfig:
    """Where images or text come from, and what happens to them."""

    # digits, npz, torchvision/NAME, imagefolder, webdataset, text, or module:function
    source: str = "digits"
    # the .npz file, the folder (with train/ and val/), the shards' folder or pattern, or torchvision's root; a file or a
    # folder of text, null: the Python standard library's sources
    path: str | None = None
    # text: which files of a folder, by the end of their names, such as .txt; null: all
    suffix: str | None = None
    # text: bytes in a sequence
    context: int = 256
    # fetch torchvision data sets that are not there yet
    download: bool = False
    # side length that large images are cropped to; small-image sets keep their own
    image_size: int = 224
    # webdataset: how many samples the shards hold, and how many classes; text: sequences in an epoch and in the test
    train_size: int | None = None
    test_size: int | None = None
    classes: int | None = None
    # augmentation of small images, done in batch on the device
    pad: int = 0
    flip: bool = False
    cutout: int = 0
    # augmentation of large images: (operations, magnitude) of RandAugment
    randaugment: tuple[int, int] | None = None
    # how large images are resized, when they are cropped and in RandAugment
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    # processes that decode and augment large images; with several training processes, so many for each
    workers: int = 8


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate over the run: linear warm-up, then cosine."""

    name: Literal["sgd", "adamw", "adam"] = "sgd"
    lr: float = 0.1
    # where the cosine ends
    final_lr: float = 0.0
    # epochs of linear warm-up; a fraction is fine
    warmup_epochs: float = 0.0
    momentum: float = 0.9
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    # on weights only; biases and norms have none
    weight_decay: float = 0.0


@dataclass(frozen=True)
class DistillConfig:
    """Learning from the scores of another model beside the labels."""

    # the part of the loss that is the distance to its scores
    weight: float = 0.5
    temperature: float = 2.0
    # a file with its weights; null: that of start
    teacher: str | None = None


@dataclass(frozen=True)
class Config:
    """One training run, complete. `spartan train RECIPE --show` prints it."""

    description: str = ""
    seed: int = 0
    epochs: int = 10
    # sparsity
    sparsity: float = 0.9
    method: str = "paced"
    # Changed by --set, a method comes with its own method_args, budget (but for a table), warmup and finetune.
    # arguments of the method; for spartan e.g. {beta: [1, 10]} or {solver: sinkhorn, init: threshold}
    method_args: dict[str, Any] = field(default_factory=dict)
    # unstructured, [h, w] for blocks, channel, channel:in, nm:N:M (nm:2:4), heads:H, or one of your own by its name
    pattern: str | tuple[int, int] = "unstructured"
    # params, flops, or one of your own by its name
    cost: str = "params"
    # with flops: v = c^p |θ|
    value_power: float = 1.0
    # global, uniform, erk, {glob: sparsity}; null: the method's own
    budget: str | dict[str, float] | None = None
    include: list[str] | None = None
    exclude: list[str] = field(default_factory=list)
    # fractions of the run; null: the method's own
    warmup: float | None = None
    finetune: float | None = None
    # what sparsity is a fraction of: targets, or model
    count: Literal["targets", "model"] = "targets"
    # fraction of a layer that is kept at least, where layers share a budget; or {glob: fraction}
    min_density: float | dict[str, float] = 0.0
    # digits-cnn, wrn-DEPTH-WIDTH, resnet18-cifar, vit-DEPTH-WIDTH-PATCH, torchvision/NAME, timm/NAME, or module:function
    model: str = "digits-cnn"
    model_args: dict[str, Any] = field(default_factory=dict)
    # a file whose weights the run begins with: a packed one, or torch's .pt of a state dict; null: untrained
    start: str | None = None
    # learning from a dense model beside the labels: {weight: 0.5, temperature: 2, teacher: FILE}; null: labels alone
    distill: DistillConfig | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # images per optimizer step, over all devices
    batch_size: int = 128
    # images per forward pass of one process; null: all it has. Gradients are accumulated over the rest
    micro_batch: int | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    # gradient norm is clipped to this; null: not at all
    clip: float | None = None
    # none, bf16, fp16
    amp: Literal["none", "bf16", "fp16"] = "none"
    # compile the model; on a GPU, elsewhere it runs eagerly
    compile: bool = False
    channels_last: bool = False
    # several processes (torchrun): ddp, each holds the whole model; fsdp2, each holds a part of every weight
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    # several processes: batch norm over the whole batch rather than each process's part; on GPUs
    sync_bn: bool = False
    # auto (cuda where there is one), cpu, cuda
    device: str = "auto"
    # epochs between checkpoints, and steps between them (0: epochs only)
    checkpoint_epochs: int = 1
    checkpoint_steps: int = 0
    # fsdp2: training goes on while a checkpoint is written
    checkpoint_async: bool = False
    # beside TensorBoard: wandb or mlflow, offline where nothing says otherwise
    tracker: Literal["none", "wandb", "mlflow"] = "none"

    def __post_init__(self) -> None:
        _check_ranges(self)


# More than anybody means: steps that never end, or memory and processes that no machine has.
LARGEST = {"epochs": 10**6, "batch_size": 10**7, "data.image_size": 10**4, "data.pad": 10**3, "data.cutout": 10**4}
LARGEST |= {"data.context": 10**6, "data.workers": 10**3, "checkpoint_epochs": 10**9, "checkpoint_steps": 10**12}


def _check_ranges(c: Config) -> None:
    """What types alone do not say."""
    for key, most in LARGEST.items():
        if (count := attrgetter(key)(c)) > most:
            raise RecipeError(f"{key}: {count} is too large; it must be at most {most:,}")
    for key in ("epochs", "batch_size", "checkpoint_epochs", "data.image_size", "data.context"):
        if (count := attrgetter(key)(c)) < 1:
            raise RecipeError(f"{key}: {count} is too small; it must be at least 1")
    at_least_zero = ["seed", "label_smoothing", "mixup", "cutmix", "data.pad", "data.cutout", "data.workers"]
    at_least_zero += ["optimizer.weight_decay", "optimizer.final_lr", "optimizer.warmup_epochs", "checkpoint_steps"]
    for key in at_least_zero:
        if not (value := attrgetter(key)(c)) >= 0:
            raise RecipeError(f"{key}: {value} is negative; it must be at least 0")
    if not 0 <= c.sparsity < 1:
        raise RecipeError(f"sparsity: {c.sparsity} is outside [0, 1): it is the fraction that is gone, such as 0.95")
    with blaming_the_recipe("pattern"):
        read_pattern(c.pattern)
    with blaming_the_recipe("cost"):
        cost_by_name(c.cost)
    if not (c.optimizer.lr > 0 and math.isfinite(c.optimizer.lr)):
        raise RecipeError(f"optimizer.lr: {c.optimizer.lr} is no learning rate; it must be positive")
    if c.label_smoothing >= 1:
        raise RecipeError(f"label_smoothing: {c.label_smoothing} must be below 1")
    if c.clip is not None and not c.clip > 0:
        raise RecipeError(f"clip: {c.clip} is no gradient norm; it must be positive, or null for none")
    if (d := c.distill) is not None:
        if not 0 < d.weight <= 1 or not d.temperature > 0:
            raise RecipeError(f"distill: weight {d.weight} must lie in (0, 1], temperature {d.temperature} above 0")
        if d.teacher is None and c.start is None:
            raise RecipeError("distill: there is no model to learn from; name its file in distill.teacher or start")
    if c.checkpoint_async and c.parallel != "fsdp2":
        raise RecipeError(f"checkpoint_async: it needs parallel: fsdp2, not {c.parallel}; set it to false")
    if c.micro_batch is not None and (c.micro_batch < 1 or c.batch_size % c.micro_batch):
        raise RecipeError(f"micro_batch: {c.micro_batch} must divide batch_size {c.batch_size}")


# ---------------------------------------------------------------------- from YAML to Config


def recipe_names() -> list[str]:
    """The built-in recipes."""
    folder = resources.files("spartan.app") / "recipes"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_recipe(recipe: str | Path, sets: Sequence[str] = ()) -> Config:
    """A built-in recipe by name, or a YAML file, with `key=value` settings on top (dots reach into sections).

    A recipe may have other sizes of itself: under `sizes`, by name, what then differs; `size=NAME` picks one. Where the
    settings change the method, the recipe's own settings of the old one are dropped; the description says so.
    """
    return load_with_note(recipe, sets)[0]


def load_with_note(recipe: str | Path, sets: Sequence[str] = ()) -> tuple[Config, str]:
    """As `load_recipe`, with a line about what was dropped because the method is another; empty where nothing was."""
    text, origin = _read(recipe)
    values = parse_yaml(text, origin)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise RecipeError(f"{origin} must be a table of keys and values, not {type(values).__name__}")
    values, sets = _of_size(values, sets)
    asked: dict[str, Any] = {}
    for setting in sets:
        _apply_setting(asked, setting)
    note = drop_old_methods_settings(values, asked, Config.method)
    for setting in sets:
        _apply_setting(values, setting)
    if note and isinstance(description := values.get("description", ""), str):
        values["description"] = f"{description}; {note}".removeprefix("; ")
    return from_dict(values), note


def _of_size(values: dict[str, Any], sets: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The recipe in the size that is asked for, and the settings without it: they go on top."""
    sizes, rest = values.pop("sizes", {}), []
    for setting in sets:
        key, equals, name = (part.strip() for part in setting.partition("="))
        if key != "size" or not equals:
            rest.append(setting)
        elif not isinstance(sizes, dict) or name not in sizes or not isinstance(sizes[name], dict):
            there = ", ".join(sizes) if isinstance(sizes, dict) and sizes else "this recipe has one size only"
            raise RecipeError(f"size: {_show(name)} is unknown{nearest(name, list(sizes))}; accepted: {there}")
        else:
            values = _over(values, sizes[name])
    return values, rest


def _over(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Values with others put over them, section by section."""
    both = {
        k: _over(v, others[k]) for k, v in values.items() if isinstance(v, dict) and isinstance(others.get(k), dict)
    }
    return {**values, **others, **both}


def _read(recipe: str | Path) -> tuple[str, str]:
    if str(recipe) in recipe_names():
        return (resources.files("spartan.app") / "recipes" / f"{recipe}.yaml").read_text("utf-8"), f"recipe {recipe}"
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RecipeError(f"recipe: there is no file {path}")
        return read_text(path), str(path)
    hint, recipe = nearest(recipe, recipe_names()), shortened(str(recipe))
    raise RecipeError(f"recipe: {recipe!r} is unknown{hint}; `spartan recipes` lists them, a path must end in .yaml")


def _apply_setting(values: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise RecipeError(
            f"--set {_show(setting)}: write key=value, such as --set epochs=20 or --set optimizer.lr=0.05"
        )
    *sections, last = key.strip().split(".")
    if len(sections) > DEEPEST:
        raise RecipeError(f"--set {_show(setting)}: more than {DEEPEST} levels, one inside the other")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise RecipeError(f"{key}: {section} is a value, not a section")
        values = inner
    values[last] = _as_number(parse_yaml(text, f"--set {_show(setting)}: the value"), key)


def _as_number(value: Any, key: str) -> Any:
    """YAML 1.1 reads 1e-4 as text; people mean the number."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not is_small(value, number):
        raise RecipeError(f"{key}: {too_large(value)}")
    return number


def _show(value: Any) -> str:
    return shortened(repr(value))


def from_dict(values: Mapping[str, Any]) -> Config:
    """A checked Config."""
    return typing.cast(Config, _build_section(Config, values, ""))


def _build_section(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            raise RecipeError(
                f"{prefix}{shortened(str(key))}: there is no such key{nearest(shortened(str(key)), known)}"
            )
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in values.items()})


def _convert(hint: Any, value: Any, key: str) -> Any:
    """The value as its type says, or an error."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise RecipeError(f"{key}: {_show(value)} must be a section with keys of its own")
        return _build_section(typing.cast(type[Any], hint), value, key + ".")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        choices = [a for a in args if a is not type(None)]
        if value is None and len(choices) < len(args):
            return None
        for choice in choices:
            try:
                return _convert(choice, value, key)
            except RecipeError:
                if len(choices) == 1:
                    raise
        raise RecipeError(f"{key}: {_show(value)} is not accepted; accepted: {_type_name(hint)}")
    if origin is Literal:
        if value not in args:
            raise RecipeError(
                f"{key}: {_show(value)} is not accepted{nearest(value, args)}; accepted: {_type_name(hint)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(args):
            raise RecipeError(f"{key}: {_show(value)} must be a list of {len(args)} values")
        return tuple(_convert(a, v, f"{key}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
    if origin is list:
        if not isinstance(value, list):
            raise RecipeError(f"{key}: {_show(value)} must be a list")
        return [_convert(args[0], v, f"{key}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{key}: {_show(value)} must be a table of keys and values")
        return {str(k): v if args[1] is Any else _convert(args[1], v, f"{key}.{k}") for k, v in value.items()}
    value = _as_number(value, key) if hint in (int, float) else value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (int, float) and number and not math.isfinite(value):
        raise RecipeError(f"{key}: {value} is no number to count with; a finite one is needed")
    if hint is int and number and not abs(value) < LARGEST_NUMBER:
        raise RecipeError(f"{key}: {too_large(str(value))}")
    if (hint is float and number) or (hint is int and number and float(value).is_integer()):
        return hint(value)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    raise RecipeError(f"{key}: {_show(value)} is {type(value).__name__}; {_type_name(hint)} is needed")


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return ", ".join(_type_name(a) for a in args)
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    names |= {list: "a list", tuple: "a list", dict: "a table"}
    return names[origin or hint]


def to_yaml(config: Config) -> str:
    """The resolved recipe, every key included; `load_recipe` reads it back to the same Config."""
    return yaml.safe_dump(_without_tuples(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True, width=110)


def _without_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_tuples(v) for k, v in value.items()}
    return [_without_tuples(v) for v in value] if isinstance(value, (list, tuple)) else value
