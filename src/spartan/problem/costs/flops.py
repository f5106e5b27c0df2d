"""Multiplications as the cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from spartan.distributed import is_dtensor
from spartan.problem.costs.base import Cost
from spartan.problem.flops import macs_per_parameter
from spartan.problem.targets import Globs, Target, find_targets
from spartan.scalars import as_plain


@dataclass(frozen=True)
class Flops(Cost):
    """Every parameter costs the number of output positions it serves: sparsity is the fraction of multiplications gone.

    That is N² for a convolution with an N × N output, the tokens for a Linear over a sequence, 1 for a classifier
    head, and the input positions for a transposed convolution (paper, Appendix F).

    Args:
        example_inputs: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
        value_power: p in v = cᵖ|θ|; 1 and 0.5 are the paper's v₁ and v₀.₅.
        counted: what `table` gave for the model before it was sharded; None counts when the cost is asked for.
    """

    example_inputs: Any
    value_power: float = 1.0
    counted: Mapping[str, float] | None = None

    name = "flops"
    counts_flops = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_power", as_plain(self.value_power))
        if not math.isfinite(self.value_power):
            raise ValueError(f"Flops: value_power={self.value_power!r}; a finite number is needed")

    def per_parameter(self, model: nn.Module, targets: Sequence[Target]) -> list[float]:
        """Positions per example, measured by one forward pass."""
        if self.counted is not None:
            return [self.counted[target.name] for target in targets]
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

    def table(self, model: nn.Module, include: Globs = None, exclude: Globs = None) -> dict[str, float]:
        """Cost per parameter by name, for `cost=` of a model that is sharded afterwards; globs as the sparsifier's."""
        targets = find_targets(model, include, exclude)
        return {t.name: c for t, c in zip(targets, self.per_parameter(model, targets), strict=True)}

    @classmethod
    def for_run(
        cls, model: nn.Module, example_inputs: Any, value_power: float, include: Globs = None, exclude: Globs = None
    ) -> "Flops":
        """Counted now: a model in shards can no longer be."""
        cost = cls(example_inputs, value_power)
        return replace(cost, counted=cost.table(model, include, exclude))
