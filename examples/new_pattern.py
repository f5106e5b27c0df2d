"""A new pattern in one file: diagonals of a square weight.

    python examples/new_pattern.py

A class with a `name` is all that recipes need: once this file is imported, `pattern: diagonal` works, and so do all methods,
budgets and costs. `sides` and `place` are for kernels and for weights in shards; without them plain torch does the work, and
a shard must not cut a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spartan import Sparsifier
from spartan.problem.patterns import Pattern, read_pattern


@dataclass(frozen=True)
class Diagonal(Pattern):
    """Whole diagonals of a square matrix, wrapped around: unit d holds the entries (i, (i + d) mod n)."""

    name = "diagonal"
    spelling = "diagonal"

    def unit_size(self, shape: Sequence[int]) -> int:
        """n; only squares have such diagonals."""
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f"{self!r} needs a square matrix, not the shape {tuple(shape)}")
        return shape[0]

    def _of(self, n: int, device: torch.device) -> Tensor:
        """The diagonal of every entry."""
        i = torch.arange(n, device=device)
        return (i[None, :] - i[:, None]) % n

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over each diagonal."""
        return x.new_zeros(len(x)).index_add(0, self._of(len(x), x.device).reshape(-1), x.reshape(-1))

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each diagonal's entry at all its places."""
        return units[self._of(shape[0], units.device)]


def main() -> None:
    """Trains a small net with it, soft masks and all, and looks at what is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.75, 30, pattern=read_pattern("diagonal")).attach(optimizer)
    for _ in range(30):
        x = torch.randn(64, 16)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()
    kept = 0
    for layer in (model[0], model[2]):
        alive = Diagonal().reduce(layer.get_parameter("weight").detach().ne(0).double())
        assert set(alive.tolist()) <= {0.0, 16.0}, "a diagonal lives or dies as a whole"
        kept += int((alive > 0).sum())
    print(f"{kept} of 32 diagonals are left")
    assert kept == 8


if __name__ == "__main__":
    main()
