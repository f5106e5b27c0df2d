"""The fixed lists of runs behind the trained exhibits, in three sizes: one file says what "the same, smaller" is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from spartan.app.train.config import Config, load_recipe
from spartan.app.train.time_limit import seconds_alone

Scale = Literal["tiny", "small", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)

ABOUT: dict[Scale, str] = {
    "tiny": "scikit-learn's digits on a CPU: it shows that every exhibit works, and nothing about the paper",
    "small": "CIFAR-10 and CIFAR-100 on one GPU",
    "full": "the paper's own recipes on ImageNet-1K",
}

# The classifier that stands for the paper's ResNet-50, and what is set on top of its recipe.
NET: dict[Scale, tuple[str, tuple[str, ...]]] = {
    "tiny": ("digits", ("epochs=10", "optimizer.warmup_epochs=1")),
    "small": ("cifar10-wrn22", ()),
    "full": ("resnet50-imagenet", ()),
}
# Its input convolution, which the paper leaves dense with Top-KAST.
STEM: dict[Scale, str] = {"tiny": "exclude=[0.*]", "small": "exclude=[conv.*]", "full": "exclude=[conv1.*]"}
SPARSITIES: dict[Scale, tuple[float, ...]] = {
    "tiny": (0.9, 0.95, 0.98),
    "small": (0.8, 0.9, 0.95, 0.98, 0.99),
    "full": (0.8, 0.9, 0.95, 0.975, 0.99),
}
# Epochs, each with the learning rate's warm-up: 5% of the run at small scale, the paper's 5 epochs at full.
LENGTHS: dict[Scale, tuple[tuple[str, ...], ...]] = {
    "tiny": ((), ("epochs=30", "optimizer.warmup_epochs=2")),
    "small": ((), ("epochs=120", "optimizer.warmup_epochs=6")),
    "full": ((), ("epochs=200",), ("epochs=400",)),
}
LONGEST: dict[Scale, tuple[str, ...]] = {
    "tiny": ("epochs=60", "optimizer.warmup_epochs=3"),
    "small": ("epochs=240", "optimizer.warmup_epochs=12"),
    "full": ("epochs=800",),
}
SEEDS: dict[Scale, int] = {"tiny": 1, "small": 3, "full": 3}

# Seconds of one epoch, alone on an H200. WRN-22-2's is measured (40 epochs in about 35 s); the others are scaled from it by
# their work and not measured.
SECONDS_AN_EPOCH = {"cifar10-wrn22": 0.9, "cifar10-vit": 1.2, "cifar100-resnet18-flops": 2.5, "digits": 0.3}
# Steps of small nets wait for the host, so that several runs share a GPU well: what six at once gain. Six of WRN-22-2 took
# 157 s (benchmarks/explore.csv, commit 3beaea3), where one alone is taken for 51 s.
SIDE_BY_SIDE = 2.0


@dataclass(frozen=True)
class Experiment:
    """One run: a recipe, what is set on top of it, and a seed."""

    recipe: str
    sets: tuple[str, ...] = ()
    seed: int = 0

    @property
    def setting(self) -> str:
        """Recipe and settings, the seed aside."""
        return " ".join((self.recipe, *self.sets))

    @property
    def name(self) -> str:
        """What its result is stored under."""
        return f"{self.setting} seed={self.seed}"

    @property
    def all_sets(self) -> tuple[str, ...]:
        """The settings, seed included, for `spartan train --set`."""
        return (*self.sets, f"seed={self.seed}")

    def config(self) -> Config:
        """The recipe with the settings."""
        return _config(self.recipe, self.all_sets)

    def at_seeds(self, count: int) -> "list[Experiment]":
        """The same with the seeds 0 to count − 1."""
        return [Experiment(self.recipe, self.sets, seed) for seed in range(count)]


@cache
def _config(recipe: str, sets: tuple[str, ...]) -> Config:
    """Read once: results are looked up by it again and again."""
    return load_recipe(recipe, sets)


def net(scale: Scale, method: str, sparsity: float | None = None, *more: str) -> Experiment:
    """A run of the classifier; `more` wins over what the scale sets."""
    recipe, base = NET[scale]
    given = {setting.partition("=")[0] for setting in more}
    kept = [setting for setting in base if setting.partition("=")[0] not in given]
    asked = [f"method={method}"] + ([] if sparsity is None else [f"sparsity={sparsity:g}"])
    return Experiment(recipe, (*asked, *kept, *more))


def topkast(scale: Scale, sparsity: float, *more: str) -> Experiment:
    """A run of Top-KAST; at full scale the input convolution stays dense, as in the paper."""
    return net(scale, "topkast", sparsity, *((STEM[scale],) if scale == "full" else ()), *more)


# Structures of the ViT table: single weights, then blocks by their side.
BLOCKS: dict[Scale, tuple[int, ...]] = {"tiny": (1, 8, 16, 32), "small": (1, 8, 16, 32), "full": (1, 16, 32)}
_TINY_VIT = (
    *("model=vit-2-64-2", "count=model", "exclude=[patches.*, head.*]", "epochs=10", "optimizer.name=adamw"),
    *("optimizer.lr=0.004", "optimizer.weight_decay=0.05", "optimizer.warmup_epochs=1"),
)


def vit(scale: Scale, method: str, side: int, *more: str) -> Experiment:
    """A run of the vision transformer at 90%, in blocks of this side (1: single weights)."""
    if scale == "full":
        recipe = "vitb16-imagenet" + ("" if side == 1 else f"-block{side}")
        return Experiment(recipe, (f"method={method}", *more))
    blocks = () if side == 1 or method == "dense" else (f"pattern=[{side}, {side}]",)
    beta = ("method_args={beta: [1, 20]}",) if method == "spartan" else ()  # the paper's, of its ViT
    if scale == "small":
        return Experiment("cifar10-vit", (f"method={method}", *beta, *blocks, *more))
    return Experiment("digits", (f"method={method}", "sparsity=0.9", *_TINY_VIT, *beta, *blocks, *more))


def flop_budget(scale: Scale, power: float) -> Experiment:
    """Spartan under a budget of 5% of the FLOPs, with values c^power·|θ| and the paper's β_max for each."""
    value = (f"value_power={power:g}", f"method_args={{beta: [1, {10 if power == 1.0 else 160}]}}")
    if scale == "tiny":
        recipe, base = NET[scale]
        return Experiment(recipe, ("method=spartan", "sparsity=0.95", "cost=flops", *base, *value))
    recipe = "cifar100-resnet18-flops" if scale == "small" else "resnet50-imagenet-flops"
    return Experiment(recipe, value)


def alone(recipe: str, config: Config) -> float:
    """About how long a run takes alone, on the machine that its scale is for; an epoch of other recipes counts a second."""
    return seconds_alone(config, SECONDS_AN_EPOCH.get(recipe, 1.0))


def seconds(experiments: Sequence[Experiment]) -> float:
    """About how long these take, one after the other."""
    return sum(alone(one.recipe, one.config()) for one in experiments)


def estimate(scale: Scale, experiments: Sequence[Experiment]) -> str:
    """The same in words."""
    if not experiments:
        return "nothing to train"
    count = f"{len(experiments)} run{'s' * (len(experiments) > 1)}"
    if scale == "full":
        return f"{count} on ImageNet-1K, each hours to days of one GPU"
    minutes = seconds(experiments) / 60
    if scale == "tiny":
        return f"{count}, by estimate {max(1, round(minutes))} min on a CPU"
    return f"{count}, by estimate {max(1, round(minutes / SIDE_BY_SIDE))} min of one H200 with --jobs 6"
