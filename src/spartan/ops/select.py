"""Selects exactly: the longest prefix of the units, ordered by value / cost, whose cost fits the budget."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.ops.parts import Part, Parts, check_budget, chunks, cost_of, numel, sample, slack, total_cost
from spartan.scalars import as_plain

# Up to here everything is sorted; a GPU sorts sooner than it answers questions about a sample.
SORT_ALL, SORT_ALL_ON_GPU = 1 << 17, 1 << 22
SAMPLE = 1 << 16


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


def select(parts: Parts, k: float) -> Threshold:
    """The threshold of the hard top-k: exact, ties broken by position, the same for any chunking of the input."""
    return boundary(parts, k).threshold


def boundary(parts: Parts, k: float) -> Boundary:
    """The threshold and its surroundings.

    A sample brackets the answer; one pass counts what lies above the bracket and collects what lies inside, which is
    sorted. A bracket that misses is widened, so the sample decides the time, never the result.
    """
    total = total_cost(parts)
    k = check_budget(k, total)
    k += slack(k, total / numel(parts))
    if k >= total:
        return Boundary(Threshold(-math.inf, cost=total), 0.0, math.inf, math.inf)
    above, inside = _window(parts, k, total)
    values, order = torch.cat([p.u for p in inside]).sort(descending=True)
    edge = values[_first_that_does_not_fit(inside, order, k - above)]
    # Sorted upwards, the values equal to the threshold stand from `first` to `last`.
    upwards = values.flip(0)
    start, stop = torch.searchsorted(upwards, edge), torch.searchsorted(upwards, edge, right=True)
    neighbours = upwards[torch.stack((start - 1, stop)).clamp(0, values.numel() - 1)]
    # One look at the device; float64 holds values and positions exactly.
    found = torch.cat((edge[None].double(), neighbours.double(), torch.stack((start, stop)).double())).tolist()
    value, below, over = found[:3]
    first, last = (int(position) for position in found[3:])
    larger, equal = values.numel() - last, last - first
    room, ties, cheapest = _at_the_edge(inside, order, k - above, larger, equal)
    cut, left = _cut(parts, value, room) if room >= cheapest else (0, room)
    return Boundary(
        Threshold(value, cut, cost=k - left),
        fraction=min(max(room / ties, 0.0), 1.0),
        gap_above=over - value if larger else math.inf,
        gap_below=value - below if first else math.inf,
    )


def _window(parts: Parts, k: float, total: float) -> tuple[float, Parts]:
    """The cost of what is surely kept, and a set of units that holds the threshold."""
    if numel(parts) <= (SORT_ALL if parts[0].u.device.type == "cpu" else SORT_ALL_ON_GPU):
        return 0.0, parts
    spread = 3.0
    while True:
        low, high = _bracket(parts, k, total, spread)
        above, inside = _split(parts, low, high)
        if above <= k and (k < above + total_cost(inside) or low == -math.inf):
            return above, inside
        spread *= 8.0


def _at_the_edge(parts: Parts, order: Tensor, room: float, larger: int, equal: int) -> tuple[float, float, float]:
    """What is left for the units equal to the threshold, what they cost, and the cheapest of them."""
    cost = _one_cost(parts)
    if cost is not None:
        return room - larger * cost, equal * cost, cost
    costs = torch.cat([_costs(p) for p in parts])[order]
    tied = costs[larger : larger + equal]
    return room - float(costs[:larger].sum()), float(tied.sum()), float(tied.min())


def _one_cost(parts: Parts) -> float | None:
    """The cost of every unit, if they all cost the same."""
    cost = parts[0].c
    return cost if not isinstance(cost, Tensor) and all(p.c == cost for p in parts) else None


def _bracket(parts: Parts, k: float, total: float, spread: float) -> tuple[float, float]:
    """Values between which the threshold very likely lies, `spread` standard deviations of the sampled rank apart."""
    few = sample(parts, SAMPLE)
    values, order = torch.cat([p.u for p in few]).sort(descending=True)
    q = k / total
    middle = _first_that_does_not_fit(few, order, q * total_cost(few))
    margin = 8 + spread * math.sqrt(values.numel() * max(q * (1 - q), 1e-4))
    first, last = int(middle - margin), int(middle + margin)
    high = float(values[first]) if first >= 0 else math.inf
    low = float(values[last]) if last < values.numel() else -math.inf
    return low, high


def _split(parts: Parts, low: float, high: float) -> tuple[float, list[Part]]:
    """The cost of the units above `high`, and the units in [low, high] in order of position."""
    above, inside = 0.0, []
    for part in parts:
        for u, c in chunks(part):
            over = u > high
            within = (u >= low).logical_xor_(over)
            above += cost_of(int(over.count_nonzero()), c[over] if isinstance(c, Tensor) else c)
            inside.append(Part(u[within], c[within] if isinstance(c, Tensor) else c))
    return above, inside


def _first_that_does_not_fit(parts: Parts, order: Tensor, room: float) -> int:
    """Index, in sorted order, of the first unit that no longer fits; the last one where all would."""
    cost = _one_cost(parts)
    if cost is not None:
        return min(math.floor(room / cost), order.numel() - 1)
    return min(_how_many_fit(torch.cat([_costs(p) for p in parts])[order], room), order.numel() - 1)


def _costs(part: Part) -> Tensor:
    """One cost per unit, in float64."""
    c = torch.as_tensor(part.c, dtype=torch.float64, device=part.u.device)
    return c.expand(part.u.numel())


def _how_many_fit(costs: Tensor, room: float) -> int:
    return int(torch.searchsorted(costs.cumsum(0), room, right=True))


def _cut(parts: Parts, value: float, room: float) -> tuple[int, float]:
    """Up to which position the units equal to the threshold still fit, and the room that is left then."""
    position = 0
    for part in parts:
        for u, c in chunks(part):
            ties = (u == value).nonzero().flatten()
            if isinstance(c, Tensor):
                fit = _how_many_fit(c[ties].double(), room)
            else:  # a running sum of thousands of costs would round
                fit = min(max(math.floor(room / c), 0), ties.numel())
            room -= cost_of(fit, c[ties[:fit]] if isinstance(c, Tensor) else c)
            if fit < ties.numel():
                return position + int(ties[fit]), room
            position += u.numel()
    return position, room


def hard_topk(values: Tensor, k: float, costs: Tensor | None = None) -> Tensor:
    """Keep the most valuable units that fit a budget.

    The longest prefix of the units, ordered by value / cost (ties by position), whose cost fits `k`. Exact: the budget
    is never exceeded, but for rounding (a billionth of the cheapest unit), and the next unit in order would exceed it.

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
    if not isinstance(part.c, Tensor):
        return select([part], k).keep(part.u).reshape(values.shape)
    # Not by `select`: what it allows for rounding is small against the mean unit, and can be many of the cheapest.
    # A billionth of the cheapest still forgives a budget such as (1 − 0.9)·1000, and never lets a unit through.
    order = part.u.argsort(descending=True, stable=True)
    total = total_cost([part])
    k = check_budget(k, total)
    fit = order.numel() if k >= total else _fit_exactly(part.c[order].double(), k + slack(0.0, float(part.c.min())))
    return torch.zeros_like(part.u, dtype=torch.bool).index_fill_(0, order[:fit], True).reshape(values.shape)


def _fit_exactly(costs: Tensor, k: float) -> int:
    """How many of the first units fit the budget, without rounding."""
    sums = costs.cumsum(0)
    # The running sum is off by at most this much: units that end further from the budget need no second look.
    error = costs.numel() * torch.finfo(torch.float64).eps * float(sums[-1])
    low = int(torch.searchsorted(sums, k - error, right=True))
    high = int(torch.searchsorted(sums, k + error, right=True))
    if low == high:
        return low
    exact = costs[:high].tolist()
    while low < high:  # the sign of an fsum is exact
        middle = (low + high + 1) // 2
        low, high = (middle, high) if math.fsum([*exact[:middle], -k]) <= 0 else (low, middle - 1)
    return low


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
