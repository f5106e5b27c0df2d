"""Problems and solvers over tensors that a test makes up, without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spartan import Unstructured
from spartan.problem.axes import PLAIN, Axes
from spartan.problem.patterns import Pattern
from spartan.problem.problem import Problem, Segment
from spartan.problem.targets import Target
from spartan.solvers.base import FINE, Flags

S = TypeVar("S")


def problem_of(
    tensors: Sequence[Tensor],
    pattern: Pattern | None = None,
    prices: Sequence[float] | None = None,
    value_power: float = 1.0,
    owners: Sequence[int] | None = None,
    sparsity: float = 0.5,
    axes: Axes = PLAIN,
) -> Problem:
    """Parameters that hold copies of the tensors, laid out as they are; `owners` tells the segment of each."""
    prices = list(prices or [1.0] * len(tensors))
    owners = owners or [0] * len(tensors)
    copies = [t.clone(memory_format=torch.preserve_format) for t in tensors]
    targets = [Target((f"w{i}",), nn.Parameter(t), nn.Identity(), "weight", axes) for i, t in enumerate(copies)]
    segments = []
    for s in sorted(set(owners)):
        mine = tuple(i for i, owner in enumerate(owners) if owner == s)
        total = math.fsum(prices[i] * tensors[i].numel() for i in mine)
        segments.append(Segment(mine, sparsity, total, total, index=s))
    counted = sum(t.numel() for t in tensors)
    floors = [0.0] * len(tensors)
    return Problem(targets, pattern or Unstructured(), prices, value_power, segments, floors, counted, 0)


def build(kind: type[S], problem: Problem, *arguments: Any) -> S:
    """A solver of this kind."""
    device = problem.targets[0].parameter.device
    bad = torch.full((2,), FINE, dtype=torch.int32, device=device)
    residuals = torch.zeros(len(problem.segments), 2, dtype=torch.float64, device=device)
    return kind(problem, Flags(bad, residuals), *arguments)  # type: ignore[call-arg]


def weights_of(solver: Any) -> list[Tensor]:
    """What the parameters hold."""
    return [t.parameter.detach() for t in solver.problem.targets]


def set_theta(solver: Any, tensors: Sequence[Tensor]) -> None:
    """Other dense weights."""
    for theta, t in zip(solver.theta.views, tensors, strict=True):
        theta.copy_(t)
