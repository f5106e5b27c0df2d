"""Keeps the dense weights θ behind the sparse ones that the model holds.

θ moves in and out of a parameter by `copy_`, never by swapping storage, so that whatever else holds the parameter (a
CUDA graph, a sharding engine, an averaged model) goes on seeing the same tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spartan.problem.targets import Target


class Theta:
    """θ of some targets.

    `views` has one tensor per target, shaped and laid out as it is. If they are to be joined, and are of one kind, they
    lie end to end in `flat`, in the order of memory, so that an operation on all of them is one.

    Args:
        targets: whose weights.
        join: whether to lay them end to end.
        alias: whether θ is the parameter itself, because w = θ always.
    """

    def __init__(self, targets: Sequence[Target], join: bool, alias: bool = False) -> None:
        self.targets = list(targets)
        here = [t.local for t in targets]
        self.flat: Tensor | None = None
        if alias:
            self.views = here
        elif join and len({(x.dtype, x.device) for x in here}) == 1:
            self.flat = torch.cat([t.flatten(x) for t, x in zip(targets, here, strict=True)])
            self.views = self.split(self.flat)
        else:
            self.views = [t.unflatten(t.flatten(x).clone()) for t, x in zip(targets, here, strict=True)]

    @property
    def slabs(self) -> list[Tensor]:
        """All of θ in as few tensors as there are."""
        return self.views if self.flat is None else [self.flat]

    def split(self, flat: Tensor) -> list[Tensor]:
        """One view per target of a tensor over all entries."""
        pieces = flat.split([t.local.numel() for t in self.targets])
        return [t.unflatten(piece) for t, piece in zip(self.targets, pieces, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor over all entries."""
        flat = [t.flatten(x) for t, x in zip(self.targets, tensors, strict=True)]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def put(self, which: Sequence[int]) -> None:
        """Write θ into the parameters of these targets."""
        copy_all([self.targets[i].local for i in which], [self.views[i] for i in which])

    def take(self, which: Sequence[int]) -> None:
        """Read θ from the parameters of these targets."""
        copy_all([self.views[i] for i in which], [self.targets[i].local for i in which])


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one launch where their memory is laid out alike.

    Where it is not, `_foreach_copy_` on CUDA copies memory as it lies (seen in torch 2.11), which scrambles weights.
    """
    if not targets:
        return
    if all(t.stride() == s.stride() for t, s in zip(targets, sources, strict=True)):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
