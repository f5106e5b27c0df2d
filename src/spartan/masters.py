"""Masters: the dense weights θ behind the sparse ones that the model holds.

θ moves in and out of a parameter by `copy_`, never by swapping storage, so that whatever else holds the parameter (a
CUDA graph, a sharding engine, an averaged model) goes on seeing the same tensor. One master may stand for several
targets laid end to end; then every operation on θ is one operation, not one per target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.targets import Target


def lay_out(targets: Sequence[Target], flat: Tensor) -> list[Tensor]:
    """A tensor over all targets as one view per target; a single target's tensor is its own view."""
    if len(targets) == 1:
        return [flat.reshape(targets[0].shape)]
    pieces = flat.split([t.numel for t in targets])
    return [piece.view(t.shape) for piece, t in zip(pieces, targets, strict=True)]


def gather(targets: Sequence[Target], tensors: Sequence[Tensor]) -> Tensor:
    """One tensor per target as one tensor over all of them, row-major; a single one stays as it is."""
    return tensors[0] if len(targets) == 1 else torch.cat([t.reshape(-1) for t in tensors])


class DenseMaster:
    """θ while masks still change: dense; the parameter itself (`alias`) where w = θ always."""

    def __init__(self, targets: Sequence[Target], alias: bool = False) -> None:
        self.targets = list(targets)
        parameters = [t.parameter.detach() for t in targets]
        if len(targets) > 1:
            self.theta = gather(targets, parameters)
        else:
            self.theta = parameters[0] if alias else parameters[0].clone(memory_format=torch.preserve_format)

    def views(self) -> list[Tensor]:
        """θ of each target."""
        return [self.theta] if len(self.targets) == 1 else lay_out(self.targets, self.theta)

    def put(self, which: Sequence[int]) -> None:
        """Write θ into the parameters of these targets."""
        views = self.views()
        torch._foreach_copy_([self.targets[j].parameter for j in which], [views[j] for j in which])

    def take(self, which: Sequence[int]) -> None:
        """Read θ from the parameters of these targets."""
        views = self.views()
        torch._foreach_copy_([views[j] for j in which], [self.targets[j].parameter.detach() for j in which])

    def snapshot(self) -> Tensor:
        """θ as it is now, to go back to."""
        return self.theta.clone()

    def restore(self, theta: Tensor) -> None:
        """Go back to a snapshot."""
        self.theta.copy_(theta)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint needs of each target."""
        return [{"theta": view} for view in self.views()]


class FrozenMaster:
    """θ and the mask once the kept set is fixed: entries of the kept units only, in row-major order."""

    def __init__(self, targets: Sequence[Target], index: Tensor, mask: Tensor, theta: Tensor) -> None:
        self.targets, self.index, self.mask, self.theta = list(targets), index, mask, theta

    @classmethod
    def of(cls, targets: Sequence[Target], theta: Tensor, keep: Tensor, mask: Tensor) -> FrozenMaster:
        """From dense θ, the kept entries and the mask, each over all the targets."""
        index = keep.reshape(-1).nonzero().flatten()
        if keep.numel() < 1 << 31:
            index = index.int()  # half the memory
        mask, theta = mask.reshape(-1)[index].to(theta.dtype), theta.reshape(-1)[index].clone()
        return cls(targets, index, mask, theta)

    def _spread(self, values: Tensor) -> Tensor:
        """The kept entries at their places, zero elsewhere, flat."""
        flat = values.new_zeros(sum(t.numel for t in self.targets))
        flat[self.index] = values
        return flat

    def put(self, which: Sequence[int]) -> None:
        """Write θ into the parameters of these targets; weights that are gone are zero."""
        views = lay_out(self.targets, self._spread(self.theta))
        torch._foreach_copy_([self.targets[j].parameter for j in which], [views[j] for j in which])

    def take(self, which: Sequence[int]) -> None:
        """Read θ from the parameters of these targets, at the kept places."""
        views = lay_out(self.targets, self._spread(self.theta))
        for j in which:
            views[j] = self.targets[j].parameter.detach()
        self.theta = gather(self.targets, views).reshape(-1)[self.index]

    def snapshot(self) -> Tensor:
        """θ as it is now, to go back to."""
        return self.theta.clone()

    def restore(self, theta: Tensor) -> None:
        """Go back to a snapshot."""
        self.theta = theta

    def weights(self) -> list[Tensor]:
        """w = θ · mask of each target."""
        return lay_out(self.targets, self._spread(self.theta * self.mask))

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """∂L/∂θ = g · mask: nothing for weights that are gone."""
        if all(g is None for g in grads):
            return list(grads)
        dense = [torch.zeros_like(t.parameter) if g is None else g for g, t in zip(grads, self.targets, strict=True)]
        found = self._spread(gather(self.targets, dense).reshape(-1)[self.index] * self.mask)
        return [None if g is None else x for g, x in zip(grads, lay_out(self.targets, found), strict=True)]

    def keep(self) -> list[Tensor]:
        """Bool per entry of each target."""
        return lay_out(self.targets, self._spread(torch.ones_like(self.mask)).bool())

    def kept(self) -> list[int]:
        """Entries kept of each target."""
        ends = torch.tensor([math.fsum(t.numel for t in self.targets[: j + 1]) for j in range(len(self.targets))])
        upto = torch.searchsorted(self.index.long(), ends.long().to(self.index.device)).tolist()
        return [b - a for a, b in zip([0, *upto], upto, strict=False)]

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint needs of each target."""
        counts, found, start = self.kept(), [], 0
        pieces = zip(self.index.split(counts), self.mask.split(counts), self.theta.split(counts), strict=True)
        for target, (index, mask, theta) in zip(self.targets, pieces, strict=True):
            found.append({"theta": theta, "mask": mask, "index": index - start})
            start += target.numel
        return found


Master = DenseMaster | FrozenMaster
