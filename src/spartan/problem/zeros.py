"""Counts the zeros that weights hold, one by one or in the units of a problem."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spartan.distributed import Ranks
from spartan.problem.problem import Problem
from spartan.problem.targets import Target, some_names


@torch.no_grad()
def zeros_of(targets: Sequence[Target]) -> list[int]:
    """How many entries of each target are zero, by all processes that hold shards of it."""
    device = targets[0].local.device
    here = [(t.local.numel() - t.local.count_nonzero()).to(device) for t in targets]
    ranks = Ranks.of([t.parameter for t in targets])
    return [int(n) for n in ranks.sum(ranks.counted(torch.stack(here))).tolist()]


class UnitCount(NamedTuple):
    """Of each target: units that are not zero altogether; of these, the ones that are in part; the most in any row of m."""

    kept: list[int]
    in_part: list[int]
    fullest: list[int]

    @classmethod
    @torch.no_grad()
    def of(cls, problem: Problem) -> "UnitCount":
        """What the weights of a problem hold, by all processes."""
        device = problem.targets[0].local.device
        sums, most = [], []
        for i, (target, size) in enumerate(zip(problem.targets, problem.sizes, strict=True)):
            entries = problem.reduce(i, (target.local != 0).to(torch.float32))
            kept = entries > 0
            sums.append(torch.stack((kept.sum(), (kept & (entries < size)).sum())).to(device))
            most.append(_fullest(kept, problem.pattern.rows).to(device))
        ranks = problem.ranks
        both = torch.stack([ranks.counted(x) for x in torch.stack(sums, 1)])
        kept, in_part = ranks.sum(both).tolist()
        return cls(kept, in_part, ranks.largest(torch.stack(most)).tolist())


def _fullest(kept: Tensor, m: int | None) -> Tensor:
    """The most units kept of any m that have a budget of their own."""
    return kept.new_zeros((), dtype=torch.int64) if m is None or not kept.numel() else kept.view(-1, m).sum(1).max()


def too_full(problem: Problem, count: UnitCount) -> list[str]:
    """What keeps more than its final budget: the layers that share it, and the fraction of their cost that is gone."""
    found = []
    for segment in problem.asked:
        cost = math.fsum(count.kept[i] * problem.unit_costs[i] for i in segment.targets)
        k, m = segment.budget(problem.pattern, 1.0), problem.pattern.rows or 0
        crowded = [i for i in segment.targets if m and count.fullest[i] > m * k / segment.total + 1e-9]
        if cost > k * (1.0 + 1e-9) + 1e-6 * min(problem.unit_costs[i] for i in segment.targets):
            names = some_names([problem.targets[i] for i in segment.targets], most=4)
            found.append(f"{1 - cost / segment.total:.6g} of {names} (asked: {segment.sparsity:.6g})")
        elif crowded:
            name, n = problem.targets[crowded[0]].name, count.fullest[crowded[0]]
            found.append(f"{m} weights of {name} of which {n} are not zero (asked: {m * k / segment.total:.6g})")
    return found
