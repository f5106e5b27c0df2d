"""Tells where a run stands: numbers, a table per layer, a printable summary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spartan.methods.base import Method
from spartan.ops.newton import Dual
from spartan.problem.coverage import Coverage
from spartan.problem.problem import Problem
from spartan.problem.schedules import Phase
from spartan.problem.targets import Target
from spartan.problem.zeros import zeros_of
from spartan.step.look import solutions
from spartan.step.run import Run

# One number where all targets compete; one per segment where the budget divides them.
PerSegment = float | tuple[float, ...] | None


@dataclass(frozen=True)
class Stats:
    """Where a run stands.

    `density` counts the weights in kept units, `cost` what they cost; `target_density` and `target_cost` are what the
    schedule asks for now, the former as a fraction of the whole cost. `beta`, `mu`, `threshold` and `passes` belong to
    the masks in use; with N:M every few weights have a μ and a threshold of their own, and these two are None.
    `bytes_sent` is what each process exchanged with the others for the last step, where weights lie in shards.

    All of these are what the run has planned and done. `zeros` is what the model really holds.
    """

    step: int
    phase: Phase
    density: float
    target_density: float
    cost: float
    target_cost: float
    beta: float | None
    mu: PerSegment
    threshold: PerSegment
    passes: int
    bytes_sent: int = 0

    @property
    def zeros(self) -> float:
        """Of the weights of all targets, the fraction that is zero in the model now, counted whenever it is asked for.

        Where weights lie in shards, every process must ask.
        """
        targets: Sequence[Target] = self.__dict__["_targets"]
        return sum(zeros_of(targets)) / sum(target.numel for target in targets)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_targets"}  # the model stays here

    @classmethod
    def of(cls, run: Run) -> "Stats":
        """Where a run stands."""
        problem, kept, found = run.problem, run.kept_units(), solutions(run.weights)
        weights = sum(n * size for n, size in zip(kept, problem.sizes, strict=True))
        asked = math.fsum(k for k, _, _ in found) + problem.untouched
        duals = [dual for _, _, dual in found]
        beta = run.method.beta_at(problem, run.at)
        solved = next((dual["beta"] for dual in duals if dual is not None), None)
        stats = cls(
            step=run.at.step,
            phase=run.at.phase,
            density=(weights + problem.untouched) / problem.counted,
            target_density=asked / problem.total,
            cost=math.fsum(n * c for n, c in zip(kept, problem.unit_costs, strict=True)) + problem.untouched,
            target_cost=asked,
            beta=(None if beta is None else beta[0]) if solved is None else solved,
            mu=_per_segment([None if dual is None or "center" not in dual else Dual(**dual).mu for dual in duals]),
            threshold=_per_segment([None if a is None else a.get("value") for _, a, _ in found]),
            passes=max((int(dual.get("passes", 0)) for dual in duals if dual is not None), default=0),
            bytes_sent=run.sent,
        )
        object.__setattr__(stats, "_targets", problem.targets)  # no field, which would be compared and copied
        return stats


def _per_segment(values: Sequence[float | None]) -> PerSegment:
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
    def of(cls, problem: Problem, kept: Sequence[int], flops: bool) -> "list[Layer]":
        """One row per target, from the units kept of each."""
        rows = []
        for target, units, size, price in zip(problem.targets, kept, problem.sizes, problem.prices, strict=True):
            entries, dense = units * size, 2.0 * price * target.numel if flops else None
            share = entries / target.numel
            sparse = None if dense is None else dense * share
            rows.append(cls(target.name, target.shape, target.numel, entries, share, dense, sparse))
        return rows


def progress_of(run: Run) -> dict[str, Any]:
    """The part of `Stats` that costs little to read; on an accelerator some of it is still on the device, as tensors."""
    problem, kept = run.problem, run.kept_cost()
    asked = sum(k for part in run.weights.parts for k in part.k) + problem.untouched
    duals = [part.dual for part in run.weights.solving if part.dual is not None]
    beta = run.method.beta_at(problem, run.at)
    return {
        "target_density": asked / problem.total,
        "density": None if kept is None else (kept + problem.untouched) / problem.total,
        "beta": None if beta is None else beta[0],
        "mu": duals[0].mu() if len(duals) == len(problem.segments) == 1 else None,
        "passes": duals[0].passes.max() if len(duals) == 1 else 0,
    }


def describe(
    method: Method, settings: Mapping[str, Any], stats: Stats, layers: Sequence[Layer], path: str, coverage: Coverage
) -> str:
    """The sparsifier in a few lines: settings, where the run stands, what is left out, the first and the last layers."""
    width = max(len(layer.name) for layer in layers)
    beta = "" if stats.beta is None else f", β = {stats.beta:.4g}"
    # What is asked for is a fraction of the cost; with another cost than parameters that is not the density.
    part = stats.target_density * stats.cost / stats.target_cost if stats.target_cost else 0.0
    cost = "" if settings["cost"] == "Params" else f"{part:.4%} of the cost, "
    # A run that began sparse has neither a sparsity that was asked for nor an end.
    sparsity = "" if settings["sparsity"] is None else f"sparsity {settings['sparsity']:g}, "
    end = "" if settings["total_steps"] is None else f" of {settings['total_steps']}"
    lines = [
        f"Sparsifier: {method!r}, {settings['pattern']}, {sparsity}"
        f"budget {settings['budget']!r}, {len(layers)} tensors of {sum(x.parameters for x in layers):,} weights",
        f"  step {stats.step}{end} ({stats.phase}): density {stats.density:.4%}, {cost}"
        f"asked {stats.target_density:.4%}{beta}",
        f"  by {path}",
    ]
    if coverage.left_out:
        lines.append(f"  left out: {coverage}")
    empty = [x.name for x in layers if x.kept == 0]
    if empty:
        names = ", ".join(empty[:4]) + (", …" if len(empty) > 4 else "")
        lines.append(f"  nothing is left of {names}: the network may be cut in two there (see min_density=)")
    rows = [f"  {x.name:<{width}}  {x.density:8.3%}  {x.kept:>12,} of {x.parameters:,}" for x in layers]
    if len(rows) > 12:
        rows = [*rows[:6], f"  … {len(rows) - 12} more, see layers() …", *rows[-6:]]
    return "\n".join(lines + rows)
