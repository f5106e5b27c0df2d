"""Hard and soft top-k over many tensors, decided on the device: nothing in here waits for the host.

Every pass reads the values once and does two things. It counts them into BINS bins between two keys (a float's bits,
mapped so that they sort as the floats do), which narrows the place of the exact threshold by that factor; and it sums
the soft mask and its slope at the present dual, for a Newton step on the logit of the budget fraction (`ops.soft_topk`
says why). One program a group then adds up the pieces' results and decides what the next pass looks at, until nothing is
left to do: one launch in all (`search`). All sums have a fixed order, so two runs give the same bits.

Where nothing is known of the threshold, some passes over a few samples of each piece tell where to look: to count everything
into the few bins that floats of one size share would take as long as forty passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spartan.kernels.replay import Replay
from spartan.kernels.search import search
from spartan.kernels.state import BINS, State, States
from spartan.kernels.tables import Addresses, Pieces
from spartan.ops.parts import slack
from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual

MOST_PASSES = 40  # two or three are the rule
SAMPLED_FROM = 1 << 18  # entries; fewer are soon counted
WIDE = 1 << 16  # up to here sums are taken in float64: it costs nothing, and reaches residuals that float32 cannot

# Entries that a program reads at a time, its warps, and how many such programs a multiprocessor holds at once.
BLOCK, WARPS, PER_PROCESSOR = 2048, 8, 2
REGISTERS = 128  # a thread, so that they fit: 65,536 in all
SHARE = 1 << 14  # entries that a program has at least: a small search is to leave room for what else runs on the GPU

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class TopK:
    """Solves hard and soft top-k problems over tensors of fixed sizes, one after the other; of many groups, all at once.

    Args:
        sizes: entries of each tensor.
        costs: cost of an entry of each.
        factors: u = factor · |x| of each, where weights are ranked by magnitude; None for values as they are.
        device: where they lie.
        owners: the group of each tensor, in order; None for a single one.
        groups: how many there are.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        costs: Sequence[float],
        factors: Sequence[float] | None,
        device: torch.device,
        owners: Sequence[int] | None = None,
        groups: int = 1,
    ) -> None:
        self.absolute = factors is not None
        owners = [0] * len(sizes) if owners is None else owners
        self.pieces = Pieces(
            sizes, costs, factors or [1.0] * len(sizes), device, owners=owners, groups=groups,
            programs=_programs(sum(sizes), device),
        )  # fmt: skip
        each = list(zip(owners, sizes, costs, strict=True))
        self.sizes = [sum(n for owner, n, _ in each if owner == g) for g in range(groups)]
        self.costs = [math.fsum(n * c for owner, n, c in each if owner == g) for g in range(groups)]
        n = max(1, self.pieces.count)
        self.counts = torch.zeros(len(self.pieces.prices), BINS.value, dtype=torch.int32, device=device)
        self.above = torch.zeros(n, dtype=torch.int32, device=device)
        self.sums = torch.zeros(n, 4, dtype=torch.float64, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int64, device=device)
        self.addresses = Addresses(device)
        self.replay = Replay(device)
        self.launch: dict[str, Any] = {"num_warps": WARPS}
        if device.type == "cuda":
            self.launch.update(launch_cooperative_grid=True, maxnreg=REGISTERS)
        self._own: State | None = None

    @torch.no_grad()
    def solve(self, tensors: Sequence[Tensor], state: State, k: float, beta: float | None, cold: bool) -> None:
        """Put the threshold, and with a finite β the dual, into the state: the same state every time."""
        state.tell(self._numbers(0, k, beta))
        where, dtype, soft = self.addresses.of(tensors), tensors[0].dtype, beta is not None
        key = ("solve", soft, cold, id(state), self.addresses.aligned)
        self.replay(key, lambda: self._launch(where, dtype, state.floats, state.ints, soft, cold, cold))

    @torch.no_grad()
    def solve_all(
        self, tensors: Sequence[Tensor | None], states: States, asked: dict[int, tuple[float, float | None]], cold: bool
    ) -> None:
        """The same for every group that has entries; all with a β, or all without. `cold`: some were never solved."""
        states.tell({g: self._numbers(g, *ask) for g, ask in asked.items()})
        where, dtype = self.addresses.of(tensors), next(t.dtype for t in tensors if t is not None)
        soft = any(beta is not None for _, beta in asked.values())

        def launch() -> None:
            states.remember()
            self._launch(where, dtype, states.floats, states.ints, soft, False, cold)

        self.replay(("solve all", soft, cold, self.addresses.aligned), launch)

    def _numbers(self, group: int, k: float, beta: float | None) -> list[float]:
        """What the host tells of a problem, in the order of the state."""
        total = self.costs[group]
        k = min(k, total)
        return [k + slack(k, total / max(1, self.sizes[group])), k, total, beta or 0.0]

    def _launch(
        self, where: Tensor, dtype: torch.dtype, floats: Tensor, ints: Tensor, soft: bool, forget: bool, cold: bool
    ) -> None:
        p, groups = self.pieces, len(self.sizes)
        sampled = cold and max(self.sizes) >= SAMPLED_FROM
        search[(len(p.shares) - 1,)](
            where, p.table, p.shares, p.groups, p.limits, p.factors, p.kinds, p.costs, p.prices, floats, ints,
            self.counts, self.above, self.sums, self.arrived, groups, MOST_PASSES, 1e-6,
            SOFT=soft, COLD=forget, SAMPLED=sampled, ABS=self.absolute, DTYPE=DTYPES[dtype],
            ALIGNED=self.addresses.aligned, SUM=tl.float64 if max(self.sizes) <= WIDE else tl.float32,
            GROUPS=triton.next_power_of_2(groups), BLOCK=BLOCK, ROWS=512, **self.launch,
        )  # fmt: skip

    def select(self, tensors: Sequence[Tensor], k: float) -> Threshold:
        """The threshold of values that have nothing to do with the last ones."""
        if self._own is None:
            self._own = State.new(tensors[0].device)
        self.solve(tensors, self._own, k, None, cold=True)
        return self._own.clone().threshold()

    def soft(self, tensors: Sequence[Tensor], k: float, beta: float) -> Dual:
        """The dual of values that have nothing to do with the last ones."""
        if self._own is None:
            self._own = State.new(tensors[0].device)
        self.solve(tensors, self._own, k, beta, cold=True)
        return self._own.clone().dual(beta)


def _programs(entries: int, device: torch.device) -> int:
    """Among how many programs the entries are divided: all must be on the device at the same time."""
    if device.type != "cuda":
        return 1  # the interpreter runs one after the other
    most = PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(most, entries // SHARE))
