"""Sums, largest and smallest numbers over processes, and the bytes that they take.

Nothing is ever gathered: what crosses the wire is a few sums, a histogram, a flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The processes that hold the shards of some tensors between them.

    Args:
        groups: torch's process groups, one per dimension of the device mesh along which any of the tensors is sharded.
        counts: for each tensor, whether this process counts it: of several processes with the same shard, one does.

    Example:
        >>> alone = Ranks([], [True])
        >>> alone.sum(torch.tensor([1.0, 2.0])), alone.sent
        (tensor([1., 2.]), 0)
    """

    def __init__(self, groups: Sequence[Any], counts: Sequence[bool]) -> None:
        self.groups, self.counts = list(groups), list(counts)
        self.sent = 0  # bytes of everything reduced so far

    def sum(self, x: Tensor) -> Tensor:
        """Σ over the processes, in place; the same on all of them."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        """The largest over the processes, entry by entry, in place."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def smallest(self, x: Tensor) -> Tensor:
        """The smallest over the processes, entry by entry, in place."""
        return self._reduce(x, dist.ReduceOp.MIN)

    def _reduce(self, x: Tensor, how: Any) -> Tensor:
        for group in self.groups:
            try:
                dist.all_reduce(x, how, group=group)
            except RuntimeError as error:
                raise RuntimeError(_lost(len(self.groups) and dist.get_world_size(group), error)) from error
            self.sent += x.numel() * x.element_size()
        return x


def _lost(size: int, error: RuntimeError) -> str:
    """What a failed reduction means to a user."""
    return (
        f"the sparsifier waited for {size} processes that share its weights, and not all of them came: a worker died, "
        "fell behind by more than the time-out of torch.distributed.init_process_group(timeout=…), or left out a call "
        f"that every process must make (optimizer.step(), sparsifier.backward(), state_dict()). torch says: {error}"
    )


def first_says(numbers: Sequence[float], group: Any, device: torch.device) -> list[float]:
    """The numbers of a group's first process on all of them."""
    told = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    try:
        dist.broadcast(told, dist.get_global_rank(group, 0), group=group)
    except RuntimeError as error:
        raise RuntimeError(_lost(dist.get_world_size(group), error)) from error
    return told.tolist()


def share(number: int, device: torch.device) -> int:
    """Process 0's number on every process of the job; the number itself where there is one process only."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return number
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    elif dist.get_backend() == "gloo":
        device = torch.device("cpu")
    told = torch.tensor(number, dtype=torch.int64, device=device)
    try:
        dist.broadcast(told, 0)
    except RuntimeError as error:
        raise RuntimeError(_lost(dist.get_world_size(), error)) from error
    return int(told)
