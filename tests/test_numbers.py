"""Numbers of numpy's and torch's are taken wherever Python's are, mean the same, and never end up in a state."""

from __future__ import annotations

import inspect
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spartan
from spartan import NM, Block, Flops, Heads, Sparsifier, Spartan, TopKAST
from spartan.methods.movement import Movement
from spartan.problem.costs.table import CostTable
from spartan.problem.schedules import constant, cosine, cubic, delayed, linear
from spartan.scalars import as_plain
from spartan.zoo import build_model

# What a float, and an int, may come as.
FLOATS: dict[str, Callable[[float], Any]] = {
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "longdouble": np.longdouble,
    "array": np.array,
    "array32": lambda x: np.array(x, dtype=np.float32),
    "tensor": torch.tensor,
    "bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "parameter": lambda x: nn.Parameter(torch.tensor(x)),
}
INTS: dict[str, Callable[[int], Any]] = {
    "int8": np.int8,
    "int64": np.int64,
    "uint16": np.uint16,
    "array": np.array,
    "tensor": torch.tensor,
}
VALUES = torch.rand(8, generator=torch.Generator().manual_seed(0))
INPUTS = torch.ones(1, 8)


def as_given(number: Any) -> Any:
    """A number of no type that a checker would know."""
    return number


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def sparsifier(**arguments: Any) -> dict[str, Any]:
    """What a sparsifier keeps of its arguments, and the mask that it makes of them."""
    torch.manual_seed(0)
    made = Sparsifier(net(), **({"sparsity": 0.5, "total_steps": 20, "warmup": 0.0} | arguments))
    return made.settings | {"masks": {name: mask.tolist() for name, mask in made.masks().items()}}


def pruned(**arguments: Any) -> list[Any]:
    return [p.tolist() for p in spartan.prune(net(), **({"sparsity": 0.5} | arguments)).parameters()]


def verified(x: float) -> Any:
    return spartan.verify(spartan.prune(net(), 0.5), x)


def averaged(x: float) -> float:
    return Sparsifier(net(), 0.5, 10).ema(x).decay


# Every public place that takes a number: what to do with it, and a value that all kinds of floats hold to two digits.
TAKES_FLOATS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "Sparsifier sparsity": (lambda x: sparsifier(sparsity=x), 0.3),
    "Sparsifier warmup": (lambda x: sparsifier(warmup=x), 0.3),
    "Sparsifier finetune": (lambda x: sparsifier(finetune=x), 0.3),
    "Sparsifier min_density": (lambda x: sparsifier(min_density=x), 0.3),
    "Sparsifier min_density by name": (lambda x: sparsifier(min_density={"0.weight": x}), 0.3),
    "Sparsifier budget": (lambda x: sparsifier(budget={"0.weight": x}), 0.3),
    "Sparsifier cost": (lambda x: sparsifier(cost={"0.*": x, "*": 1.0}), 0.3),
    "prune sparsity": (lambda x: pruned(sparsity=x), 0.3),
    "prune budget": (lambda x: pruned(budget={"2.weight": x}), 0.3),
    "prune cost": (lambda x: pruned(cost={"0.*": x, "*": 1.0}), 0.3),
    "verify sparsity": (verified, 0.3),
    "soft_topk k": (lambda x: spartan.soft_topk(VALUES, x, 4.0).tolist(), 0.3),
    "soft_topk beta": (lambda x: spartan.soft_topk(VALUES, 3, x).tolist(), 0.3),
    "soft_topk tol": (lambda x: spartan.soft_topk(VALUES, 3, 4.0, tol=x).tolist(), 0.3),
    "soft_topk init": (lambda x: spartan.soft_topk(VALUES, 3, 4.0, init=x, solver="sinkhorn").tolist(), 0.3),
    "hard_topk k": (lambda x: spartan.hard_topk(VALUES, x).tolist(), 3.0),
    "hard_topk k with costs": (lambda x: spartan.hard_topk(VALUES, x, torch.ones(8)).tolist(), 3.0),
    "ema decay": (averaged, 0.3),
    "linear": (lambda x: linear(x, 2 * x), 0.3),
    "cosine": (lambda x: cosine(x, 1.0), 0.3),
    "cubic": (lambda x: cubic(x, 1.0), 0.3),
    "constant": (constant, 0.3),
    "delayed": (lambda x: delayed(linear(0.0, 1.0), x), 0.3),
    "Flops value_power": (lambda x: Flops(INPUTS, value_power=x).describe(), 0.3),
    "CostTable": (lambda x: CostTable({"*": x}).describe(), 0.3),
    "Spartan beta": (lambda x: Spartan(beta=x), 0.3),
}
TAKES_INTS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "Sparsifier sparsity": (lambda x: sparsifier(sparsity=x), 0),
    "Sparsifier total_steps": (lambda x: sparsifier(total_steps=x), 20),
    "soft_topk k": (lambda x: spartan.soft_topk(VALUES, x, 4.0).tolist(), 3),
    "soft_topk max_iters": (lambda x: spartan.soft_topk(VALUES, 3, 4.0, max_iters=x).tolist(), 2),
    "hard_topk k": (lambda x: spartan.hard_topk(VALUES, x).tolist(), 3),
    "Block": (lambda x: Block(x, x), 4),
    "Block in use": (lambda x: sparsifier(pattern=Block(x, x)), 4),
    "NM": (lambda x: NM(x, 2 * x), 2),
    "NM in use": (lambda x: sparsifier(pattern=NM(x, 2 * x)), 2),
    "Heads": (Heads, 3),
    "mask_histogram": (lambda x: Sparsifier(net(), 0.5, 10, warmup=0.0).mask_histogram(x), 5),
}
# Of every method, every argument that is a number by its default, or may be one.
ARGUMENTS = {
    "topkast": {"backward_sparsity": 0.3, "exploration": 0.3, "every": 3},
    "acdc": {"first_dense": 0.3, "phase": 0.3, "last_dense": 0.3},
    "feather": {"p": 3.0, "pruned_gradient": 0.3},
    "paced": {"exchange": 0.3, "leak": 0.3, "p": 3.0},
    "movement": {"score_lr": 0.3},
    "optg": {"epochs": 3, "steepness": 0.3},
    "powerprop": {"alpha": 3.0},
    "probmask": {"samples": 3, "clip": 0.3, "score_lr": 0.3, "temperature": 0.3, "hold": 0.3},
    "str": {"init": 0.3, "decay": 0.3},
    "spartan": {"beta": 0.3},
    "spartan-learned": {"beta": 0.3},
    "srste": {"decay": 0.3},
    "rigl": {"every": 3, "fraction": 0.3},
    "set": {"every": 3, "fraction": 0.3},
    "svite": {"every": 3, "fraction": 0.3},
}


def same(take: Callable[[Any], Any], given: Any, value: Any) -> None:
    got, expected = take(given), take(value)
    assert got == expected
    assert repr(got) == repr(expected), "no other kind of number is kept"


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("where", TAKES_FLOATS)
def test_floats_mean_what_they_say(where: str, kind: str) -> None:
    take, value = TAKES_FLOATS[where]
    same(take, FLOATS[kind](value), value)


@pytest.mark.parametrize("kind", INTS)
@pytest.mark.parametrize("where", TAKES_INTS)
def test_ints_mean_what_they_say(where: str, kind: str) -> None:
    take, value = TAKES_INTS[where]
    same(take, INTS[kind](value), value)


@pytest.mark.parametrize("method", ARGUMENTS)
def test_arguments_of_methods(method: str) -> None:
    cls: Any = next(entry.cls for entry in spartan.methods() if entry.name == method)
    for name, value in ARGUMENTS[method].items():
        kinds: dict[str, Any] = INTS if isinstance(value, int) else FLOATS
        for kind in kinds.values():
            same(lambda x, name=name: cls(**{name: x}), kind(value), value)  # type: ignore[misc]


def test_every_number_of_every_method_is_tried() -> None:
    """A method's new argument belongs into `ARGUMENTS` if it takes a number."""
    for entry in spartan.methods():
        arguments = inspect.signature(entry.cls).parameters.values()
        numbers = {a.name for a in arguments if re.search(r"\b(int|float)\b", str(a.annotation))}
        assert numbers == set(ARGUMENTS.get(entry.name, {})), entry.name


def test_short_floats_are_the_decimals_they_were_written_as() -> None:
    """np.float32(0.3) is 0.30000001192…, and 30 of 100 are to go, not 29."""
    weight = nn.Linear(10, 10)
    assert int((spartan.prune(weight, as_given(np.float32(0.3))).weight == 0).sum()) == 30
    for x in (0.3, 0.95, 1e-4, 123456.0, -0.7, 0.0, math.inf):
        assert as_plain(np.float32(x)) == x
    third = np.float32(1) / np.float32(3)
    assert as_plain(third) == float(third), "a number that was no short decimal keeps all its bits"
    assert math.isnan(as_plain(np.float32("nan")))
    array = np.zeros(1)
    assert as_plain(array) is array, "only what has no dimension is a number"
    assert as_plain((np.int64(3), "x", None)) == (3, "x", None)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.array, torch.tensor])
def test_what_is_no_number_is_refused_as_ever(kind: Callable[[Any], Any]) -> None:
    for make in (
        lambda: Sparsifier(net(), kind(math.nan), 10),
        lambda: Sparsifier(net(), kind(1.5), 10),
        lambda: Sparsifier(net(), 0.5, kind(10.5)),
        lambda: Sparsifier(net(), 0.5, 10, warmup=kind(math.nan)),
        lambda: Sparsifier(net(), 0.5, 10, min_density=kind(math.nan)),
        lambda: Sparsifier(net(), 0.5, 10, cost={"*": kind(-1.0)}),
        lambda: Spartan(beta=kind(math.nan)),
        lambda: linear(1.0, kind(math.nan)),
        lambda: Block(kind(4.0), 4),
        lambda: spartan.soft_topk(VALUES, 3, kind(math.nan)),
        lambda: spartan.soft_topk(VALUES, kind(math.nan), 1.0),
        lambda: spartan.hard_topk(VALUES, kind(math.nan)),
        lambda: Sparsifier(net(), 0.5, 10).ema(kind(math.nan)),
    ):
        with pytest.raises(ValueError, match=r"=|NaN|costs must be"):
            make()


@pytest.mark.parametrize("true", [True, np.True_, np.array(True), torch.tensor(True)])
def test_truth_is_no_number(true: Any) -> None:
    for make in (
        lambda: Sparsifier(net(), true, 10),
        lambda: Sparsifier(net(), 0.5, true),
        lambda: Block(true, 4),
        lambda: NM(true, 4),
        lambda: Heads(true),
        lambda: TopKAST(every=true),
    ):
        with pytest.raises(ValueError, match="=True"):
            make()


def test_states_stay_plain(tmp_path: Path) -> None:
    """A checkpoint of a run whose arguments were numpy's has no numpy in it, and fits the run of Python's numbers."""

    def run(number: Callable[[Any], Any]) -> tuple[Any, ...]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = Movement(score_lr=number(0.5))
        made = Sparsifier(
            model,
            number(0.5),
            number(20),
            method,
            budget="global",
            min_density={"0.*": number(0.1)},
            cost={"*": number(2)},
        ).attach(optimizer)
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        return model, optimizer, made

    (_, optimizer, made), (_, other, plainly) = run(np.array), run(lambda x: x)
    file = io.BytesIO()
    torch.save({"sparsifier": made.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["sparsifier"]["settings"] == plainly.settings
    plainly.load_state_dict(loaded["sparsifier"])
    other.load_state_dict(loaded["optimizer"])

    model = spartan.prune(build_model("digits-cnn", 10, (1, 8, 8)), np.float64(0.9))
    reference = {"model": "digits-cnn", "classes": np.int64(10), "shape": (np.int64(1), np.int32(8), 8)}
    spartan.save(model, tmp_path / "model.safetensors", architecture=reference)
    back = spartan.load(tmp_path / "model.safetensors", kernels="dense", max_bytes=as_given(np.int64(1 << 24)))
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in model.state_dict().items())
