"""One-shot magnitude pruning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from spartan.budgets import Budget
from spartan.costs import Cost
from spartan.groups import make_plan
from spartan.patterns import Pattern

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def prune(
    model: M,
    sparsity: float,
    *,
    pattern: Pattern | None = None,
    cost: Cost | Mapping[str, float] | None = None,
    budget: Budget = "global",
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    count: str = "targets",
) -> M:
    """Set the weights of smallest magnitude to zero, in place, to an exact budget. The arguments are `Sparsifier`'s.

    Example:
        >>> model = prune(torch.nn.Linear(10, 10), sparsity=0.9)
        >>> int((model.weight != 0).sum())
        10
    """
    plan = make_plan(
        model, sparsity, pattern=pattern, cost=cost, budget=budget, include=include, exclude=exclude, count=count
    )
    for group in plan.groups:
        group = replace(group, fused=False)  # nothing is laid end to end for a single pass
        scores = group.scores([t.local for t in group.targets])
        threshold = group.select(scores, group.total * (1.0 - group.sparsity))
        for target, keep in zip(group.targets, group.expand(group.keep(scores, threshold)), strict=True):
            target.local.masked_fill_(~keep, 0.0)
    return model
