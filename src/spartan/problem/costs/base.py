"""What a cost is: what one parameter costs, and so what a budget is counted in.

A new cost is one file; recipes know it by its `name`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import nn

from spartan.problem.targets import Globs, Target


class Cost(ABC):
    """Cost per parameter of each target; a unit costs the sum over its entries.

    The value of a unit is v = Σ cᵖ|θ| with the power p = `value_power`, so that with p = 1 units rank by magnitude.
    """

    # How a recipe names it; a cost without a name is known to Python only.
    name: ClassVar[str] = ""
    # Whether a budget counts parameters, of which others than the targets' can be counted too; or multiplications.
    counts_parameters: ClassVar[bool] = False
    counts_flops: ClassVar[bool] = False
    value_power: float = 1.0

    @abstractmethod
    def per_parameter(self, model: nn.Module, targets: Sequence[Target]) -> list[float]:
        """One positive number per target."""

    def describe(self) -> str:
        """The cost in a word, without its example inputs."""
        return type(self).__name__ + ("" if self.value_power == 1.0 else f"(value_power={self.value_power:g})")

    @classmethod
    def for_run(
        cls, model: nn.Module, example_inputs: Any, value_power: float, include: Globs = None, exclude: Globs = None
    ) -> "Cost":
        """The cost of a run, made while the model is whole; what it does not need it leaves."""
        return cls()


def kinds() -> Iterator[type[Cost]]:
    """Every cost that a recipe can name, this library's and those that others have defined."""
    waiting: list[type[Any]] = [Cost]
    while waiting:
        kind = waiting.pop(0)
        waiting += kind.__subclasses__()
        if kind.name:
            yield kind


def cost_by_name(name: str) -> type[Cost]:
    """The cost that a recipe names."""
    found = {kind.name: kind for kind in kinds()}
    if name not in found:
        raise ValueError(f"{name!r} is not accepted; accepted: {', '.join(found)}")
    return found[name]
