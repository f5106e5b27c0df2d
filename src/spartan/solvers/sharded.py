"""Answers problems whose weights lie in shards: every process passes over its own, and only sums go around.

All segments ask together: a round is one reduction, whatever their number.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from spartan.distributed import Ranks
from spartan.ops.parts import Limit, Part, check_budget
from spartan.ops.select import SORT_ALL, SORT_ALL_ON_GPU, Boundary, Threshold
from spartan.problem.problem import Problem
from spartan.solvers.pools import Edge, Pools
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import Units

# Counts add up exactly in so many bits of a float64; as many of them as there is room for share one.
BITS = 53
MOST_PIVOTS = 512
# What may be sent in a step, and what each segment needs of it beside the search: Newton's sums, the gradient's.
BYTES, BESIDE = 64 * 1024, 96
MOST_WORDS = 256


class ShardedSolver(TorchSolver):
    """Shards in plain torch, on each process its own."""

    name = "sharded"

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """It is for weights of which no process has all."""
        return "no weights in shards" if problem.ranks.alone else ""

    def make_pools(self) -> Pools:
        """Rows are never cut, so that each process can solve its own."""
        return super().make_pools() if self.problem.pattern.rows is not None else ShardedPools(self)


@dataclass(frozen=True)
class Memory:
    """Where the last search of a segment ended: a guess for the next, which saves rounds and never changes what is found."""

    key: int | None = None
    move: int = 0  # how far it had come from the one before
    k: float = 0.0


class ShardedPools(Pools):
    """Segments whose units compete across processes. A unit keeps the position it has in the whole weight."""

    def __init__(self, units: Units) -> None:
        super().__init__(units)
        self._memory = [Memory() for _ in self.problem.segments]
        self.share = share_of(len(self.problem.segments))

    def counted(self, ranks: Tensor, segment: int) -> list[Part]:
        """The units of a segment that this process counts."""
        counts = self.problem.ranks.counts
        parts = zip(super().parts(ranks, segment), self.problem.members(segment), strict=True)
        return [part if counts[i] else Part(part.u[:0], part.c) for part, i in parts]

    def parts(self, ranks: Tensor, segment: int) -> list[Part]:
        """The units of a segment here, one tensor a target."""
        problem = self.problem
        return [Part(ranks[problem.slices[i]], problem.unit_costs[i]) for i in problem.members(segment)]

    def boundaries(self, ranks: Tensor, k: Mapping[int, float], ends: bool = True) -> dict[int, Edge]:
        """Where the budgets of some segments run out, as on one process and the same on all of them."""
        brackets = {s: self._bracket(ranks, s, budget) for s, budget in k.items()}
        live = {s: bracket for s, bracket in brackets.items() if bracket is not None}
        self._guess(live)
        close(list(live.values()), self.problem.ranks)
        cuts, found = self._cuts(live, ranks), {}
        for s in k:
            total = self.problem.segments[s].total
            found[s] = Boundary(Threshold(-math.inf, cost=total), 0.0, math.inf, math.inf), (0.0, 1.0)
        for s, bracket in live.items():
            memory, key = self._memory[s], bracket.key
            self._memory[s] = Memory(key, 0 if memory.key is None else key - memory.key, bracket.room)
            over, below, low, high = (value_of(x, ranks.dtype) for x in bracket.around)
            value, room = value_of(key, ranks.dtype), bracket.room - bracket.cost_of(bracket.larger)
            edge = Boundary(
                Threshold(value, *cuts[s]),
                fraction=min(max(room / bracket.cost_of(bracket.equal), 0.0), 1.0),
                gap_above=math.inf if math.isnan(over) else over - value,
                gap_below=math.inf if math.isnan(below) else value - below,
            )
            found[s] = edge, (low, high)
        return found

    def _bracket(self, ranks: Tensor, s: int, k: float) -> "Bracket | None":
        """The search of a segment; None where everything fits."""
        problem, total = self.problem, self.problem.segments[s].total
        members = problem.members(s)
        prices = sorted({problem.unit_costs[i] for i in members})
        limit = Limit.of(check_budget(k, total), prices)
        counts = [sum(problem.all_units[i] for i in members if problem.unit_costs[i] == price) for price in prices]
        if limit.k >= total or not Exact(limit, prices).exceeded(counts):
            return None
        keys = _by_price(self.counted(ranks, s), prices, [key_of(part.u) for part in self.counted(ranks, s)])
        limits = torch.iinfo(keys[0].dtype)
        return Bracket(limits.min, limits.max, counts, prices, limit, keys, self.share)

    def _guess(self, live: "Mapping[int, Bracket]") -> None:
        """Tell brackets where to look first: where the last searches make one expect it, or where samples do."""
        cold = []
        for s, bracket in live.items():
            memory = self._memory[s]
            one = 1 << (52 if bracket.keys[0].dtype == torch.int64 else 23)  # keys whose values differ by a factor of 2
            if memory.key is None or abs(bracket.room - memory.k) > 0.02 * bracket.room:
                cold.append(bracket)
                bracket.reach = one >> 5
            else:
                bracket.guess, bracket.reach = memory.key + memory.move, max(abs(memory.move), one >> 14)
        if cold:
            # The mean of the keys that processes find in samples of theirs, with about as much above them.
            sums = self.problem.ranks.sum(torch.stack([bracket.sampled() for bracket in cold])).tolist()
            for bracket, (key, found) in zip(cold, sums, strict=True):
                bracket.guess = int(key / found)

    def _cuts(self, live: "Mapping[int, Bracket]", ranks: Tensor) -> dict[int, tuple[int, float]]:
        """The position of the first unit equal to each threshold that does not fit, and what is kept in all."""
        found: dict[int, tuple[int, float]] = {}
        searches: list[tuple[int, Bracket]] = []
        for s, bracket in live.items():
            above = bracket.cost_of(bracket.larger)
            n = sum(self.problem.all_units[i] for i in self.problem.members(s))
            if not bracket.exceeds(bracket.larger, bracket.equal):  # all of them fit
                found[s] = n, above + bracket.cost_of(bracket.equal)
            elif bracket.exceeds(bracket.larger, bracket.cheapest_equal()):
                found[s] = 0, above
            else:
                value = value_of(bracket.key, ranks.dtype)
                tied = []
                for part, i in zip(self.counted(ranks, s), self.problem.members(s), strict=True):
                    tied.append(-self.problem.positions(i, part.u.device, (part.u == value).nonzero().flatten()))
                keys = _by_price(self.counted(ranks, s), bracket.prices, tied)
                cut = Bracket(1 - n, 0, bracket.equal, bracket.prices, bracket.limit, keys, bracket.words)
                cut.larger = list(bracket.larger)
                searches.append((s, cut))
        close([cut for _, cut in searches], self.problem.ranks)
        for s, cut in searches:
            # Where not even the first of them fits, none is kept, as one process says it.
            none = cut.larger == live[s].larger
            found[s] = 0 if none else -cut.key, cut.cost_of(cut.larger)
        return found


def share_of(segments: int) -> int:
    """The most numbers of 8 bytes that each of so many segments sends in a round; six rounds are seldom needed."""
    return min(max(int(BYTES / segments - BESIDE) // (6 * 8), 1), MOST_WORDS)


class Exact:
    """Compares what units cost with a limit, in whole numbers: nothing rounds."""

    def __init__(self, limit: Limit, prices: Sequence[float]) -> None:
        unit, self.prices = _whole(tuple(prices))
        self.most = math.floor((Fraction(limit.k) + Fraction(limit.over)) * unit)

    def exceeded(self, counts: Sequence[int]) -> bool:
        """Whether so many units of each price cost more."""
        return sum(n * price for n, price in zip(counts, self.prices, strict=True)) > self.most


@lru_cache(maxsize=4096)
def _whole(prices: tuple[float, ...]) -> tuple[int, list[int]]:
    """Prices as multiples of a fraction 1/unit, which is a power of two."""
    exact = [Fraction(price) for price in prices]
    unit = max(x.denominator for x in exact)
    return unit, [int(x * unit) for x in exact]


@dataclass
class Bracket:
    """Where one of many units that lie on several processes is to be found, by counting what lies above a few pivots.

    Keys are integers in the order of the values. The one looked for is the highest at which what lies at and above it
    no longer fits the room. A round sums over the processes how many units lie above each pivot, and so learns between
    which two the key is; the next round divides what is between. It ends when so few are left that they can be told
    apart.

    Units are counted by price, so that sums of costs are exact.
    """

    low: int
    high: int
    counts: list[int]  # units between, by price
    prices: list[float]
    limit: Limit
    keys: list[Tensor]  # those on this process, by price
    words: int  # the most numbers of 8 bytes to send in a round
    guess: int | None = None
    reach: int = 1
    larger: list[int] = field(default_factory=list)  # units above, by price

    def __post_init__(self) -> None:
        self.larger = self.larger or [0] * len(self.prices)
        self.room = self.limit.k + self.limit.over
        self._exact = Exact(self.limit, self.prices)
        self._start = self.low, self.high
        self._rest, self._ordered = list(self.keys), [False] * len(self.keys)
        self.key = self.low
        self.equal = list(self.counts)
        self.around: list[int | None] = []  # the next keys up and down, and both ends
        self._pivots: list[int] = []

    def cost_of(self, counts: Sequence[int]) -> float:
        """What so many units of each price cost."""
        return math.fsum(n * price for n, price in zip(counts, self.prices, strict=True))

    def exceeds(self, *counts: Sequence[int]) -> bool:
        """Whether so many units no longer fit the room."""
        return self._exact.exceeded([sum(each) for each in zip(*counts, strict=True)])

    def cheapest_equal(self) -> list[int]:
        """One unit, by price: the cheapest of those equal to the key."""
        price = next(i for i, n in enumerate(self.equal) if n)
        return [int(i == price) for i in range(len(self.prices))]

    @property
    def open(self) -> bool:
        """Whether there is more to ask."""
        return sum(self.counts) > (2 if len(self.prices) == 1 else 1) and self.low < self.high

    def sampled(self) -> Tensor:
        """A key with about the room above it among samples of those here, and 1; zeros where there are none."""
        keys = torch.cat(self.keys)
        few = keys[:: max(1, keys.numel() >> 16)].sort(descending=True).values.double()
        q = self.room / self.cost_of(self.counts)
        mine = few[min(int(q * few.numel()), few.numel() - 1)] if few.numel() else few.new_zeros(())
        return torch.stack((mine, torch.full_like(mine, few.numel() > 0)))

    def ask(self) -> Tensor:
        """How many units here lie at or above each of the next pivots, by price; several counts share a word."""
        for i, rest in enumerate(self._rest):
            limit = SORT_ALL if rest.device.type == "cpu" else SORT_ALL_ON_GPU
            if not self._ordered[i] and rest.numel() <= limit:
                self._rest[i], self._ordered[i] = rest.sort().values, True
        kinds, n = len(self.prices), sum(self.counts)
        self._bits = n.bit_length()
        self._per_word = BITS // self._bits
        most = max(self.words * self._per_word // kinds, 1)
        self._pivots = self.pivots(min(most, 4 * n + 8, MOST_PIVOTS))
        return _pack(torch.cat([self._above(i) for i in range(kinds)]), self._bits, self._per_word)

    def pivots(self, most: int) -> list[int]:
        """Keys in (low, high], going up: evenly spaced, or around a guess.

        Most of the latter stand within reach of the guess, the outer ones ever farther.
        """
        low, width, guess, reach = self.low, self.high - self.low, self.guess, self.reach
        if guess is None:
            found = {low + -(-width * i // (most + 1)) for i in range(1, most + 1)}
        else:
            outer = min(3, most // 4)
            inner = max(most - 2 * outer, 1)
            found = {guess - reach + 2 * reach * i // max(inner - 1, 1) for i in range(inner)}
            found |= {guess + side * (reach << 3 * i) for i in range(1, outer + 1) for side in (-1, 1)}
        inside = sorted(p for p in found if low < p <= self.high)
        return inside or [low + (width + 1) // 2]

    def _above(self, i: int) -> Tensor:
        rest = self._rest[i]
        at = torch.tensor([*self._pivots, self.high], dtype=rest.dtype, device=rest.device)
        if self._ordered[i]:
            return torch.searchsorted(rest, at[-1], right=True) - torch.searchsorted(rest, at[:-1])
        counts = torch.bincount(torch.bucketize(rest, at[:-1], right=True), minlength=at.numel())
        return counts.flip(0).cumsum(0).flip(0)[1:]

    def hear(self, words: Sequence[float]) -> None:
        """The sums over all processes: keep what is between the two pivots that the unit lies between."""
        pivots, kinds = self._pivots, len(self.prices)
        told = _unpack(words, self._bits, self._per_word, kinds * len(pivots))
        above = [[told[kind * len(pivots) + j] for kind in range(kinds)] for j in range(len(pivots))]
        # So many pivots are at or under it: the more lies above one, the lower it is.
        i = bisect_left(above, True, key=lambda each: not self.exceeds(self.larger, each))
        over = above[i] if i < len(pivots) else [0] * kinds
        self.counts = [n - m for n, m in zip(above[i - 1] if i else self.counts, over, strict=True)]
        self.low, self.high = pivots[i - 1] if i else self.low, pivots[i] - 1 if i < len(pivots) else self.high
        self.larger = [n + m for n, m in zip(self.larger, over, strict=True)]
        if self.guess is not None and self.open:
            # A guess that missed is made again from the border that is known, with longer steps.
            missed, self.reach = self.low == self._start[0] or self.high == self._start[1], 64 * self.reach
            known = self.low if self.high == self._start[1] else self.high
            self.guess = known if missed and self.reach < self.high - self.low else None
        for j, rest in enumerate(self._rest):
            if not self._ordered[j]:
                self._rest[j] = rest[(rest >= self.low) & (rest <= self.high)]

    def last_look(self) -> Tensor:
        """The ends, the neighbours, and the highest and the lowest key that is left, as largest numbers."""
        keys, rest = torch.cat(self.keys), torch.cat(self._rest)
        none = torch.iinfo(keys.dtype).min
        inside = (rest >= self.low) & (rest <= self.high)
        wanted = [
            ~keys,  # ~ turns the order around
            keys,
            torch.where(keys > self.high, ~keys, none),
            torch.where(keys < self.low, keys, none),
            torch.where(inside, rest, none),
            torch.where(inside, ~rest, none),
        ]
        # With one unit left the last of them is not needed.
        wanted = wanted if self._two_left else wanted[:-1]
        return torch.stack([x.max() if x.numel() else x.new_tensor(none) for x in wanted])

    @property
    def _two_left(self) -> bool:
        return sum(self.counts) == 2 and self.low < self.high

    def conclude(self, told: Sequence[int], none: int) -> None:
        """The last units are told apart."""
        ends: list[int | None] = [~told[0], told[1]]
        over, below = None if told[2] == none else ~told[2], None if told[3] == none else told[3]
        top, bottom = told[4], ~told[5] if self._two_left else told[4]
        self.key, self.equal, self.around = top, list(self.counts), [over, below, *ends]
        if top != bottom:
            self.equal = [1]
            if self.exceeds(self.larger, [1]):
                self.around = [over, bottom, *ends]
            else:
                self.key, self.larger, self.around = bottom, [self.larger[0] + 1], [top, below, *ends]


def close(brackets: Sequence[Bracket], ranks: Ranks) -> None:
    """Find the keys of all, with one reduction a round, and one for their surroundings."""
    while live := [bracket for bracket in brackets if bracket.open]:
        asked = [bracket.ask() for bracket in live]
        told = ranks.sum(torch.cat(asked)).split([len(x) for x in asked])
        for bracket, words in zip(live, told, strict=True):
            bracket.hear(words.tolist())
    if brackets:
        looks = [bracket.last_look() for bracket in brackets]
        found = ranks.largest(torch.cat(looks)).split([len(x) for x in looks])
        for bracket, numbers in zip(brackets, found, strict=True):
            bracket.conclude(numbers.tolist(), torch.iinfo(numbers.dtype).min)


def _by_price(parts: Sequence[Part], prices: Sequence[float], keys: Sequence[Tensor]) -> list[Tensor]:
    """Keys of units, one tensor a price."""
    return [torch.cat([key for part, key in zip(parts, keys, strict=True) if part.c == price]) for price in prices]


def _pack(counts: Tensor, bits: int, per_word: int) -> Tensor:
    """Several counts in each float64: counts[0] + 2^bits · counts[1] + …"""
    words = -(-counts.numel() // per_word)
    padded = torch.nn.functional.pad(counts, (0, words * per_word - counts.numel())).reshape(words, per_word)
    shifts = torch.arange(0, bits * per_word, bits, device=counts.device)
    return (padded << shifts).sum(1).double()


def _unpack(words: Sequence[float], bits: int, per_word: int, n: int) -> list[int]:
    """The sums of the counts."""
    return [int(words[i // per_word]) >> bits * (i % per_word) & ((1 << bits) - 1) for i in range(n)]


def key_of(u: Tensor) -> Tensor:
    """Integers in the order of the floats; both zeros are one."""
    whole = torch.int64 if u.dtype == torch.float64 else torch.int32
    bits = (u + 0.0).view(whole)
    return torch.where(bits < 0, bits ^ torch.iinfo(whole).max, bits)


def value_of(key: int | None, dtype: torch.dtype) -> float:
    """The float of a key; NaN where there is none."""
    if key is None:
        return math.nan
    bits = torch.tensor(key, dtype=torch.int64 if dtype == torch.float64 else torch.int32)
    return float(torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).view(dtype))
