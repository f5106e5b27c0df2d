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

from spartan.groups import Group
from spartan.targets import Target

Grads = Sequence[Tensor | None]  # one per target, where there is one


def lay_out(targets: Sequence[Target], tensor: Tensor) -> list[Tensor]:
    """A flat tensor over all targets as one view per target; what has a single target's shape is its own view.

    Flat, targets stand in the order of their memory, so that moving θ in and out is one plain copy.
    """
    if tensor.ndim > 1:
        return [tensor]
    found, start = [], tensor.storage_offset()
    for target in targets:
        here = target.local
        found.append(tensor.as_strided(here.shape, target.dense_stride or _row_major(here.shape), start))
        start += here.numel()
    return found


def gather(targets: Sequence[Target], tensors: Sequence[Tensor]) -> Tensor:
    """One tensor per target as a flat one over all of them."""
    flat = [in_memory_order(target, tensor) for target, tensor in zip(targets, tensors, strict=True)]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def in_memory_order(target: Target, tensor: Tensor) -> Tensor:
    """A tensor of the target's shape, flat, in the order of the target's memory: a view where it lies so itself."""
    if target.dense_stride is None:
        return tensor.reshape(-1)
    here = tensor if lies_as(target, tensor) else like_parameter(target, tensor)
    return here.as_strided((here.numel(),), (1,), here.storage_offset())


def lies_as(target: Target, tensor: Tensor) -> bool:
    """Whether a tensor of the target's shape lies in memory as the target does, without gaps."""
    stride = target.dense_stride
    sides = zip(tensor.shape, tensor.stride(), stride or (), strict=stride is not None)
    return stride is not None and all(n < 2 or mine == its for n, mine, its in sides)


def like_parameter(target: Target, tensor: Tensor) -> Tensor:
    """The same tensor with its memory in the order of the parameter's."""
    here = target.local
    return torch.empty_strided(here.shape, here.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one launch where their memory is laid out alike.

    Where it is not, `_foreach_copy_` on CUDA copies memory as it lies (seen in torch 2.11), which scrambles weights.
    """
    if all(t.stride() == s.stride() for t, s in zip(targets, sources, strict=True)):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


class DenseMaster:
    """θ while masks still change: dense; the parameter itself (`alias`) where w = θ always."""

    def __init__(self, targets: Sequence[Target], alias: bool = False) -> None:
        self.targets = list(targets)
        parameters = [t.local for t in targets]
        if len(targets) > 1:
            self.theta = gather(targets, parameters)
        else:
            self.theta = parameters[0] if alias else parameters[0].clone(memory_format=torch.preserve_format)
        # θ of each target.
        self.views = [self.theta] if len(targets) == 1 else lay_out(targets, self.theta)

    def put(self, which: Sequence[int]) -> None:
        """Write θ into the parameters of these targets."""
        copy_all([self.targets[j].local for j in which], [self.views[j] for j in which])

    def take(self, which: Sequence[int]) -> None:
        """Read θ from the parameters of these targets."""
        copy_all([self.views[j] for j in which], [self.targets[j].local for j in which])

    def snapshot(self) -> Tensor:
        """θ as it is now, to go back to."""
        return self.theta.clone()

    def restore(self, theta: Tensor) -> None:
        """Go back to a snapshot."""
        self.theta.copy_(theta)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint needs of each target."""
        return [{"theta": view} for view in self.views]


class FrozenMaster:
    """θ and the mask once the kept set is fixed: entries of the kept units only, in the order of the targets' memory."""

    def __init__(self, targets: Sequence[Target], index: Tensor, mask: Tensor, theta: Tensor) -> None:
        self.targets, self.index, self.mask, self.theta = list(targets), index, mask, theta

    @classmethod
    def of(cls, targets: Sequence[Target], theta: Tensor, keep: Tensor, mask: Tensor) -> FrozenMaster:
        """From dense θ, the kept entries and the mask: flat over all the targets, or in the shape of the only one."""
        theta, keep, mask = (x if x.ndim == 1 else in_memory_order(targets[0], x) for x in (theta, keep, mask))
        index = keep.nonzero().flatten()
        if keep.numel() < 1 << 31:
            index = index.int()  # half the memory
        return cls(targets, index, mask[index].to(theta.dtype), theta[index].clone())

    def _spread(self, values: Tensor) -> list[Tensor]:
        """The kept entries at their places, zero elsewhere, as one tensor per target."""
        flat = values.new_zeros(sum(t.local.numel() for t in self.targets))
        flat[self.index] = values
        return lay_out(self.targets, flat)

    def _in_order(self, tensor: Tensor | None) -> Tensor | None:
        """A tensor of the only target as a flat view in the order of the index, where it lies so."""
        if len(self.targets) > 1 or tensor is None or not lies_as(self.targets[0], tensor):
            return None
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())

    def put(self, which: Sequence[int]) -> None:
        """Write θ into the parameters of these targets, which hold w; weights that are gone are zero."""
        flat = self._in_order(self.targets[0].local)
        if flat is not None and which:
            flat[self.index] = self.theta
            return
        views = self._spread(self.theta)
        copy_all([self.targets[j].local for j in which], [views[j] for j in which])

    def take(self, which: Sequence[int]) -> None:
        """Read θ from the parameters of these targets, at the kept places."""
        flat = self._in_order(self.targets[0].local)
        if flat is not None and which:
            torch.index_select(flat, 0, self.index, out=self.theta)
            return
        views = self._spread(self.theta)
        for j in which:
            views[j] = self.targets[j].local
        self.theta.copy_(gather(self.targets, views)[self.index])

    def snapshot(self) -> Tensor:
        """θ as it is now, to go back to."""
        return self.theta.clone()

    def restore(self, theta: Tensor) -> None:
        """Go back to a snapshot."""
        self.theta.copy_(theta)

    def weights(self) -> list[Tensor]:
        """w = θ · mask of each target."""
        return self._spread(self.theta * self.mask)

    def write(self) -> None:
        """Put w into the parameters."""
        flat = self._in_order(self.targets[0].local)
        if flat is None:
            copy_all([t.local for t in self.targets], self.weights())
        else:
            flat.zero_()
            flat[self.index] = self.theta * self.mask

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """∂L/∂θ = g · mask: nothing for weights that are gone. In place where a gradient lies in the index's order."""
        if all(g is None for g in grads):
            return list(grads)
        flat = self._in_order(grads[0])
        if flat is not None:
            kept = flat[self.index] * self.mask
            flat.zero_()
            flat[self.index] = kept
            return list(grads)
        dense = [torch.zeros_like(t.local) if g is None else g for g, t in zip(grads, self.targets, strict=True)]
        found = self._spread(gather(self.targets, dense)[self.index] * self.mask)
        return [None if g is None else x for g, x in zip(grads, found, strict=True)]

    def keep(self) -> list[Tensor]:
        """Bool per entry of each target."""
        return self._spread(torch.ones_like(self.mask, dtype=torch.bool))

    def kept(self) -> list[int]:
        """Entries kept of each target."""
        ends = torch.tensor([math.fsum(t.numel for t in self.targets[: j + 1]) for j in range(len(self.targets))])
        upto = torch.searchsorted(self.index.long(), ends.long().to(self.index.device)).tolist()
        return [b - a for a, b in zip([0, *upto], upto, strict=False)]

    def dense(self) -> dict[str, Tensor]:
        """θ, the mask and what is kept as whole tensors of the only target: what shards save."""
        (theta,), (mask,), (keep,) = self._spread(self.theta), self._spread(self.mask), self.keep()
        return {"theta": theta, "mask": mask, "keep": keep}

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint needs of each target: its kept entries in row-major order, whatever the memory's."""
        if self._listed_as_saved(self.targets):
            return [{"theta": self.theta, "mask": self.mask, "index": self.index}]
        found = []
        for theta, mask, keep in zip(self._spread(self.theta), self._spread(self.mask), self.keep(), strict=True):
            index = keep.reshape(-1).nonzero().flatten()
            found.append({"theta": theta.reshape(-1)[index], "mask": mask.reshape(-1)[index], "index": index.int()})
        return found

    @staticmethod
    def _listed_as_saved(targets: Sequence[Target]) -> bool:
        return len(targets) == 1 and (targets[0].local.is_contiguous() or targets[0].dense_stride is None)

    @classmethod
    def from_state(cls, targets: Sequence[Target], states: Sequence[dict[str, Tensor]]) -> FrozenMaster:
        """From what `state` gave, on the targets' device."""
        if cls._listed_as_saved(targets):
            return cls(targets, states[0]["index"].clone(), states[0]["mask"].clone(), states[0]["theta"].clone())
        dense: dict[str, list[Tensor]] = {"theta": [], "keep": [], "mask": []}
        for target, state in zip(targets, states, strict=True):
            values = state | {"keep": torch.ones_like(state["index"], dtype=torch.bool)}
            for key, tensors in dense.items():
                flat = values[key].new_zeros(target.numel)
                flat[state["index"]] = values[key]
                tensors.append(flat.reshape(target.shape))
        return cls.of(targets, *(gather(targets, tensors) for tensors in dense.values()))


Master = DenseMaster | FrozenMaster


def as_one(group: Group, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """One tensor per target as methods see them: as they are, or as one, in which a missing one counts as zero."""
    if not group.fused:
        return tensors
    dense = [torch.zeros_like(t.local) if x is None else x for x, t in zip(tensors, group.targets, strict=True)]
    return [gather(group.targets, dense).view(group.shapes[0])]


def flat(group: Group, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What methods see, flat where that is in the order of memory; else as it is."""
    return [t.reshape(-1) for t in tensors] if group.fused else list(tensors)
