"""Selects exactly: the longest prefix of the units, ordered by value / cost, whose cost fits the budget."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spartan.ops.parts import CostGrid, Limit, Part, Parts, check_budget, chunks, numel, product, sample, total_cost
from spartan.scalars import as_plain

# Up to here everything is sorted; a GPU sorts sooner than it answers questions about a sample.
SORT_ALL, SORT_ALL_ON_GPU = 1 << 17, 1 << 22
SAMPLE = 1 << 16
COSTED = 1 << 16  # units at a time where each has its cost, which takes several numbers of float64 a unit


@dataclass(frozen=True)
class Threshold:
    """What is kept, in two numbers: units above `value`, and of those equal to it the ones at positions below `cut`.

    `cost` is what they cost together.
    """

    value: float
    cut: int = 0
    cost: float = math.nan

    def keep(self, u: Tensor, start: int = 0) -> Tensor:
        """Bool per unit, for units that stand at positions `start`, `start` + 1, … of the whole vector."""
        keep = u > self.value
        ties = min(max(self.cut - start, 0), u.numel())
        if ties:
            keep[:ties] |= u[:ties] == self.value
        return keep


@dataclass(frozen=True)
class Boundary:
    """Where the budget runs out, in more detail: a soft mask starts from here."""

    threshold: Threshold
    fraction: float  # of the cost of the units equal to the threshold, what still fits
    gap_above: float  # distance to the next larger value
    gap_below: float  # distance to the next smaller value


@dataclass
class Above:
    """What is surely kept: in number, and in cost as the two sums of a `CostGrid`; `terms` gives exactly what they cost.

    `rest` is the sum of what the fine parts are without their sign: the fine sum is off by a rounding error of it.
    """

    count: int = 0
    coarse: float = 0.0
    fine: float = 0.0
    rest: float = 0.0
    terms: Callable[[], list[float]] = list

    def add(self, count: int, price: float, grid: CostGrid) -> None:
        """So many units of one price."""
        coarse, fine = grid.split(price)
        self.add_sums(count, count * coarse, count * fine, count * abs(fine))

    def add_sums(self, count: int, coarse: float, fine: float, rest: float) -> None:
        """Units whose costs were added up."""
        self.count, self.coarse, self.fine, self.rest = (
            *(self.count + count, self.coarse + coarse),
            *(self.fine + fine, self.rest + rest),
        )


def select(parts: Parts, k: float) -> Threshold:
    """The threshold of the hard top-k: exact, ties broken by position, the same for any chunking of the input."""
    return boundary(parts, k).threshold


def boundary(parts: Parts, k: float, prices: Iterable[float] | None = None) -> Boundary:
    """The threshold and its surroundings; `prices` are what units cost, where that is known.

    A sample brackets the answer; one pass counts what lies above the bracket and collects what lies inside, which is
    sorted. A bracket that misses is widened, so the sample decides the time, never the result.
    """
    total = total_cost(parts)
    k = check_budget(k, total)
    limit = Limit.of(k, _prices(parts) if prices is None else prices)
    if k >= total:
        return Boundary(Threshold(-math.inf, cost=total), 0.0, math.inf, math.inf)
    grid = CostGrid(total)
    above, inside = _window(parts, limit, total, grid)
    found = boundary_within(inside, limit, above, grid)
    if not found.threshold.cut:
        return found
    ties = found.threshold.cut
    return replace(found, threshold=replace(found.threshold, cut=_place_of_tie(parts, found.threshold.value, ties)))


def boundary_within(inside: Parts, limit: Limit, above: Above, grid: CostGrid) -> Boundary:
    """The boundary among a few units that hold it, when what lies above them is kept; its `cut` counts the ties kept."""
    values, order = torch.cat([p.u for p in inside]).sort(descending=True, stable=True)
    # So many of the units fit, in this order; those equal to the threshold stand in it by position.
    if limit.price is not None:
        fit = min(max(limit.units() - above.count, 0), len(values))
    else:
        costs = torch.cat([_costs(p) for p in inside])[order]
        fit = _how_many_fit(costs, limit, above, grid)
    edge = values[min(fit, len(values) - 1)]
    # Sorted upwards, the values equal to the threshold stand from `first` to `last`.
    upwards = values.flip(0)
    start, stop = torch.searchsorted(upwards, edge), torch.searchsorted(upwards, edge, right=True)
    neighbours = upwards[torch.stack((start - 1, stop)).clamp(0, values.numel() - 1)]
    # One look at the device; float64 holds values and positions exactly.
    found = torch.cat((edge[None].double(), neighbours.double(), torch.stack((start, stop)).double())).tolist()
    value, below, over = found[:3]
    first, last = (int(position) for position in found[3:])
    larger, equal = values.numel() - last, last - first
    if limit.price is not None:
        sums = [larger * limit.price, fit * limit.price, equal * limit.price]
    else:
        sums = torch.stack([x.sum() for x in (costs[:larger], costs[:fit], costs[larger : larger + equal])]).tolist()
    already = above.coarse + above.fine
    return Boundary(
        Threshold(value, fit - larger, cost=already + sums[1]),
        fraction=min(max((limit.k + limit.over - already - sums[0]) / sums[2], 0.0), 1.0),
        gap_above=over - value if larger else math.inf,
        gap_below=value - below if first else math.inf,
    )


def _prices(parts: Parts) -> list[float]:
    """The cheapest and the dearest unit."""
    ends = [
        torch.stack(torch.aminmax(p.c)).tolist() if isinstance(p.c, Tensor) else [p.c] for p in parts if p.u.numel()
    ]
    return [price for end in ends for price in end]


def _window(parts: Parts, limit: Limit, total: float, grid: CostGrid) -> tuple[Above, Parts]:
    """What is surely kept, and a set of units that holds the threshold."""
    if numel(parts) <= (SORT_ALL if parts[0].u.device.type == "cpu" else SORT_ALL_ON_GPU):
        return Above(), parts
    spread, k = 3.0, limit.k + limit.over
    while True:
        low, high = _bracket(parts, k, total, spread)
        above, inside = _split(parts, low, high, grid)
        cost, margin = above.coarse + above.fine, 1e-12 * total  # more than sums here are off by
        fits_above = cost + margin <= k or high == math.inf
        if fits_above and (k + margin < cost + total_cost(inside) or low == -math.inf):
            return above, inside
        spread *= 8.0


def _bracket(parts: Parts, k: float, total: float, spread: float) -> tuple[float, float]:
    """Values between which the threshold very likely lies, `spread` standard deviations of the sampled rank apart."""
    few = sample(parts, SAMPLE)
    values, order = torch.cat([p.u for p in few]).sort(descending=True)
    q = k / total
    sums = torch.cat([_costs(p) for p in few])[order].cumsum(0)
    middle = int(torch.searchsorted(sums, q * sums[-1], right=True))
    margin = 8 + spread * math.sqrt(values.numel() * max(q * (1 - q), 1e-4))
    first, last = int(middle - margin), int(middle + margin)
    high = float(values[first]) if first >= 0 else math.inf
    low = float(values[last]) if last < values.numel() else -math.inf
    return low, high


def _split(parts: Parts, low: float, high: float, grid: CostGrid) -> tuple[Above, list[Part]]:
    """The units above `high`, added up, and those in [low, high] in order of position."""
    above, inside = Above(terms=lambda: _costs_above(parts, high)), []
    for part in parts:
        for u, c in chunks(part, COSTED if isinstance(part.c, Tensor) else None):
            over = u > high
            within = (u >= low).logical_xor_(over)
            if not isinstance(c, Tensor):
                above.add(int(over.count_nonzero()), c, grid)
                inside.append(Part(u[within], c))
                continue
            coarse, fine = grid.split((c * over).double())
            count, *sums = torch.stack((over.sum().double(), coarse.sum(), fine.sum(), fine.abs_().sum())).tolist()
            above.add_sums(int(count), *sums)
            places = within.nonzero().squeeze(1)
            inside.append(Part(u[places], c[places]))
    return above, inside


def _costs_above(parts: Parts, high: float) -> list[float]:
    """What the units above `high` cost, one by one, or exactly in sum."""
    found: list[float] = []
    for part in parts:
        over = part.u > high
        found += part.c[over].tolist() if isinstance(part.c, Tensor) else product(int(over.count_nonzero()), part.c)
    return found


def _costs(part: Part) -> Tensor:
    """One cost per unit, in float64."""
    c = torch.as_tensor(part.c, dtype=torch.float64, device=part.u.device)
    return c.expand(part.u.numel())


def _how_many_fit(costs: Tensor, limit: Limit, above: Above, grid: CostGrid) -> int:
    """How many of the first units fit the budget beside what is kept already, without rounding."""
    coarse, fine = grid.split(costs)
    whole, rest = grid.split(limit.k)
    excess = (coarse.cumsum(0) + (above.coarse - whole)) + (fine.cumsum(0) + (above.fine - rest - limit.over))
    # The sums are off by at most this much: units that end further from the budget need no second look.
    eps = torch.finfo(torch.float64).eps
    error = eps * (len(costs) * fine.abs().sum() + (above.count * above.rest + abs(rest) + limit.over))
    ends = torch.searchsorted(excess, torch.stack((-error, error)), right=True)
    low, high = ends.tolist()
    if low == high:
        return int(low)
    kept, exact = above.terms(), costs[:high].tolist()
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if limit.holds([*kept, *exact[:middle]]) else (low, middle - 1)
    return int(low)


def _place_of_tie(parts: Parts, value: float, number: int) -> int:
    """The position of the unit after so many that are equal to the value; the end where there is none."""
    position = 0
    for part in parts:
        for u, _ in chunks(part):
            ties = (u == value).nonzero().flatten()
            if number < ties.numel():
                return position + int(ties[number])
            number -= ties.numel()
            position += u.numel()
    return position


def hard_topk(values: Tensor, k: float, costs: Tensor | None = None) -> Tensor:
    """Keep the most valuable units that fit a budget.

    The longest prefix of the units, ordered by value / cost (ties by position), whose cost fits `k`. Exact: the budget
    is never exceeded, and the next unit in order would exceed it. Costs are added up without rounding; what is forgiven
    is a billionth of the cheapest unit, and where all cost the same 1e-15 of `k`.

    Args:
        values: value of each unit, any shape; bf16 and fp16 are compared in float32.
        k: the budget, between 0 and the sum of the costs (without costs: the number of units). Their sum in float64
            keeps everything, however it was rounded.
        costs: cost of each unit, positive, of the same shape; None means 1 each.

    Returns:
        A bool tensor of the shape of `values`.

    Example:
        >>> hard_topk(torch.tensor([3.0, -1.0, 2.0, 2.0]), k=2)
        tensor([ True, False,  True, False])
    """
    part, k = as_part(values.detach(), costs), float(as_plain(k))
    if len(set(prices := _prices([part]))) == 1:
        part = part._replace(c=prices[0])
    return select([part], k).keep(part.u).reshape(values.shape)


def as_part(values: Tensor, costs: Tensor | None) -> Part:
    """Checked, flat, in at least float32, and divided by the costs."""
    if not values.is_floating_point():
        raise ValueError(f"values has dtype {values.dtype}; a real floating-point tensor is needed")
    if values.numel() == 0:
        raise ValueError("values is empty; at least one unit is needed")
    v = values.reshape(-1)
    v = v if v.dtype == torch.float64 else v.float()
    if not torch.isfinite(torch.stack(torch.aminmax(v))).all():
        raise ValueError("values holds NaN or infinite entries; only finite values can be ranked")
    if costs is None:
        return Part(v)
    if costs.shape != values.shape:
        raise ValueError(f"costs has shape {tuple(costs.shape)} and values {tuple(values.shape)}; they must agree")
    c = costs.detach().reshape(-1).to(v.device, torch.float32 if costs.dtype.itemsize <= 4 else torch.float64)
    low, high = torch.stack(torch.aminmax(c)).tolist()
    if not (low > 0 and math.isfinite(high)):
        raise ValueError(f"costs must be positive and finite; the smallest is {low!r}, the largest {high!r}")
    return Part((v / c).to(v.dtype), c)
