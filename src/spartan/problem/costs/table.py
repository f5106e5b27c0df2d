"""Costs by name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from spartan.problem.costs.base import Cost
from spartan.problem.targets import Target, first_match, matches, some_names
from spartan.scalars import takes_numbers


@takes_numbers
@dataclass(frozen=True)
class CostTable(Cost):
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
                raise ValueError(f"cost: the glob {glob!r} matches no target; targets are {some_names(targets)}")
        return [self._price(target) for target in targets]

    def _price(self, target: Target) -> float:
        price = first_match(self.table, target)
        if price is None:
            raise ValueError(f"cost: no glob of the table matches {target.name}; add '*': 1.0 for all the others")
        return price
