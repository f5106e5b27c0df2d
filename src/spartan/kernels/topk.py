"""Hard and soft top-k over many tensors, decided on the device: nothing in here waits for the host.

Every pass reads the values once and does two things. It counts them into BINS bins between two keys (a float's bits,
mapped so that they sort as the floats do), which narrows the place of the exact threshold by that factor; and it sums
the soft mask and its slope at the present dual, for a Newton step on the logit of the budget fraction (`ops.soft_topk`
says why). A small program of its own then adds up the pieces' results and decides what the next pass looks at. Passes
with nothing left to do return at once. All sums have a fixed order, so two runs give the same bits.
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
from spartan.kernels.state import BINS, KEY_BITS, NARROWED, State
from spartan.kernels.tables import Addresses, Pieces
from spartan.ops.parts import slack
from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual

HARD_PASSES = 1 + -(-KEY_BITS // NARROWED.value)  # one that misses, then the whole range
SOFT_PASSES = 7  # for the soft mask, once the threshold is known or from the last dual: two or three are the rule
WIDE = 1 << 16  # up to here sums are taken in float64: it costs nothing, and reaches residuals that float32 cannot

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class TopK:
    """Solves hard and soft top-k problems over tensors of fixed sizes, one after the other.

    Args:
        sizes: entries of each tensor.
        costs: cost of an entry of each.
        factors: with `absolute`, u = factor · |x| of each.
        absolute: whether the tensors hold weights, to be ranked by magnitude, or values as they are.
        device: where they lie.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        costs: Sequence[float],
        factors: Sequence[float] | None,
        device: torch.device,
    ) -> None:
        self.absolute = factors is not None
        self.pieces = Pieces(sizes, costs, factors or [1.0] * len(sizes), device)
        self.cost = math.fsum(n * c for n, c in zip(sizes, costs, strict=True))
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
        k = min(k, self.cost)
        state.tell(k, k + slack(k, self.cost / max(1, self.pieces.total)), self.cost, beta or 0.0)
        where, soft = self.addresses.of(tensors), beta is not None
        key = ("solve", soft, cold, id(state))
        self.replay(key, lambda: self._launch(where, DTYPES[tensors[0].dtype], state, soft, cold))

    def _launch(self, where: Tensor, dtype: Any, state: State, soft: bool, cold: bool) -> None:
        p, kinds = self.pieces, {"ABS": self.absolute, "DTYPE": dtype, "BLOCK": 2048, "num_warps": 8}
        sum_type = tl.float64 if p.total <= WIDE else tl.float32
        begin[(1,)](state.floats, state.ints, SOFT=soft, COLD=cold)
        for _ in range(HARD_PASSES if not soft else HARD_PASSES + SOFT_PASSES if cold else SOFT_PASSES):
            one_pass[(p.count,)](
                where, p.table, p.factors, p.kinds, state.floats, state.ints, self.counts, self.above, self.sums,
                SOFT=soft, SUM=sum_type, **kinds,
            )  # fmt: skip
            control[(1,)](
                state.floats, state.ints, self.counts, self.above, self.sums, p.costs, p.count,
                p.prices, len(p.prices), 1e-6, SOFT=soft, ROWS=512, num_warps=8,
            )  # fmt: skip
        count_ties[(p.count,)](where, p.table, p.factors, state.floats, state.ints, self.above, **kinds)
        cut_ties[(1,)](
            where, p.table, p.factors, state.floats, state.ints, self.above, p.costs, p.count, ROWS=1024, **kinds
        )

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
