"""The kernels of a group whose mask is fixed: nothing is chosen any more, and only kept weights move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from spartan.kernels import kept
from spartan.kernels.tables import Addresses, Pieces
from spartan.kernels.triton_engine import FINE, Launcher

BLOCK = 2048
INDICES = {torch.int32: tl.int32, torch.int64: tl.int64}


class FrozenEngine(Launcher):
    """Launches the kernels of one group with fixed masks.

    Args:
        parameters: the model's tensors.
        slabs: for each, the place of its first entry among all those that its lists stand for.
        thetas: for each, the dense weights of the kept entries.
        masks: their mask values.
        indices: their places, in order.
        bad: two flags: the first tensor with a gradient, and with a weight, that is not finite.
        first: the number of the first tensor there.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        slabs: Sequence[int],
        thetas: Sequence[Tensor],
        masks: Sequence[Tensor],
        indices: Sequence[Tensor],
        bad: Tensor,
        first: int,
    ) -> None:
        device, sizes = parameters[0].device, [p.numel() for p in parameters]
        super().__init__(parameters, Pieces(sizes, [1.0] * len(sizes), [1.0] * len(sizes), device), bad, first)
        self.thetas, self.masks, self.indices = list(thetas), list(masks), list(indices)
        self._to_thetas, self._to_masks, self._to_indices = (Addresses(device) for _ in range(3))
        self._slabs = torch.tensor(list(slabs), dtype=torch.int64).to(device)
        spans: list[Tensor] = []
        blocks: list[int] = []  # the first block of each piece
        before = 0
        for size, slab, index in zip(sizes, slabs, indices, strict=True):
            edges = torch.arange(slab, slab + size + BLOCK, BLOCK, device=device).clamp_(max=slab + size)
            upto = torch.searchsorted(index, edges.to(index.dtype))
            spans.append(torch.stack((upto[:-1], upto[1:]), 1))
            blocks += range(before, before + len(edges) - 1, self.pieces.length // BLOCK)
            before += len(edges) - 1
        self._spans, self._blocks = torch.cat(spans), torch.tensor(blocks, dtype=torch.int64).to(device)

    def put(self) -> None:
        """θ into the parameters, which hold w: zero where not kept."""
        self._spread(weights=False)

    def write(self) -> None:
        """w = θ · m into the parameters, zero where not kept."""
        self._spread(weights=True)

    def _spread(self, weights: bool) -> None:
        to, thetas = self._to_parameters.of(self.parameters), self._to_thetas.of(self.thetas)
        tables = to, thetas, self._to_masks.of(self.masks), *self._places()
        kinds = {"WEIGHTS": weights, "DTYPE": self._dtype, "INDEX": self._index}
        self._weights(("spread", weights), lambda: self._run(kept.spread, *tables, **kinds))

    def take(self) -> None:
        """θ from the parameters, unless a gradient was not finite; entries that are not finite stay as they were."""
        of, to = self._to_parameters.of(self.parameters), self._to_thetas.of(self.thetas)
        tables = of, to, *self._places(), self.bad, self.first
        kinds = {"FINE": FINE, "DTYPE": self._dtype, "INDEX": self._index}
        self._replay("take", lambda: self._run(kept.collect, *tables, **kinds))

    def mask_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """g · m where kept, zero elsewhere, in place."""
        tables = self._to_grads.of(grads), self._to_masks.of(self.masks), *self._places()
        kinds = self._kinds(grads) | {"INDEX": self._index}
        self._replay(("gradients", kinds["GRAD"]), lambda: self._run(kept.mask_gradients, *tables, **kinds))

    def _places(self) -> tuple[Tensor, ...]:
        return self._to_indices.of(self.indices), self.pieces.table, self._slabs, self._blocks, self._spans

    @property
    def _index(self) -> Any:
        return INDICES[self.indices[0].dtype]
