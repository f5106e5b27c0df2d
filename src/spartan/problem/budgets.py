"""Reads budgets: who competes with whom, for how much, and by what measure."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from spartan.distributed import Ranks
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
        budget: "global" (all compete), "balanced" (all compete, by magnitudes relative to how each layer begins: see
            `balanced_scales`), "uniform" (every target the same sparsity), "erk" (Erdős–Rényi kernel), or {glob: sparsity}
            for every target whose name matches (the first match counts; the others get `sparsity`).
        sparsity: fraction of the cost gone at the end.
        targets: the targets.
        costs: the whole cost of each.
    """
    each = range(len(targets))
    if isinstance(budget, Mapping):
        return [Share([i], s) for i, s in enumerate(by_name("budget", budget, sparsity, targets))]
    if budget in ("global", "balanced"):
        return [Share(list(each), sparsity)]
    if budget == "uniform":
        return [Share([i], sparsity) for i in each]
    if budget == "erk":
        shapes = [t.axes.shape(t.shape) for t in targets]  # of experts, each is a matrix
        return [Share([i], 1.0 - d) for i, d in enumerate(erk(shapes, costs, 1.0 - sparsity))]
    raise ValueError(
        f'budget={budget!r} is unknown; "global", "balanced", "uniform", "erk" and {{glob: sparsity}} are accepted'
    )


@torch.no_grad()
def balanced_scales(targets: Sequence[Target]) -> list[float]:
    """What the magnitudes of each target are multiplied by under the budget "balanced".

    1/(r·√n), with r the root mean square of the target's weights that are not zero when the run begins, and n the
    inputs of an output: as if every layer had begun with weights of size 1/√n, as most initialisations have it. Layers
    that begin smaller, such as those that GPT-2 scales down because they add to its residual stream, would be empty under
    one threshold for all.

    The whole keeps its root mean square, so that a sharpness β means what it did, and where r·√n is the same in all
    layers nothing changes. Rounded to 8 bits: the order in which processes or devices add must not tell.
    """
    weights = [target.local.detach() for target in targets]
    here = torch.tensor(
        [[float(w.double().square().sum()) for w in weights], [float(w.count_nonzero()) for w in weights]],
        dtype=torch.float64,
        device=weights[0].device,
    )
    ranks = Ranks.of([target.parameter for target in targets])
    squares, counts = ranks.sum(ranks.counted(here)).tolist()
    inputs = [math.prod(target.axes.shape(target.shape)[1:]) for target in targets]
    there = [i for i, square in enumerate(squares) if square > 0]
    if not there:
        return [1.0] * len(targets)
    whole = math.fsum(squares) / math.fsum(counts[i] / inputs[i] for i in there)
    found = [math.sqrt(whole * count / (square * n)) if square > 0 else 1.0
             for square, count, n in zip(squares, counts, inputs, strict=True)]  # fmt: skip
    return [_rounded(scale) for scale in found]


def _rounded(x: float) -> float:
    """To 8 significant bits."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 256.0) / 256.0, exponent)


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
