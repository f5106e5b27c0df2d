"""Costs: what one parameter costs, and so what a budget is counted in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spartan.flop_count import macs_per_parameter
from spartan.sharding import is_dtensor
from spartan.targets import Target, find_targets, matches


class Cost(ABC):
    """Cost per parameter of each target; a unit costs the sum over its entries.

    The value of a unit is v = Σ cᵖ|θ| with the power p = `value_power`, so that with p = 1 units rank by magnitude.
    """

    value_power: float = 1.0

    @abstractmethod
    def per_parameter(self, model: nn.Module, targets: Sequence[Target]) -> list[float]:
        """One positive number per target."""

    def describe(self) -> str:
        """The cost in a word, without its example inputs."""
        return type(self).__name__ + ("" if self.value_power == 1.0 else f"(value_power={self.value_power:g})")


@dataclass(frozen=True)
class Params(Cost):
    """Every parameter costs one: sparsity is the fraction of weights that are gone."""

    def per_parameter(self, model: nn.Module, targets: Sequence[Target]) -> list[float]:
        """All ones."""
        return [1.0] * len(targets)


@dataclass(frozen=True)
class Flops(Cost):
    """Every parameter costs the number of output positions it serves: sparsity is the fraction of multiplications gone.

    That is N² for a convolution with an N × N output, the tokens for a Linear over a sequence, 1 for a classifier
    head, and the input positions for a transposed convolution (paper, Appendix F).

    Args:
        example_inputs: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
        value_power: p in v = cᵖ|θ|; 1 and 0.5 are the paper's v₁ and v₀.₅.
    """

    example_inputs: Any
    value_power: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value_power):
            raise ValueError(f"Flops: value_power={self.value_power!r}; a finite number is needed")

    def per_parameter(self, model: nn.Module, targets: Sequence[Target]) -> list[float]:
        """Positions per example, measured by one forward pass."""
        sharded = [target.name for target in targets if is_dtensor(target.parameter)]
        if sharded:
            raise ValueError(
                f"cost={self.describe()} with {sharded[0]} in shards: no single process can see what it multiplies. "
                "Count before sharding, costs = Flops(example_inputs).table(model), and pass cost=costs"
            )
        found = macs_per_parameter(model, {t.name: t.parameter for t in targets}, self.example_inputs)
        for target in targets:
            if not found[target.name] > 0:
                raise ValueError(
                    f"{target.name} takes part in no multiplication that is counted on example_inputs (an embedding, an "
                    f"einsum, or a layer that did not run), so it has no FLOP cost; "
                    f"exclude it with exclude=[{target.name!r}]"
                )
        return [found[target.name] for target in targets]

    def table(
        self, model: nn.Module, include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None
    ) -> dict[str, float]:
        """Cost per parameter by name, for `cost=` of a model that is sharded afterwards; globs as the sparsifier's."""
        targets = find_targets(model, include, exclude)
        return {t.name: c for t, c in zip(targets, self.per_parameter(model, targets), strict=True)}


@dataclass(frozen=True)
class Table(Cost):
    """Cost per parameter by name: the first glob that matches a target prices it."""

    table: Mapping[str, float]

    def describe(self) -> str:
        """The table itself."""
        return repr(dict(self.table))

    def per_parameter(self, model: nn.Module, targets: Sequence[Target]) -> list[float]:
        """One price per target; every target needs one, and every glob must be of use."""
        for glob, price in self.table.items():
            if not (isinstance(price, (int, float)) and 0 < price < math.inf):
                raise ValueError(f"cost={{{glob!r}: {price!r}}}: costs must be positive and finite")
            if not any(matches(target, glob) for target in targets):
                raise ValueError(f"cost: the glob {glob!r} matches no target; targets are {names(targets)}")
        return [self._price(target) for target in targets]

    def _price(self, target: Target) -> float:
        for glob, price in self.table.items():
            if matches(target, glob):
                return float(price)
        raise ValueError(f"cost: no glob of the table matches {target.name}; add '*': 1.0 for all the others")


def as_cost(cost: Cost | Mapping[str, float] | None) -> Cost:
    """None is Params(), a dict a table by name."""
    if cost is None:
        return Params()
    if isinstance(cost, Mapping):
        return Table(dict(cost))
    if not isinstance(cost, Cost):
        raise ValueError(f"cost={cost!r} is not a cost; pass Params(), Flops(example_inputs) or {{glob: cost}}")
    return cost


def names(targets: Sequence[Target], most: int = 8) -> str:
    """Some target names for an error message."""
    return ", ".join(t.name for t in targets[:most]) + (", …" if len(targets) > most else "")
