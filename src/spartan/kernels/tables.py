"""Many tensors in one launch: tables of addresses and of the pieces that programs work on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A program's share. Small enough to fill a GPU with a few million weights, large enough that the pieces' own sums,
# which one program adds up, stay few.
SMALLEST, MOST = 1 << 12, 1 << 11


class Pieces:
    """Tensors of given sizes cut into pieces of at most `length` entries, a multiple of `smallest`, in order of position.

    `table` has a row per piece: its tensor, where in that tensor it starts, how long it is, and its position among all
    entries. `costs` and `factors` repeat what is given per tensor; `kinds` tells which of the different `prices` it has.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        costs: Sequence[float],
        factors: Sequence[float],
        device: torch.device,
        smallest: int = SMALLEST,
    ) -> None:
        self.total = sum(sizes)
        length = smallest
        while length * MOST < self.total:
            length *= 2
        rows, position = [], 0
        for tensor, size in enumerate(sizes):
            rows += [(tensor, start, min(length, size - start), position + start) for start in range(0, size, length)]
            position += size
        self.count, self.length = len(rows), length
        self.table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(device)
        which = [row[0] for row in rows]
        self.costs = torch.tensor([costs[i] for i in which], dtype=torch.float64).to(device)
        prices = sorted(set(costs))
        self.prices = torch.tensor(prices, dtype=torch.float64).to(device)
        self.kinds = torch.tensor([prices.index(costs[i]) for i in which], dtype=torch.int32).to(device)
        self.factors = torch.tensor([factors[i] for i in which], dtype=torch.float32).to(device)


class Addresses:
    """Where the tensors of a list lie, as a table on the device; sent again only when they moved."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: list[int] = []
        # It stays where it is: graphs replay its address.
        self._table = torch.empty(0, dtype=torch.int64, device=device)

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The table; 0 stands for a tensor that is not there."""
        now = [0 if t is None else t.data_ptr() for t in tensors]
        if now != self._last:
            table = torch.tensor(now, dtype=torch.int64)
            if self.device.type == "cuda":
                table = table.pin_memory()  # from there the copy is queued, and the host goes on
            if len(self._last) != len(now):
                self._table = torch.empty_like(table, device=self.device)
            self._table.copy_(table, non_blocking=True)
            self._last = now
        return self._table
