"""The arguments of `spartan.prune` by type, for those who look at its two results."""

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import torch

from spartan.problem.budgets import Budget
from spartan.problem.costs import Cost
from spartan.problem.patterns import Pattern
from spartan.problem.targets import Globs


class PruneOptions(TypedDict, total=False):
    """All but the model, the sparsity and `report`."""

    criterion: str
    calibration: Iterable[Any] | None
    pattern: Pattern | None
    cost: Cost | Mapping[str, float] | None
    budget: Budget | None
    include: Globs
    exclude: Globs
    count: str
    device: str | torch.device | None
    blocks: Globs
    undo: bool
    progress: bool | None
