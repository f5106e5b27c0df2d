"""Builds the parts of a run from its recipe: model, method, sparsifier, optimizer, learning rate."""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spartan import Sparsifier, load, zoo
from spartan.app.train.config import Config, RecipeError, blaming_the_recipe
from spartan.methods import Method, as_method
from spartan.problem.costs import Cost, cost_by_name
from spartan.problem.patterns import read_pattern
from spartan.problem.schedules import Moment, Schedule
from spartan.wording import first_line
from spartan.zoo import Shape

SHAPES = ("linear", "cosine", "cubic")


def build_method(config: Config) -> Method:
    """The method of a recipe; among its arguments [a, b] is linear(a, b), and [cubic, a, b] a schedule of that shape."""
    with blaming_the_recipe():
        arguments = {key: _argument(f"method_args.{key}", value) for key, value in config.method_args.items()}
        return as_method(config.method, arguments)


def passes_a_step(config: Config) -> int:
    """How often the method of a recipe has a batch passed through the model, before its masks are fixed."""
    return build_method(config).passes(Moment(0, 1, 0, 1))


def _argument(key: str, value: Any) -> Any:
    """A method's argument as a recipe writes it."""
    if isinstance(value, Mapping):
        return {k: _argument(f"{key}.{k}", v) for k, v in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    shape, *ends = value if len(value) == 3 else ("linear", *value)
    if shape not in SHAPES or len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends):
        raise RecipeError(
            f"{key}: {list(value)} is not a schedule; [start, end] or [cubic, start, end] is, with {SHAPES}"
        )
    return Schedule(float(ends[0]), float(ends[1]), shape)


def build_model(config: Config, classes: int, shape: Shape) -> nn.Module:
    """The model of a recipe, untrained."""
    with blaming_the_recipe():
        source = f"data.source {config.data.source}"
        return zoo.build_model(config.model, classes, shape, config.model_args, source)


def load_start(config: Config, model: nn.Module) -> nn.Module:
    """The model with the weights that the recipe begins with, if it names any; method fixed keeps their zeros."""
    return model if config.start is None else load_weights("start", config.start, config, model)


def load_weights(key: str, file: str, config: Config, model: nn.Module) -> nn.Module:
    """The model with the weights of a file that the recipe names under that key."""
    with blaming_the_recipe(key):
        if not Path(file).is_file():
            raise RecipeError(f"{key}: there is no file {file}")
        if Path(file).suffix not in (".pt", ".pth"):
            return load(file, model, kernels="dense")
        try:
            model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        except (RuntimeError, pickle.UnpicklingError, TypeError, AttributeError) as error:
            raise RecipeError(f"{key}: {file} has no state dict of {config.model}: {first_line(error)}") from None
        return model


def build_cost(config: Config, model: nn.Module, example: Tensor) -> Cost:
    """What the budget counts. The model must still be whole."""
    with blaming_the_recipe():
        return cost_by_name(config.cost).for_run(model, example, config.value_power, config.include, config.exclude)


def build_sparsifier(config: Config, model: nn.Module, cost: Cost, total_steps: int) -> Sparsifier:
    """The sparsifier of a recipe."""
    same = ("budget", "include", "exclude", "warmup", "finetune", "count", "min_density")  # in a recipe as in Python
    options = {key: getattr(config, key) for key in same}
    with blaming_the_recipe():
        method, pattern = build_method(config), read_pattern(config.pattern)
        return Sparsifier(model, config.sparsity, total_steps, method, pattern=pattern, cost=cost, **options)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; weight decay on weights only, none on biases and norms."""
    c = config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": c.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if c.name == "sgd":
        return torch.optim.SGD(groups, lr=c.lr, momentum=c.momentum, nesterov=c.nesterov and c.momentum > 0)
    kind = torch.optim.AdamW if c.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=c.lr, betas=c.betas, eps=c.eps)


def lr_at(config: Config, step: int, steps_per_epoch: int) -> float:
    """Linear warm-up, then cosine to `final_lr` at the end: a function of the step, so there is no state to save."""
    c, total = config.optimizer, config.epochs * steps_per_epoch
    warm = round(c.warmup_epochs * steps_per_epoch)
    if step < warm:
        return c.lr * (step + 1) / warm
    x = (step - warm) / max(1, total - warm)
    return c.final_lr + 0.5 * (c.lr - c.final_lr) * (1.0 + math.cos(math.pi * min(1.0, x)))
