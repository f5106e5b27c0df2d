"""Hard and soft top-k over many tensors, decided on the device: nothing in here waits for the host.

Every pass reads the values once and does two things. It counts them into BINS bins between two keys (a float's bits,
mapped so that they sort as the floats do), which narrows the place of the exact threshold by that factor; and it sums
the soft mask and its slope at the present dual, for a Newton step on the logit of the budget fraction (`ops.soft_topk`
says why). A small program a group then adds up the pieces' results and decides what the next pass looks at. Passes with
nothing left to do return at once. All sums have a fixed order, so two runs give the same bits.

Where nothing is known of the threshold, some passes over a few samples of each piece tell where to look: to count everything
into the few bins that floats of one size share would take as long as forty passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from spartan.kernels.decide import begin, control
from spartan.kernels.passes import count_ties, cut_ties, one_pass
from spartan.kernels.replay import Replay
from spartan.kernels.state import BINS, KEY_BITS, NARROWED, State, States
from spartan.kernels.tables import Addresses, Pieces
from spartan.ops.parts import slack
from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual

SAMPLE_PASSES = -(-KEY_BITS // NARROWED.value)
HARD_PASSES = 1 + SAMPLE_PASSES  # one that misses, then the whole range
SOFT_PASSES = 7  # for the soft mask, once the threshold is known or from the last dual: two or three are the rule
SAMPLED_FROM = 1 << 18  # entries; fewer are soon counted
WIDE = 1 << 16  # up to here sums are taken in float64: it costs nothing, and reaches residuals that float32 cannot

# Entries that a program reads at a time, and its warps.
BLOCK, WARPS = 2048, 8

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
        self.pieces = Pieces(sizes, costs, factors or [1.0] * len(sizes), device, owners=owners, groups=groups)
        each = list(zip(owners, sizes, costs, strict=True))
        self.sizes = [sum(n for owner, n, _ in each if owner == g) for g in range(groups)]
        self.costs = [math.fsum(n * c for owner, n, c in each if owner == g) for g in range(groups)]
        n = max(1, self.pieces.count)
        self.counts = torch.zeros(len(self.pieces.prices), BINS.value, dtype=torch.int32, device=device)
        self.above = torch.zeros(n, dtype=torch.int32, device=device)
        self.sums = torch.zeros(n, 4, dtype=torch.float64, device=device)
        self.addresses = Addresses(device)
        self.replay = Replay(device)
        self._own: State | None = None

    @torch.no_grad()
    def solve(self, tensors: Sequence[Tensor], state: State, k: float, beta: float | None, cold: bool) -> None:
        """Put the threshold, and with a finite β the dual, into the state: the same state every time."""
        state.tell(self._numbers(0, k, beta))
        where, dtype, soft = self.addresses.of(tensors), tensors[0].dtype, beta is not None
        key = ("solve", soft, cold, id(state))
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

        self.replay(("solve all", soft, cold), launch)

    def _numbers(self, group: int, k: float, beta: float | None) -> list[float]:
        """What the host tells of a problem, in the order of the state."""
        total = self.costs[group]
        k = min(k, total)
        return [k + slack(k, total / max(1, self.sizes[group])), k, total, beta or 0.0]

    def _launch(
        self, where: Tensor, dtype: torch.dtype, floats: Tensor, ints: Tensor, soft: bool, forget: bool, cold: bool
    ) -> None:
        p, groups = self.pieces, (len(self.sizes),)
        kinds = {"ABS": self.absolute, "DTYPE": DTYPES[dtype], "BLOCK": BLOCK, "num_warps": WARPS}
        sum_type = tl.float64 if max(self.sizes) <= WIDE else tl.float32
        sampled = cold and max(self.sizes) >= SAMPLED_FROM
        begin[groups](floats, ints, p.limits, SOFT=soft, COLD=forget, SAMPLED=sampled)
        passes = HARD_PASSES if not soft else HARD_PASSES + SOFT_PASSES if cold else SOFT_PASSES
        for _ in range(passes + SAMPLE_PASSES if sampled else passes):
            one_pass[(p.count,)](
                where, p.table, p.groups, p.factors, p.kinds, floats, ints, self.counts, self.above, self.sums,
                SOFT=soft, SUM=sum_type, **kinds,
            )  # fmt: skip
            control[groups](
                floats, ints, p.limits, self.counts, self.above, self.sums, p.costs, p.prices, 1e-6,
                SOFT=soft, ROWS=512, num_warps=8,
            )  # fmt: skip
        count_ties[(p.count,)](where, p.table, p.groups, p.factors, floats, ints, self.above, **kinds)
        cut_ties[groups](
            where, p.table, p.limits, p.factors, floats, ints, self.above, p.costs, ROWS=1024, **kinds
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
