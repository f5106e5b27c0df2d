"""Finds the hard and the soft top-k over tensors that lie in shards: passes as in `topk`, and sums over processes.

How many passes it takes is known on the device only. A few, or as many as the last search took, are launched one after
the other; then the host looks, and goes on while something is left to do.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from spartan.ops.newton import Dual
from spartan.problem.problem import Problem
from spartan.solvers.pools import Selection
from spartan.solvers.triton import rounds
from spartan.solvers.triton.launch import DTYPES
from spartan.solvers.triton.state import BINS, COST, CUT, HARD_DONE, PASSES, SOFT_DONE, TIES, VALUE, WHOLE_CUT, States
from spartan.solvers.triton.tables import Pieces
from spartan.solvers.triton.topk import BLOCK, MOST_PASSES, SAMPLED_FROM, WARPS, WIDE, TopK
from spartan.solvers.triton.weights import keep

FEW_PASSES = 3  # that are launched without a look, though the last search took more
# Numbers that are sent in a pass: so many that one price has all bins, and at least so many bins for each.
SENT, FEWEST = BINS.value, 1 << 5


class ShardedStates(States):
    """What is known of every segment, the same on all processes; only CUT is a number of this one's."""

    @cached_property
    def _selection(self) -> Selection:
        return Selection(self.floats[:, VALUE.value], self.ints[:, WHOLE_CUT.value], self.floats[:, COST.value])

    def set(self, chosen: Sequence[Mapping[str, float]], duals: Sequence[Dual] | None) -> None:
        """Go on from a solution that was saved, whose cuts are among all units."""
        super().set(chosen, duals)
        self.ints[:, WHOLE_CUT.value] = self.ints[:, CUT.value]


class Shards:
    """Where the units of all targets that lie here stand among those of the whole weights, for kernels."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        rows = []
        for place, first in zip(problem.places, problem.first_position, strict=True):
            assert place.window is not None, "`why_no_kernels` lets none be scattered"
            rows.append((first, place.whole[1], *place.window))
        self.grids = torch.tensor(rows, dtype=torch.int64).to(device)
        self._owners = torch.tensor(problem.segment_of, dtype=torch.int32).to(device)

    def cut(self, cuts: Tensor, out: Tensor) -> None:
        """How many units of each segment that lie here stand before its cut."""
        steps = cuts.stride(0), out, out.stride(0)
        rounds.cut_here[(len(cuts),)](cuts, *steps, self._owners, self.grids, len(self.grids), ROWS=64, num_warps=4)


class ShardedTopK(TopK):
    """Solves top-k problems over tensors of which every process has a part.

    Args:
        problem: whose units they are, how many there are in all, and who counts them.
        shards: where those that are here stand.
        arguments, settings: those of `TopK`.
    """

    states: ShardedStates

    def __init__(self, problem: Problem, shards: Shards, *arguments: Any, **settings: Any) -> None:
        self.problem, self.shards = problem, shards
        super().__init__(*arguments, **settings)
        sizes, device = arguments[0], self.counts.device
        kinds, segments = len(self.pieces.prices), len(self.sizes)
        self.bins = max(FEWEST, min(BINS.value, 1 << max(SENT // max(1, kinds), 1).bit_length() - 1))
        # What goes around: a row of numbers for every price, and the sums of every segment's mask; and all ends.
        self._sent = torch.zeros(kinds * (self.bins + 1) + 2 * segments, dtype=torch.float64, device=device)
        self._told, self._moments = self._sent.split([kinds * (self.bins + 1), 2 * segments])
        self._ends = torch.zeros(segments, 2, dtype=torch.float64, device=device)
        self._expected: dict[tuple[bool, bool], int] = {}
        one = [1.0] * len(sizes)
        self._every = Pieces(sizes, one, one, device, owners=problem.segment_of, segments=segments)

    def whole(self, sizes: Sequence[int]) -> Sequence[int]:
        """Units of each target on all processes."""
        return self.problem.all_units

    def divided(
        self,
        sizes: Sequence[int],
        costs: Sequence[float],
        factors: Sequence[float],
        device: torch.device,
        owners: Sequence[int],
        segments: int,
    ) -> Pieces:
        """The pieces of what is counted here; every one has a program of its own."""
        mine = [n if counted else 0 for n, counted in zip(sizes, self.problem.ranks.counts, strict=True)]
        return Pieces(mine, costs, factors, device, owners=owners, segments=segments, whole=self.problem.all_units)

    def known(self, segments: int, device: torch.device) -> States:
        """Room for what will be known of every segment."""
        return ShardedStates(segments, device)

    def solve(
        self,
        values: Sequence[Tensor] | Tensor,
        k: Sequence[float] | Tensor,
        beta: Sequence[float] | None,
        power: float = 1.0,
    ) -> None:
        """Put the thresholds, and with finite β the duals, into the states; all processes must ask."""
        where, dtype = self.places_of(values)
        self.replay.flush()  # others wait for what is asked now: nothing can be put off
        if self._tell(k, beta):
            self.states.fetch()
        kinds = {"ABS": self.absolute, "POWER": power, "DTYPE": DTYPES[dtype]}
        soft, cold = beta is not None, self.cold
        search = Search(self, where, soft, cold, kinds)
        self.replay.run(("begin", *search.key), search.begin)
        expected, passes = self._expected.get((soft, cold), 1), 0
        while True:
            self._add_up(soft)
            self.replay.run(("next", *search.key), search.following)
            passes += 1
            if passes < expected:
                continue
            found = self.states.ints[:, [HARD_DONE.value, SOFT_DONE.value, TIES.value, PASSES.value]].tolist()
            if all(hard and done for hard, done, _, _ in found) or passes >= MOST_PASSES:
                break
        self._expected[soft, cold] = min(max(row[3] for row in found), FEW_PASSES)
        if any(row[2] for row in found):
            self._cut(search)
        self.cold = False

    def _add_up(self, soft: bool) -> None:
        """What every process told, on all of them."""
        ranks = self.problem.ranks
        ranks.sum(self._sent if soft else self._told)
        if soft:
            ranks.largest(self._ends)

    def _cut(self, search: "Search") -> None:
        """Where only some of the units equal to a threshold fit, the position of the first that does not."""
        bits = self.bins.bit_length() - 1
        times = max(1, -(-(max(self.sizes) - 1).bit_length() // bits))
        self.replay.run(("cut", *search.key), lambda: search.begin_cut((times - 1) * bits))
        for _ in range(times - 1):
            self._add_up(False)
            self.replay.run(("cut on", *search.key), search.following_cut)
        self._add_up(False)
        self.replay.run(("cut here", *search.key), search.end_cut)

    def cut_here(self) -> None:
        """Tell kernels which units equal to the threshold are kept here."""
        ints = self.states.ints
        self.shards.cut(ints[:, WHOLE_CUT.value], ints[:, CUT.value])

    def go_on_from(self, chosen: Sequence[Mapping[str, float]], duals: Sequence[Dual] | None) -> None:
        """Begin where a solution that was saved, by any number of processes, had ended."""
        super().go_on_from(chosen, duals)
        self.cut_here()

    def keep(self, values: Tensor) -> Tensor:
        """What was found to be kept of a vector of all values that are here, as bools; also of those not counted here."""
        found, p = torch.empty(values.shape, dtype=torch.bool, device=values.device), self._every
        tables = self._starts_there, p.table, p.segments, self.states.floats, self.states.ints
        if p.count:
            keep[(p.count,)](values, found.view(torch.int8), *tables, BLOCK=BLOCK, num_warps=WARPS)
        return found

    def count(self, mask: Tensor) -> Tensor:
        """How many units of each target that are here a mask has."""
        p, found = self._every, torch.empty(self._every.count, dtype=torch.int64, device=mask.device)
        if p.count:
            tables = self._starts_there, p.table, found
            rounds.count_marked[(p.count,)](mask.view(torch.int8), *tables, BLOCK=BLOCK, num_warps=WARPS)
        return torch.zeros(len(self.starts), dtype=torch.int64, device=mask.device).index_add_(0, p.table[:, 0], found)


class Search:
    """The launches of one search, between the sums over processes.

    Args:
        topk: whose.
        where: where the values lie.
        soft: whether there is a soft mask.
        cold: whether there is no solution to start from.
        kinds: what kernels are told of the values.
    """

    def __init__(self, topk: ShardedTopK, where: Tensor, soft: bool, cold: bool, kinds: dict[str, Any]) -> None:
        self.topk, self.where, self.soft, self.cold, self.kinds = topk, where, soft, cold, kinds
        self.key = topk.name, soft, cold, kinds["POWER"]
        p = topk.pieces
        self._tables = where, p.table, p.segments, p.factors, p.kinds
        self._states = topk.states.floats, topk.states.ints
        self._segments = (len(topk.sizes),)

    def begin(self) -> None:
        """The first pass."""
        topk, sampled = self.topk, self.cold and max(self.topk.sizes) >= SAMPLED_FROM
        settings = {"SOFT": self.soft, "COLD": self.cold, "SAMPLED": sampled, "N": topk.bins}
        rounds.begin[self._segments](*self._states, **settings, num_warps=1)
        self._read()

    def following(self) -> None:
        """Decide by what the last pass found, and pass once more; where nothing is left to do, nothing is read."""
        topk, p = self.topk, self.topk.pieces
        told = p.limits, p.prices, p.fine_prices, topk._told, topk._moments, topk._ends
        rounds.decide_all[self._segments](*self._states, *told, 1e-6, SOFT=self.soft, N=topk.bins, num_warps=WARPS)
        self._read()

    def _read(self) -> None:
        topk, p = self.topk, self.topk.pieces
        wide = tl.float64 if max(topk.sizes) <= WIDE else tl.float32
        rounds.read[(p.count,)](
            *self._tables, *self._states, topk.counts, topk.above, topk.sums,
            SOFT=self.soft, SUM=wide, BLOCK=BLOCK, **self.kinds, num_warps=WARPS,
        )  # fmt: skip
        self._say(self.soft)

    def _say(self, soft: bool) -> None:
        topk, p = self.topk, self.topk.pieces
        found = topk.counts, topk.above, topk.sums, p.costs, topk._told, topk._moments, topk._ends
        rounds.tell[self._segments](p.limits, p.kinds, *found, SOFT=soft, ROWS=512, N=topk.bins, num_warps=WARPS)

    def begin_cut(self, shift: int) -> None:
        """Count units equal to the thresholds by their positions."""
        rounds.begin_cut[self._segments](self._states[1], shift, num_warps=1)
        self._read_ties(True)

    def following_cut(self) -> None:
        """Count those of the positions that are left."""
        self._narrow_cut()
        self._read_ties(False)

    def end_cut(self) -> None:
        """The last positions are told apart."""
        self._narrow_cut()
        self.topk.cut_here()

    def _narrow_cut(self) -> None:
        topk, p = self.topk, self.topk.pieces
        tables = p.limits, p.prices, p.fine_prices, topk._told
        bits = topk.bins.bit_length() - 1
        rounds.narrow_cut[self._segments](*self._states, *tables, BITS=bits, N=topk.bins, num_warps=WARPS)

    def _read_ties(self, first: bool) -> None:
        topk, p = self.topk, self.topk.pieces
        rounds.read_ties[(p.count,)](
            *self._tables, *self._states, topk.counts, topk.above, topk.shards.grids,
            FIRST=first, N=topk.bins, BLOCK=BLOCK, **self.kinds, num_warps=WARPS,
        )  # fmt: skip
        self._say(False)
