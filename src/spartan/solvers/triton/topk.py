"""Finds the hard and the soft top-k over many tensors, on the device: nothing in here waits for the host.

Every pass reads the values once and does two things. It counts them into BINS bins between two keys (a float's bits,
mapped so that they sort as the floats do), which narrows the place of the exact threshold by that factor; and it sums
the soft mask and its slope at the present dual, for a Newton step on the logit of the budget fraction (`ops.soft_topk`
says why). One program a segment then adds up the pieces' results and decides what the next pass looks at, until nothing
is left to do: one launch in all (`search`). All sums have a fixed order, so two runs give the same bits.

Where nothing is known of the threshold, some passes over a few samples of each piece tell where to look: to count
everything into the few bins that floats of one size share would take as long as forty passes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spartan.ops.newton import Dual
from spartan.ops.parts import slack
from spartan.solvers.pools import Duals, Selection
from spartan.solvers.triton.launch import DTYPES
from spartan.solvers.triton.replay import Replay
from spartan.solvers.triton.search import search
from spartan.solvers.triton.state import BINS, States
from spartan.solvers.triton.tables import Addresses, Pieces, sent
from spartan.solvers.triton.weights import keep

MOST_PASSES = 40  # two or three are the rule
SAMPLED_FROM = 1 << 18  # entries; fewer are soon counted
WIDE = 1 << 16  # up to here sums are taken in float64: it costs nothing, and reaches residuals that float32 cannot

# Entries that a program reads at a time, its warps, and how many such programs a multiprocessor holds at once.
BLOCK, WARPS, PER_PROCESSOR = 2048, 8, 2
REGISTERS = 128  # a thread, so that they fit: 65,536 in all
SHARE = 1 << 14  # entries that a program has at least: a small search is to leave room for what else runs on the GPU


class TopK:
    """Solves hard and soft top-k problems over tensors of fixed sizes, one after the other; of many segments, all at once.

    Args:
        sizes: entries of each tensor.
        costs: cost of an entry of each.
        factors: u = factor · |ψ(x)| of each, where weights are ranked by magnitude; None for values as they are.
        device: where they lie.
        owners: the segment of each tensor, in order; None for a single one.
        segments: how many there are.
        replay: what runs the launches; None for one of its own.
        name: what they are called there.
        fixed: whether values always lie in the same place, if others run the launches.
    """

    pieces: Pieces

    def __init__(
        self,
        sizes: Sequence[int],
        costs: Sequence[float],
        factors: Sequence[float] | None,
        device: torch.device,
        owners: Sequence[int] | None = None,
        segments: int = 1,
        replay: Replay | None = None,
        name: str = "solve",
        fixed: bool = True,
    ) -> None:
        self.name = name
        self.absolute = factors is not None
        owners = [0] * len(sizes) if owners is None else owners
        self.pieces = self.divided(sizes, costs, factors or [1.0] * len(sizes), device, owners, segments)
        whole = self.whole(sizes)
        self.sizes = [sum(n for owner, n in zip(owners, whole, strict=True) if owner == g) for g in range(segments)]
        self.costs, self.limits = self.pieces.totals, Limits(whole, costs, owners, self.pieces, device)
        n = max(1, self.pieces.count)
        self.counts = torch.zeros(len(self.pieces.prices), BINS.value, dtype=torch.int32, device=device)
        self.above = torch.zeros(n, dtype=torch.int32, device=device)
        self.sums = torch.zeros(n, 4, dtype=torch.float64, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int64, device=device)
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._starts_there = sent(self.starts, torch.int64, device)
        held = replay is not None
        self.addresses = Addresses(device, fixed=held and fixed, replay=None if fixed else replay)
        self.replay = replay or Replay(device)
        self.states = self.known(segments, device)
        self.cold = True  # there is no solution to start from
        self.launch: dict[str, Any] = {"num_warps": WARPS}
        if device.type == "cuda":
            self.launch.update(launch_cooperative_grid=True, maxnreg=REGISTERS)

    def whole(self, sizes: Sequence[int]) -> Sequence[int]:
        """Entries of each tensor on all processes."""
        return sizes

    def divided(
        self,
        sizes: Sequence[int],
        costs: Sequence[float],
        factors: Sequence[float],
        device: torch.device,
        owners: Sequence[int],
        segments: int,
    ) -> Pieces:
        """The pieces that passes go over: a share for each of the programs that are on the device at the same time."""
        programs = _programs(sum(sizes), device)
        return Pieces(sizes, costs, factors, device, owners=owners, segments=segments, programs=programs)

    def known(self, segments: int, device: torch.device) -> States:
        """Room for what will be known of every segment."""
        return States(segments, device)

    def solve(
        self,
        values: Sequence[Tensor] | Tensor,
        k: Sequence[float] | Tensor,
        beta: Sequence[float] | None,
        power: float = 1.0,
    ) -> None:
        """Put the thresholds, and with finite β the duals, into the states, starting from the last ones.

        Values are a tensor each, or one vector of them all; weights are ranked by ψ, that power of them.
        """
        where, dtype = self.places_of(values)
        soft, cold = beta is not None, self.cold
        self.replay.flush_if(self.name)  # it has not read its numbers yet
        told = self._tell(k, beta)

        def launch() -> None:
            if told:
                self.states.fetch()
            self._launch(where, dtype, soft, cold, power)

        self.replay((self.name, soft, cold, power, told), launch)
        self.cold = False

    def places_of(self, values: Sequence[Tensor] | Tensor) -> tuple[Tensor, torch.dtype]:
        """Where values lie, and of what kind they are."""
        if isinstance(values, Tensor):
            return self.addresses.along(values, self.starts), values.dtype
        return self.addresses.of(values), values[0].dtype

    def _tell(self, k: Sequence[float] | Tensor, beta: Sequence[float] | None) -> bool:
        """What the host, or the device, knows of the problems, in the order of the state; whether it is to be fetched."""
        sharpness = [0.0] * len(self.costs) if beta is None else list(beta)
        if isinstance(k, Tensor):
            assert beta is None, "soft masks have budgets that the host knows"
            self.states.tell_tensor(self.limits.of_tensor(k))
            return False
        return self.states.tell(self.limits.of_numbers(k, sharpness))

    def _launch(self, where: Tensor, dtype: torch.dtype, soft: bool, cold: bool, power: float) -> None:
        p, segments = self.pieces, len(self.sizes)
        sampled = cold and max(self.sizes) >= SAMPLED_FROM
        search[(len(p.shares) - 1,)](
            where, p.table, p.shares, p.segments, p.limits, p.factors, p.kinds, p.costs, p.prices,
            p.fine_costs, p.fine_prices, self.states.floats, self.states.ints, self.counts, self.above, self.sums,
            self.arrived, segments, MOST_PASSES, 1e-6,
            SOFT=soft, COLD=cold, SAMPLED=sampled, ABS=self.absolute, POWER=power, DTYPE=DTYPES[dtype],
            SUM=tl.float64 if max(self.sizes) <= WIDE else tl.float32,
            SEGMENTS=triton.next_power_of_2(segments), BLOCK=BLOCK, ROWS=512, **self.launch,
        )  # fmt: skip

    def keep(self, values: Tensor) -> Tensor:
        """What was found to be kept of a vector of all values, as bools."""
        found, p = torch.empty(values.shape, dtype=torch.bool, device=values.device), self.pieces
        tables = self._starts_there, p.table, p.segments, self.states.floats, self.states.ints
        if p.count:
            keep[(p.count,)](values, found.view(torch.int8), *tables, BLOCK=BLOCK, num_warps=WARPS)
        return found

    def go_on_from(self, chosen: Sequence[Mapping[str, float]], duals: Sequence[Dual] | None) -> None:
        """Begin where a solution that was saved had ended."""
        self.states.set(chosen, duals)
        self.cold = False

    def solve_anew(
        self, values: Sequence[Tensor] | Tensor, k: Sequence[float] | Tensor, beta: Sequence[float] | None = None
    ) -> tuple[Selection, Duals | None]:
        """The same for values that have nothing to do with the last ones; the answer stays as it is."""
        self.cold = True
        self.solve(values, k, beta)
        found = self.states.copy()
        return found.selection(), None if beta is None else found.duals(beta)


class Limits:
    """What every segment may keep, as the kernels are told: in the order of the state."""

    def __init__(
        self, sizes: Sequence[int], costs: Sequence[float], owners: Sequence[int], pieces: Pieces, device: torch.device
    ) -> None:
        self.grids, self.totals, self.split = pieces.grids, pieces.totals, pieces.fine_costs is not None
        # The cheapest unit, whether all cost the same, and what everything costs without rounding, in two parts.
        self.cheapest, self.alike, self.exact = [], [], []
        for g, grid in enumerate(self.grids):
            mine = [(n, c) for owner, n, c in zip(owners, sizes, costs, strict=True) if owner == g]
            prices = {c for _, c in mine} or {1.0}
            halves = [[n * part for part in grid.split(c)] for n, c in mine]
            self.cheapest.append(min(prices))
            self.alike.append(len(prices) == 1)
            self.exact.append((math.fsum(x for x, _ in halves), math.fsum(x for _, x in halves)))
        self._last: tuple[list[float], list[list[float]]] = [], []  # budgets do not change at every step
        each = zip(self.grids, self.totals, self.exact, self.cheapest, self.alike, strict=True)
        rows = [(grid.step, total, *x, slack(0.0, c, a), slack(1.0, 0.0, a)) for grid, total, x, c, a in each]
        self._rows = sent(rows, torch.float64, device).unbind(1)

    def of_numbers(self, k: Sequence[float], beta: Sequence[float]) -> list[list[float]]:
        """From budgets that the host knows."""
        if self._last[0] != k:
            self._last = list(k), self._rows_of(k)
        return [[coarse, k, total, b, fine] for (coarse, k, total, fine), b in zip(self._last[1], beta, strict=True)]

    def _rows_of(self, k: Sequence[float]) -> list[list[float]]:
        found = []
        each = zip(k, self.grids, self.totals, self.exact, self.cheapest, self.alike, strict=True)
        for budget, grid, total, exact, cheapest, alike in each:
            budget = min(budget, total)
            coarse = math.floor(budget / grid.step) * grid.step
            fine = (budget - coarse) + slack(budget, cheapest, alike)
            if not self.split:  # costs are whole steps
                coarse, fine = coarse + math.floor(fine / grid.step) * grid.step, 0.0
            if budget >= total or (coarse - exact[0]) + (fine - exact[1]) >= 0.0:
                coarse = math.inf
            found.append([coarse, budget, total, fine])
        return found

    def of_tensor(self, k: Tensor) -> Tensor:
        """The same from budgets that the device knows, for hard masks."""
        step, total, exact, exact_fine, of_unit, of_k = self._rows
        k = torch.minimum(k.double(), total)
        coarse = torch.floor(k / step) * step
        fine = (k - coarse) + (of_unit + of_k * k)
        if not self.split:
            coarse, fine = coarse + torch.floor(fine / step) * step, torch.zeros_like(k)
        coarse = coarse.masked_fill((k >= total) | ((coarse - exact) + (fine - exact_fine) >= 0.0), math.inf)
        return torch.stack((coarse, k, total, torch.zeros_like(k), fine), 1)


def _programs(entries: int, device: torch.device) -> int:
    """Among how many programs the entries are divided: all must be on the device at the same time."""
    if device.type != "cuda":
        return 1  # the interpreter runs one after the other
    most = PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(most, entries // SHARE))
