"""Reads many flat tensors as one long vector of units, without ever copying it into one tensor."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# On a CPU the working set of a pass stays in the cache, so that memory is read once per pass. Measured at 25.5M on 2
# cores: 23 ms a pass with pieces of 2¹⁷, 18 with 2¹⁹, 19 with 2²⁰.
CHUNK = 1 << 19


class Part(NamedTuple):
    """Units of one tensor: `u` = value / cost of each (flat, float32 or float64), `c` = their cost, one or each."""

    u: Tensor
    c: float | Tensor = 1.0


Parts = Sequence[Part]
Cost = TypeVar("Cost", float, Tensor)


def chunks(part: Part, length: int | None = None) -> Iterator[tuple[Tensor, float | Tensor]]:
    """Pieces of a part that fit the cache, of at most CHUNK units or as many as said; the whole part on an accelerator."""
    length = min(CHUNK, length or CHUNK)
    if part.u.device.type != "cpu" or part.u.numel() <= length:
        yield part.u, part.c
        return
    for i in range(0, part.u.numel(), length):
        yield part.u[i : i + length], part.c[i : i + length] if isinstance(part.c, Tensor) else part.c


def numel(parts: Parts) -> int:
    """How many units there are."""
    return sum(part.u.numel() for part in parts)


def total_cost(parts: Parts) -> float:
    """C = Σc, in float64; exact for whole-number costs."""
    return math.fsum(cost_of(part.u.numel(), part.c) for part in parts)


def cost_of(count: int, c: float | Tensor) -> float:
    """The cost of `count` units of cost c, or of all the units that the tensor c prices."""
    if not isinstance(c, Tensor):
        return count * c
    # A tenth of the time of one sum, on a CPU.
    pieces = c.split(CHUNK) if c.device.type == "cpu" else (c,)
    return math.fsum(float(piece.sum(dtype=torch.float64)) for piece in pieces)


def sample(parts: Parts, n: int) -> list[Part]:
    """About n units, evenly spaced: the same ones every time, so that a run can be repeated."""
    stride = max(1, numel(parts) // n)
    return [Part(p.u[::stride], p.c[::stride] if isinstance(p.c, Tensor) else p.c) for p in parts if p.u.numel()]


def extrema(parts: Parts) -> tuple[float, float]:
    """Smallest and largest u; NaN if any is NaN."""
    low, high = math.inf, -math.inf
    for part in parts:
        if part.u.numel():
            a, b = torch.stack(torch.aminmax(part.u)).tolist()
            if math.isnan(a) or math.isnan(b):
                low, high = math.nan, math.nan
                break
            low, high = min(low, a), max(high, b)
    return low, high


def check_budget(k: float, total: float) -> float:
    """The budget, clamped to the total cost where rounding put it a little above."""
    if not 0 <= k <= total + 1e-6 * max(1.0, total):
        raise ValueError(f"k={k!r} is outside [0, {total!r}], the range from nothing to the cost of everything")
    return min(float(k), total)


@dataclass(frozen=True)
class Limit:
    """What sums of costs must stay within: the budget k, and `over`, how far above it they may lie and still fit.

    A budget such as (1 − 0.9)·1000 comes out a rounding error under the whole unit that was meant, so 1e-9 of a unit is
    forgiven: of the cheapest, or many of them would slip through where costs are far apart. Where all units cost the
    same, 1e-15 of the budget is as well, which it is rounded by if it is millions of units.
    """

    k: float
    over: float
    price: float | None  # of every unit, if they all cost the same

    @classmethod
    def of(cls, k: float, prices: Iterable[float]) -> "Limit":
        """From the budget and what the units cost."""
        cheapest, *others = sorted(set(prices))
        return cls(k, slack(k, cheapest, not others), None if others else cheapest)

    def holds(self, terms: Iterable[float]) -> bool:
        """Whether these numbers together are within the limit: without any rounding, since the sign of an fsum is exact."""
        return math.fsum([*terms, -self.k, -self.over]) <= 0

    def units(self) -> int:
        """How many units of the one price it holds."""
        assert self.price is not None
        count = math.floor((self.k + self.over) / self.price)
        return count if self.holds(product(count, self.price)) else count - 1


def slack(k: float, cheapest: float, alike: bool) -> float:
    """How far above k a sum of costs may lie and still fit; see `Limit`."""
    return 1e-9 * cheapest + (1e-15 * k if alike else 0.0)


def product(count: int, price: float) -> tuple[float, float]:
    """Two numbers that together are count · price exactly."""
    exact = Fraction(price) * count
    nearest = float(exact)
    return nearest, float(exact - Fraction(nearest))


class CostGrid:
    """Splits costs in two: sums of the first parts are exact, and of the second ones, which are far smaller, all but exact.

    The first parts are multiples of a power of two, of which `most`, the largest sum that occurs, has fewer than 2⁵².

    Example:
        >>> CostGrid(1000.0).split(0.1)[0] + CostGrid(1000.0).split(0.1)[1]
        0.1
        >>> CostGrid(1000.0).split(3.0)
        (3.0, 0.0)
    """

    def __init__(self, most: float) -> None:
        self.step = 2.0 ** (math.frexp(most)[1] - 52)
        self._shift = 1.5 * 2.0**52 * self.step  # added and subtracted again, it rounds to a multiple of the step

    def split(self, c: Cost) -> tuple[Cost, Cost]:
        """The coarse and the fine part of a cost, or of each."""
        coarse = (c + self._shift) - self._shift
        return coarse, c - coarse
