"""The kernels of groups whose masks are fixed: nothing is chosen any more, and only kept weights move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
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
    """Launches the kernels of fixed masks; None stands for a tensor that is left alone.

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
        parameters: Sequence[Tensor | None],
        slabs: Sequence[int | None],
        thetas: Sequence[Tensor | None],
        masks: Sequence[Tensor | None],
        indices: Sequence[Tensor | None],
        bad: Tensor,
        first: int,
    ) -> None:
        sizes = [0 if p is None else p.numel() for p in parameters]
        super().__init__(parameters, Pieces(sizes, [1.0] * len(sizes), [1.0] * len(sizes), bad.device), bad, first)
        self.slabs, self.thetas, self.masks, self.indices = list(slabs), list(thetas), list(masks), list(indices)
        self._to_thetas, self._to_masks, self._to_indices = (Addresses(bad.device) for _ in range(3))

    @cached_property
    def _spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """The slab of each tensor, the first block of each piece, and what is kept of each block."""
        device, spans = self.bad.device, []
        blocks: list[int] = []
        before = 0
        for parameter, slab, index in zip(self.parameters, self.slabs, self.indices, strict=True):
            if parameter is None or slab is None or index is None:
                continue
            end = slab + parameter.numel()
            edges = torch.arange(slab, end + BLOCK, BLOCK, device=device).clamp_(max=end)
            upto = torch.searchsorted(index, edges.to(index.dtype))
            spans.append(torch.stack((upto[:-1], upto[1:]), 1))
            blocks += range(before, before + len(edges) - 1, self.pieces.length // BLOCK)
            before += len(edges) - 1
        slabs = torch.tensor([slab or 0 for slab in self.slabs], dtype=torch.int64).to(device)
        return slabs, torch.tensor(blocks, dtype=torch.int64).to(device), torch.cat(spans)

    def put(self) -> None:
        """θ into the parameters, which hold w: zero where not kept."""
        self._do(FrozenEngine._spread, self.parameters, False)

    def write(self) -> None:
        """w = θ · m into the parameters, zero where not kept."""
        self._do(FrozenEngine._spread, self.parameters, True)

    def take(self) -> None:
        """θ from the parameters, unless a gradient was not finite; entries that are not finite stay as they were."""
        self._do(FrozenEngine._collect, self.parameters)

    def mask_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """g · m where kept, zero elsewhere, in place."""
        self._do(FrozenEngine._mask_gradients, grads)

    def _spread(self, parameters: Sequence[Tensor | None], weights: bool) -> None:
        to, thetas = self._to_parameters.of(parameters), self._to_thetas.of(self.thetas)
        tables = to, thetas, self._to_masks.of(self.masks), *self._places()
        kinds = {"WEIGHTS": weights, "DTYPE": self._dtype, "INDEX": self._index}
        self._weights(("spread", weights), lambda: self._run(kept.spread, *tables, **kinds), parameters)

    def _collect(self, parameters: Sequence[Tensor | None]) -> None:
        of, to = self._to_parameters.of(parameters), self._to_thetas.of(self.thetas)
        tables = of, to, *self._places(), self.bad, self.first
        kinds = {"FINE": FINE, "DTYPE": self._dtype, "INDEX": self._index}
        self._replay("take", lambda: self._run(kept.collect, *tables, **kinds))

    def _mask_gradients(self, grads: Sequence[Tensor | None]) -> None:
        tables = self._to_grads.of(grads), self._to_masks.of(self.masks), *self._places()
        kinds = self._kinds(grads) | {"INDEX": self._index}
        self._replay(("gradients", kinds["GRAD"]), lambda: self._run(kept.mask_gradients, *tables, **kinds))

    def _places(self) -> tuple[Tensor, ...]:
        slabs, blocks, spans = self._spans
        return self._to_indices.of(self.indices), self.pieces.table, slabs, blocks, spans

    @property
    def index_dtype(self) -> torch.dtype:
        """Of the places."""
        return next(index.dtype for index in self.indices if index is not None)

    @property
    def _index(self) -> Any:
        return INDICES[self.index_dtype]
