"""Answers a problem whose masks are fixed: θ and the mask of the kept entries only, nothing left to choose."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.distributed import is_dtensor, like
from spartan.problem.problem import Problem
from spartan.solvers.base import Flags, Grads, Solver
from spartan.solvers.forms import Form
from spartan.solvers.units import MethodState


class FrozenSolver(Solver):
    """Kept entries in plain torch. Their places are listed in the order of each target's memory.

    Args:
        problem: the part.
        flags: where what is not finite is noted.
        kept: θ, the mask and the places of the kept entries of each target.
    """

    name = "torch"

    def __init__(self, problem: Problem, flags: Flags, kept: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__(problem, flags)
        self.thetas, self.masks, self.places = (list(each) for each in zip(*kept, strict=True))
        # What was known when the masks were fixed, for who looks.
        self.state = MethodState()
        self.k: list[float] = []
        self.chosen: dict[str, Any] = {"a": None, "b": None, "dual": None}

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """It always can."""
        return ""

    def spread(self, i: int, values: Tensor) -> Tensor:
        """The kept entries of a target at their places, zero elsewhere."""
        target = self.problem.targets[i]
        flat = values.new_zeros(target.local.numel())
        flat[self.places[i]] = values
        return target.unflatten(flat)

    def _in_place(self, i: int, tensor: Tensor) -> Tensor | None:
        """A tensor of the target's shape as a flat view in the order of its places; None where it lies otherwise."""
        flat = self.problem.targets[i].flatten(tensor)
        return flat if flat.data_ptr() == tensor.data_ptr() else None

    def put(self, which: Sequence[int]) -> None:
        """θ into the parameters of these targets, which hold w: what is gone is zero."""
        for i in which:
            here = self.problem.targets[i].local
            flat = self._in_place(i, here)
            if flat is None:
                here.copy_(self.spread(i, self.thetas[i]))
            else:
                flat[self.places[i]] = self.thetas[i]

    def take(self, which: Sequence[int]) -> None:
        """θ from the parameters of these targets, at the kept places."""
        for i in which:
            flat = self.problem.targets[i].flatten(self.problem.targets[i].local)
            torch.index_select(flat, 0, self.places[i], out=self.thetas[i])

    def weights(self, form: Form | None) -> list[Tensor]:
        """w = θ · mask of each target."""
        pairs = zip(self.thetas, self.masks, strict=True)
        return [self.spread(i, theta * mask) for i, (theta, mask) in enumerate(pairs)]

    def write(self, form: Form | None) -> None:
        """w into the parameters."""
        for i, (theta, mask) in enumerate(zip(self.thetas, self.masks, strict=True)):
            here = self.problem.targets[i].local
            flat = self._in_place(i, here)
            if flat is None:
                here.copy_(self.spread(i, theta * mask))
            else:
                flat.zero_()
                flat[self.places[i]] = theta * mask

    def turn(self, form: Form | None, grads: Grads) -> Grads:
        """∂L/∂θ = g · mask: nothing for weights that are gone."""
        found: list[Tensor | None] = []
        for i, g in enumerate(grads):
            if g is None:
                found.append(None)
                continue
            flat = self._in_place(i, g)
            if flat is None:
                found.append(self.spread(i, self.problem.targets[i].flatten(g)[self.places[i]] * self.masks[i]))
            else:
                kept = flat[self.places[i]] * self.masks[i]
                flat.zero_()
                flat[self.places[i]] = kept
                found.append(g)
        return found

    def snapshot(self) -> list[Tensor]:
        """θ of the kept entries."""
        return [theta.clone() for theta in self.thetas]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Go back."""
        for theta, was in zip(self.thetas, snapshot, strict=True):
            theta.copy_(was)

    def keep(self) -> list[Tensor]:
        """Bool per entry of each target."""
        return [self.spread(i, torch.ones_like(mask, dtype=torch.bool)) for i, mask in enumerate(self.masks)]

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint needs of each target: kept entries in row-major order; shards as DTensors of whole weights."""
        found = {}
        for i, target in enumerate(self.problem.targets):
            theta, mask = self.thetas[i], self.masks[i]
            kept = {"theta": theta, "mask": mask, "keep": torch.ones_like(mask, dtype=torch.bool)}
            dense = {key: self.spread(i, x).contiguous() for key, x in kept.items()}
            if is_dtensor(target.parameter):
                found[target.name] = {key: like(target.parameter, x) for key, x in dense.items()}
            else:
                index = dense["keep"].view(-1).nonzero().flatten()
                index = index.int() if target.numel < 1 << 31 else index
                found[target.name] = {key: dense[key].view(-1)[index] for key in ("theta", "mask")} | {"index": index}
        return found


def kept_entries(problem: Problem, i: int, theta: Tensor, keep: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """θ, the mask and the places of what is kept of target i, from tensors of its shape."""
    target = problem.targets[i]
    flat = [target.flatten(x) for x in (theta, keep, mask.to(theta.dtype))]
    index = flat[1].nonzero().flatten()
    if target.local.numel() < 1 << 31:
        index = index.int()  # half the memory
    return flat[0][index].clone(), flat[2][index].clone(), index


def as_dense(saved: Mapping[str, Tensor], shape: Sequence[int]) -> Mapping[str, Tensor]:
    """Kept entries as they are saved, at their places in tensors of that shape, zero elsewhere; others as they are."""
    if "index" not in saved:
        return saved
    found = {}
    for key, values in ({**saved} | {"keep": torch.ones_like(saved["index"], dtype=torch.bool)}).items():
        if key != "index":
            flat = values.new_zeros(math.prod(shape))
            flat[saved["index"].long()] = values
            found[key] = flat.view(tuple(shape))
    return found
