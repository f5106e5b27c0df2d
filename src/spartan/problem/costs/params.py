"""Parameters as the cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from spartan.problem.costs.base import Cost
from spartan.problem.targets import Target


@dataclass(frozen=True)
class Params(Cost):
    """Every parameter costs one: sparsity is the fraction of weights that are gone."""

    name = "params"
    counts_parameters = True

    def per_parameter(self, model: nn.Module, targets: Sequence[Target]) -> list[float]:
        """All ones."""
        return [1.0] * len(targets)
