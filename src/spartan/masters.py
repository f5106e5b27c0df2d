"""Masters: the dense weights θ behind the sparse ones that the model holds.

θ moves in and out of a parameter by `copy_`, never by swapping storage, so that whatever else holds the parameter (a
CUDA graph, a sharding engine, an averaged model) goes on seeing the same tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spartan.targets import Target


class DenseMaster:
    """θ while masks still change: one dense tensor; the parameter itself (`alias`) where w = θ always."""

    def __init__(self, target: Target, alias: bool = False) -> None:
        self.target = target
        theta = target.parameter.detach()
        self.theta = theta if alias else theta.clone(memory_format=torch.preserve_format)

    def put(self) -> None:
        """Write θ into the parameter."""
        self.target.parameter.copy_(self.theta)

    def take(self) -> None:
        """Read θ from the parameter."""
        self.theta.copy_(self.target.parameter)

    def snapshot(self) -> Tensor:
        """θ as it is now, to go back to."""
        return self.theta.clone()

    def restore(self, theta: Tensor) -> None:
        """Go back to a snapshot."""
        self.theta.copy_(theta)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"theta": self.theta}


class FrozenMaster:
    """θ and the mask once the kept set is fixed: entries of the kept units only, in row-major order."""

    def __init__(self, target: Target, index: Tensor, mask: Tensor, theta: Tensor) -> None:
        self.target, self.index, self.mask, self.theta = target, index, mask, theta

    @classmethod
    def of(cls, target: Target, theta: Tensor, keep: Tensor, mask: Tensor) -> FrozenMaster:
        """From dense θ, the kept entries and the mask, each in the shape of the weight."""
        index = keep.reshape(-1).nonzero().flatten()
        if target.numel < 1 << 31:
            index = index.int()  # half the memory
        mask, theta = mask.reshape(-1)[index].to(theta.dtype), theta.reshape(-1)[index].clone()
        return cls(target, index, mask, theta)

    def _spread(self, values: Tensor) -> Tensor:
        """The kept entries at their places, zero elsewhere."""
        flat = values.new_zeros(self.target.numel)
        flat[self.index] = values
        return flat.reshape(self.target.shape)

    def put(self) -> None:
        """Write θ into the parameter; weights that are gone are zero."""
        self.target.parameter.copy_(self._spread(self.theta))

    def take(self) -> None:
        """Read θ from the parameter at the kept places."""
        self.theta = self.target.parameter.detach().reshape(-1)[self.index]

    def snapshot(self) -> Tensor:
        """θ as it is now, to go back to."""
        return self.theta.clone()

    def restore(self, theta: Tensor) -> None:
        """Go back to a snapshot."""
        self.theta = theta

    def weight(self) -> Tensor:
        """w = θ · mask."""
        return self._spread(self.theta * self.mask)

    def gradient(self, g: Tensor) -> Tensor:
        """∂L/∂θ = g · mask: nothing for weights that are gone."""
        return self._spread(g.reshape(-1)[self.index] * self.mask)

    def keep(self) -> Tensor:
        """Bool per entry."""
        return self._spread(torch.ones_like(self.mask)).bool()

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"theta": self.theta, "mask": self.mask, "index": self.index}


Master = DenseMaster | FrozenMaster
