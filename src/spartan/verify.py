"""Counts the zeros that are really in a model (`verify`), and puts lost ones back (`remask`)."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spartan.distributed import is_dtensor, local, own_part
from spartan.files.load import read_weights
from spartan.problem.budgets import Budget
from spartan.problem.costs import Cost
from spartan.problem.patterns import Pattern
from spartan.problem.problem import make_problem
from spartan.problem.targets import Globs, name_cleaner, unwrap
from spartan.problem.zeros import UnitCount, too_full, zeros_of

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Verified:
    """What `verify` has counted: the density of all targets together, and that of each by name."""

    density: float
    layers: dict[str, float]


def verify(
    model: nn.Module,
    sparsity: float,
    *,
    pattern: Pattern | None = None,
    cost: Cost | Mapping[str, float] | None = None,
    budget: Budget = "global",
    include: Globs = None,
    exclude: Globs = None,
    count: str = "targets",
) -> Verified:
    """Count the zeros that a model holds now; RuntimeError, naming the layers, if there are fewer than asked for.

    The arguments are `Sparsifier`'s, and say what was asked. For a model after all that could touch it has run: callbacks,
    an average of weights, a merge of adapters. Weights that cannot be trained count only where none can.

    Example:
        >>> model = spartan.prune(torch.nn.Linear(10, 10), sparsity=0.9)
        >>> verify(model, 0.9).density
        0.1
        >>> model.weight.data += 1.0
        >>> verify(model, 0.9)
        Traceback (most recent call last):
        RuntimeError: the model has fewer zeros than asked for: they are 0 of weight (asked: 0.9)
    """
    problem = make_problem(
        model, sparsity, pattern=pattern, cost=cost, budget=budget, include=include, exclude=exclude, count=count,
        frozen_too=True,
    )  # fmt: skip
    targets = problem.targets
    zeros = zeros_of(targets)
    if found := too_full(problem, UnitCount.of(problem)):
        densest = sorted((n / t.numel, t.name) for n, t in zip(zeros, targets, strict=True))
        each = (
            f"; fewest: {', '.join(f'{name} {share:.2%}' for share, name in densest[:8])}" if len(targets) > 1 else ""
        )
        raise RuntimeError(f"the model has fewer zeros than asked for: they are {'; '.join(found[:8])}{each}")
    layers = {t.name: 1.0 - n / t.numel for n, t in zip(zeros, targets, strict=True)}
    return Verified((problem.counted - sum(zeros)) / problem.counted, layers)


@torch.no_grad()
def remask(model: M, like: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]) -> M:
    """Set to zero, in place, what is zero in `like`, and nothing else. Returns the model.

    For what fills zeros in behind everyone's back, such as merging LoRA adapters into a sparse model:

        merged = spartan.remask(peft_model.merge_and_unload(), like="sparse.safetensors")

    Args:
        model: the model.
        like: a model, a state dict, or a file: one that `spartan.save` wrote, any other .safetensors file or a folder of
            them, as `save_pretrained` writes it, or what `torch.save` wrote of a state dict (.pt, .pth, .bin, .ckpt).
            Its weights of two or more dimensions must be in the model, under the same names and in the same shapes.

    Example:
        >>> sparse = spartan.prune(torch.nn.Linear(10, 10), sparsity=0.9)
        >>> model = remask(torch.nn.Linear(10, 10), like=sparse)
        >>> torch.equal(model.weight == 0, sparse.weight == 0)
        True
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}, not a torch.nn.Module")
    mine = _parameters(model)
    wanted = {name: x for name, x in _tensors(like, mine).items() if x.ndim >= 2 and x.is_floating_point()}
    sparse = {name: x for name, x in wanted.items() if is_dtensor(x) or bool((x == 0).any())}
    for name, x in sparse.items():
        if name not in mine:
            raise ValueError(f"like: {name} has zeros and is no parameter of the model, which has {_some(mine)}")
        if x.shape != mine[name].shape:
            raise ValueError(f"like: {name} is {tuple(x.shape)} there and {tuple(mine[name].shape)} in the model")
    if not sparse:
        raise ValueError(
            f"like: there is no zero in any weight of two or more dimensions, of which it has {_some(wanted)}"
        )
    for name, x in sparse.items():
        here = own_part(mine[name], x) if is_dtensor(mine[name]) or is_dtensor(x) else x
        weight = local(mine[name])
        weight.masked_fill_((here == 0).to(weight.device), 0.0)
    return model


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    inner = unwrap(model)
    clean = name_cleaner(inner)
    return {clean(name): p for name, p in inner.named_parameters(remove_duplicate=False)}


def _tensors(like: Any, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by name of a model, a state dict or a file; names that are not the model's may be those of wrappers."""
    if isinstance(like, nn.Module):
        like = _parameters(like)
    elif isinstance(like, (str, os.PathLike)):
        pickled = Path(like).suffix in (".pt", ".pth", ".bin", ".ckpt")
        like = torch.load(like, map_location="cpu", weights_only=True) if pickled else read_weights(like)
    if not isinstance(like, Mapping) or not any(isinstance(x, Tensor) for x in like.values()):
        raise ValueError(
            f"like is {type(like).__name__}; a model, a state dict (tensors by name) or a file that spartan.save, "
            "save_pretrained or torch.save wrote is needed"
        )
    found = {}
    for name, x in like.items():
        if isinstance(x, Tensor):
            found[next((way for way in _without_wrappers(name) if way in mine), name)] = x.detach()
    return found


def _without_wrappers(name: str) -> Iterator[str]:
    """A name as torch.compile and DistributedDataParallel save it, with fewer and fewer of the layers that they add."""
    yield name
    parts = name.split(".")
    while parts[0] in ("module", "_orig_mod"):
        parts = parts[1:]
        yield ".".join(parts)
    yield ".".join(part for part in parts if part != "_orig_mod")  # of modules that are compiled one by one


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:6]) + (", …" if len(names) > 6 else "") if names else "none"
