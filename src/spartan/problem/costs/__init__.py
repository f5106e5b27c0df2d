"""Costs: what a budget is counted in, one file each. A new file here is found by itself."""

import importlib
import pkgutil
from collections.abc import Mapping

from spartan.problem.costs.base import Cost, cost_by_name
from spartan.problem.costs.params import Params
from spartan.problem.costs.table import CostTable

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def as_cost(cost: Cost | Mapping[str, float] | None) -> Cost:
    """None is Params(), a dict a table by name."""
    if cost is None:
        return Params()
    if isinstance(cost, Mapping):
        return CostTable(dict(cost))
    if not isinstance(cost, Cost):
        raise ValueError(f"cost={cost!r} is not a cost; pass Params(), Flops(example_inputs) or {{glob: cost}}")
    return cost


__all__ = ["Cost", "as_cost", "cost_by_name"]
