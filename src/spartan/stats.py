"""What a sparsifier says about itself: numbers, a table per layer, a printable summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spartan.groups import Group, Plan
from spartan.methods.base import Method
from spartan.ops.rows import RowThreshold
from spartan.schedules import Moment, Phase

# One number where all targets compete; one per group where the budget divides them.
PerGroup = float | tuple[float, ...] | None


@dataclass(frozen=True)
class Stats:
    """Where a run stands.

    `density` counts the weights in kept units, `cost` what they cost; `target_density` and `target_cost` are what the
    schedule asks for now, the former as a fraction of the whole cost. `beta`, `mu`, `threshold` and `passes` belong to
    the masks in use; with N:M every few weights have a μ and a threshold of their own, and these two are None.
    `bytes_sent` is what each process exchanged with the others for the last step, where weights lie in shards.
    """

    step: int
    phase: Phase
    density: float
    target_density: float
    cost: float
    target_cost: float
    beta: float | None
    mu: PerGroup
    threshold: PerGroup
    passes: int
    bytes_sent: int = 0

    @classmethod
    def of(cls, plan: Plan, method: Method, at: Moment, kept: Sequence[int], sent: int = 0) -> Stats:
        """From the units kept of each target, and the bytes that finding them took."""
        groups = plan.groups
        sizes = [n for g in groups for n in g.size_of_units()]
        costs = [c for g in groups for c in g.cost_of_units()]
        weights = sum(n * size for n, size in zip(kept, sizes, strict=True))
        duals = [g.dual for g in groups]
        asked = math.fsum(g.k for g in groups) + plan.untouched
        return cls(
            step=at.step,
            phase=at.phase,
            density=(weights + plan.untouched) / plan.counted,
            target_density=asked / plan.total,
            cost=math.fsum(n * c for n, c in zip(kept, costs, strict=True)) + plan.untouched,
            target_cost=asked,
            beta=method.beta_at(groups[0], at),
            mu=_per_group([None if d is None or d.mu is None else float(d.mu) for d in duals]),
            threshold=_per_group([_level(g) for g in groups]),
            passes=max((int(d.passes) for d in duals if d is not None), default=0),
            bytes_sent=sent,
        )


def _level(group: Group) -> float | None:
    """The score above which units are kept, where there is one for the whole group."""
    if group.threshold is None or isinstance(group.threshold, RowThreshold):
        return None
    value = float(group.threshold.value)
    return None if value == math.inf else value  # inf: masks are stored, and no score decides


def _per_group(values: Sequence[float | None]) -> PerGroup:
    found = tuple(v for v in values if v is not None)
    if len(found) < len(values):
        return None
    return found[0] if len(found) == 1 else found


@dataclass(frozen=True)
class Layer:
    """One target: how much of it is kept. `flops` and `sparse_flops` are per example, with a FLOP cost only."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    kept: int
    density: float
    flops: float | None
    sparse_flops: float | None

    @classmethod
    def of(cls, plan: Plan, kept: Sequence[int], flops: bool) -> list[Layer]:
        """One row per target, in the order of the groups."""
        rows, units = [], iter(kept)
        for group in plan.groups:
            for target, size, price in zip(group.targets, group.size_of_units(), group.prices, strict=True):
                entries = next(units) * size
                dense = 2.0 * price * target.numel if flops else None
                rows.append(
                    cls(
                        target.name,
                        target.shape,
                        target.numel,
                        entries,
                        entries / target.numel,
                        dense,
                        None if dense is None else dense * entries / target.numel,
                    )
                )
        return rows


def describe(method: Method, settings: Mapping[str, Any], stats: Stats, layers: Sequence[Layer], path: str) -> str:
    """The sparsifier in a few lines: settings, where the run stands, the sparsest and the densest layers."""
    width = max(len(layer.name) for layer in layers)
    beta = "" if stats.beta is None else f", β = {stats.beta:.4g}"
    # What is asked for is a fraction of the cost; with another cost than parameters that is not the density.
    part = stats.target_density * stats.cost / stats.target_cost if stats.target_cost else 0.0
    cost = "" if settings["cost"] == "Params" else f"{part:.4%} of the cost, "
    lines = [
        f"Sparsifier: {method!r}, {settings['pattern']}, sparsity {settings['sparsity']:g}, "
        f"budget {settings['budget']!r}, {len(layers)} tensors of {sum(x.parameters for x in layers):,} weights",
        f"  step {stats.step} of {settings['total_steps']} ({stats.phase}): density {stats.density:.4%}, {cost}"
        f"asked {stats.target_density:.4%}{beta}",
        f"  by {path}",
    ]
    empty = [x.name for x in layers if x.kept == 0]
    if empty:
        names = ", ".join(empty[:4]) + (", …" if len(empty) > 4 else "")
        lines.append(f"  nothing is left of {names}: the network may be cut in two there")
    rows = [f"  {x.name:<{width}}  {x.density:8.3%}  {x.kept:>12,} of {x.parameters:,}" for x in layers]
    if len(rows) > 12:
        rows = [*rows[:6], f"  … {len(rows) - 12} more, see layers() …", *rows[-6:]]
    return "\n".join(lines + rows)
