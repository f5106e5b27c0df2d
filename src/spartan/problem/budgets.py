"""Reads budgets: who competes with whom, and for how much."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spartan.problem.targets import Target, first_match, matches, some_names
from spartan.scalars import as_plain

Budget = str | Mapping[str, float]


class Share(NamedTuple):
    """Targets (by index) that compete with one another, and the fraction of their cost that is gone at the end."""

    members: list[int]
    sparsity: float


def check_sparsity(sparsity: float, argument: str = "sparsity") -> float:
    """A fraction in [0, 1)."""
    sparsity = as_plain(sparsity)
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise ValueError(
            f"{argument}={sparsity!r} is outside [0, 1): it is the fraction that is gone, such as 0.95 for 95%"
        )
    return float(sparsity)


def divide(budget: Budget, sparsity: float, targets: Sequence[Target], costs: Sequence[float]) -> list[Share]:
    """Split the targets, whose whole costs are given, into shares with a sparsity each.

    Args:
        budget: "global" (all compete), "uniform" (every target the same sparsity), "erk" (Erdős–Rényi kernel), or
            {glob: sparsity} for every target whose name matches (the first match counts; the others get `sparsity`).
        sparsity: fraction of the cost gone at the end.
        targets: the targets.
        costs: the whole cost of each.
    """
    each = range(len(targets))
    if isinstance(budget, Mapping):
        return [Share([i], s) for i, s in enumerate(by_name("budget", budget, sparsity, targets))]
    if budget == "global":
        return [Share(list(each), sparsity)]
    if budget == "uniform":
        return [Share([i], sparsity) for i in each]
    if budget == "erk":
        shapes = [t.axes.shape(t.shape) for t in targets]  # of experts, each is a matrix
        return [Share([i], 1.0 - d) for i, d in enumerate(erk(shapes, costs, 1.0 - sparsity))]
    raise ValueError(f'budget={budget!r} is unknown; "global", "uniform", "erk" and {{glob: sparsity}} are accepted')


def erk(shapes: Sequence[Sequence[int]], costs: Sequence[float], density: float) -> list[float]:
    """Densities ∝ Σdims / Πdims whose cost is `density` of the whole; layers that would pass 1 are dense.

    The Erdős–Rényi-kernel rule of Evci et al. 2020 (RigL), with its saturation: layers found to be over-full are fixed
    at 1 and the scale of the others is found again.
    """
    raw = []
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        raw.append(sum(shape) / size)
    full: set[int] = set()
    while True:
        free = [i for i in range(len(raw)) if i not in full]
        room = density * sum(costs) - sum(costs[i] for i in full)
        scale = room / sum(raw[i] * costs[i] for i in free) if free else 0.0
        over = {i for i in free if scale * raw[i] >= 1.0}
        if not over:
            return [1.0 if i in full else scale * raw[i] for i in range(len(raw))]
        full |= over


def by_name(argument: str, table: Mapping[str, float], other: float, targets: Sequence[Target]) -> list[float]:
    """A fraction in [0, 1) per target: that of the first glob that matches it, or the `other`."""
    for glob, value in table.items():
        check_sparsity(value, f"{argument}[{glob!r}]")
        if not any(matches(target, glob) for target in targets):
            raise ValueError(f"{argument}: the glob {glob!r} matches no target; targets are {some_names(targets)}")
    found = [first_match(table, target) for target in targets]
    return [other if value is None else value for value in found]
