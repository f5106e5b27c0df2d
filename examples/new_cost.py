"""A new cost in one file: bytes that a layer's weights take, where layers are stored in different precisions.

    python examples/new_cost.py

A class with a `name` is all that recipes need: once this file is imported, `cost: bytes` works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from spartan import Sparsifier
from spartan.problem.costs import Cost, cost_by_name
from spartan.problem.targets import Target


@dataclass(frozen=True)
class Bytes(Cost):
    """Every parameter costs the bytes it is stored in: 1 in layers that will be quantized, 4 elsewhere."""

    name = "bytes"

    def per_parameter(self, model: nn.Module, targets: Sequence[Target]) -> list[float]:
        """By the layer's own mark."""
        return [1.0 if getattr(target.owner, "quantized", False) else 4.0 for target in targets]


def main() -> None:
    """Trains a small net to a tenth of its bytes: weights compete by magnitude, dear ones use up more of the budget."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model[0].quantized = True  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sparsifier = Sparsifier(model, 0.9, 100, cost=cost_by_name("bytes")()).attach(optimizer)
    for _ in range(100):
        x = torch.randn(64, 32)
        nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()
    held = [int(layer.get_parameter("weight").count_nonzero()) for layer in (model[0], model[2])]
    bytes_left = 1 * held[0] + 4 * held[1]
    print(f"{bytes_left} of {32 * 64 + 4 * 64 * 8} bytes are left, in {held} weights")
    assert bytes_left == sparsifier.stats.cost
    assert 409.6 - 4 < bytes_left <= 409.6


if __name__ == "__main__":
    main()
