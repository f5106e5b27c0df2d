"""Tables 4 and 5: the paper's hyperparameters beside the built-in recipes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from spartan.app.paper.exhibit import Exhibit, Shown, register
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table
from spartan.app.train.config import Config, load_recipe
from spartan.app.train.setup import lr_at


@dataclass(frozen=True)
class Line:
    """A row of the paper's table: what is printed there, what a recipe has, and whether that is the same."""

    what: str
    printed: str
    ours: Callable[[Config], object]
    same: object


SHARED = [
    Line("learning rate decay schedule", "cosine", lambda c: _decay(c), "cosine"),
    Line("batch size", "4096", lambda c: c.batch_size, 4096),
    Line("label smoothing", "0.1", lambda c: c.label_smoothing, 0.1),
    Line("input resolution", "224×224", lambda c: c.data.image_size, 224),
    Line("sparsity annealing: ends at fraction", "0.2", lambda c: c.warmup, 0.2),
    Line("β annealing: ends at fraction", "0.8", lambda c: round(1 - (c.finetune or 0), 6), 0.8),
    Line("β annealing: starts from", "1", lambda c: c.method_args["beta"][0], 1),
]
RESNET = [
    Line("optimizer", "Nesterov, momentum 0.9", lambda c: _sgd(c), "sgd, Nesterov, momentum 0.9"),
    Line("max. learning rate", "1.0", lambda c: c.optimizer.lr, 1.0),
    Line("min. learning rate", "0.001", lambda c: c.optimizer.final_lr, 0.001),
    Line("learning rate warmup epochs", "5", lambda c: c.optimizer.warmup_epochs, 5.0),
    Line("weight decay (none on biases, norms)", "1e-4", lambda c: c.optimizer.weight_decay, 1e-4),
    Line("β_max (Section 4.1)", "10", lambda c: c.method_args["beta"][1], 10),
    *SHARED,
]
VIT = [
    Line("optimizer", "AdamW, β (0.9, 0.999), ε 1e-8", lambda c: _adamw(c), ("adamw", (0.9, 0.999), 1e-8)),
    Line("max. learning rate", "0.003", lambda c: c.optimizer.lr, 0.003),
    Line("min. learning rate", "0.0", lambda c: c.optimizer.final_lr, 0.0),
    Line("learning rate warmup", "10% of epochs", lambda c: c.optimizer.warmup_epochs / c.epochs, 0.1),
    Line("weight decay (none on biases, norms)", "0.3", lambda c: c.optimizer.weight_decay, 0.3),
    Line("RandAugment (ops, magnitude)", "(2, 9)", lambda c: c.data.randaugment, (2, 9)),
    Line("mixup α", "0.2", lambda c: c.mixup, 0.2),
    Line("CutMix α", "1.0", lambda c: c.cutmix, 1.0),
    Line("gradient L2 norm clip", "1.0", lambda c: c.clip, 1.0),
    Line("β_max, single weights (Section 4.1)", "20", lambda c: c.method_args["beta"][1], 20),
    *SHARED,
]


def _decay(config: Config) -> str:
    """Whether the learning rate, a quarter of the way after its warm-up, is where a cosine has it."""
    o, steps = config.optimizer, 1000
    warm = round(o.warmup_epochs * steps)
    at = lr_at(config, warm + (config.epochs * steps - warm) // 4, steps)
    cosine = o.final_lr + (o.lr - o.final_lr) * 0.5 * (1 + math.cos(math.pi / 4))
    return "cosine" if math.isclose(at, cosine, rel_tol=1e-6) else "other"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _sgd(config: Config) -> str:
    o = config.optimizer
    return f"{o.name}, {'Nesterov' if o.nesterov else 'plain'}, momentum {o.momentum:g}"


def _adamw(config: Config) -> tuple[str, tuple[float, float], float]:
    return config.optimizer.name, config.optimizer.betas, config.optimizer.eps


def differences() -> list[str]:
    """Rows whose recipe says something else than the paper."""
    found = []
    for recipe, lines in (("resnet50-imagenet", RESNET), ("vitb16-imagenet", VIT)):
        config = load_recipe(recipe)
        found += [f"{recipe}: {line.what}" for line in lines if line.ours(config) != line.same]
    return found


@register
class Hyperparameters(Exhibit):
    """What the full-scale recipes set, row by row of the paper's tables."""

    order = 5
    name = "hyperparameters"
    title = "the paper's hyperparameters beside the recipes resnet50-imagenet and vitb16-imagenet"
    where = "Tables 4 and 5"
    kind = "exact"

    def show(self, results: Results) -> Shown:
        """Every row, and whether it is the same."""
        tables = []
        for recipe, lines, number in (("resnet50-imagenet", RESNET, 4), ("vitb16-imagenet", VIT, 5)):
            config = load_recipe(recipe)
            cells = [
                [line.what, line.printed, _shown(line.ours(config)), "yes" if line.ours(config) == line.same else "no"]
                for line in lines
            ]
            tables.append(
                Table(f"Table {number} and the recipe {recipe}", ["what", "printed", "recipe", "same"], cells)
            )
        odd = differences()
        line = (
            f"{sum(len(t.cells) for t in tables)} settings, all as printed" if not odd else f"differ: {'; '.join(odd)}"
        )
        notes = (
            "The masks' solver is Newton's method to 1e-6 in the place of Sinkhorn's 100 iterations to 0.01; "
            "the paper's own is "
            'one setting away: --set "method_args={beta: [1, 10], solver: sinkhorn, init: threshold}".',
            "Table 4 has the sparsity annealed “from 1”, by which it must mean the density: 1 is dense there and here.",
        )
        return Shown(line, tables, None, [], notes)
