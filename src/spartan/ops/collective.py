"""Sums, largest and smallest numbers over processes, and the bytes that they take.

Nothing is ever gathered: what crosses the wire is a few sums, a few counts, a flag.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# In the order in which requests of several jobs are answered: sums while there are any, so that a job that is through
# with them waits for the others, and they share the next reduction too.
HOW = ("SUM", "MAX", "MIN")


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
        return self._reduce(x, "SUM").x

    def largest(self, x: Tensor) -> Tensor:
        """The largest over the processes, entry by entry, in place."""
        return self._reduce(x, "MAX").x

    def smallest(self, x: Tensor) -> Tensor:
        """The smallest over the processes, entry by entry, in place."""
        return self._reduce(x, "MIN").x

    def sum_told(self, x: Tensor, late: bool = False) -> list[Any]:
        """Σ over the processes of a vector, as plain numbers; a `late` one waits until no job asks for anything else."""
        return self._reduce(x, "SUM", told=True, late=late).numbers

    def largest_told(self, x: Tensor) -> list[Any]:
        """The largest over the processes of each entry of a vector, as plain numbers."""
        return self._reduce(x, "MAX", told=True).numbers

    def _reduce(self, x: Tensor, how: str, told: bool = False, late: bool = False) -> _Request:
        request = _Request(x, how, self.groups, told, late)
        self.sent += x.numel() * x.element_size() * len(self.groups)
        # A job asks for what it needs, and goes on when it is there. Autograd may call from a thread of its own.
        job: _Job | None = getattr(_thread, "job", None)
        if job is None or not self.groups:
            _answer([request])
        else:
            job.ask(request)
        return request


@dataclass(eq=False)
class _Request:
    """What one of several jobs wants to know, and what it is told."""

    x: Tensor  # reduced in place
    how: str
    groups: list[Any]
    told: bool  # as numbers, on the host
    late: bool
    numbers: list[Any] = field(default_factory=list)

    def kind(self) -> tuple[Any, ...]:
        """Requests of one kind can share a reduction."""
        return (self.late, HOW.index(self.how)), self.x.dtype, self.x.device, *(id(group) for group in self.groups)


def _answer(requests: Sequence[_Request]) -> None:
    """One reduction for requests of one kind, and one look at the device."""
    first = requests[0]
    x = first.x if len(requests) == 1 else torch.cat([r.x.reshape(-1) for r in requests])
    for group in first.groups:
        try:
            dist.all_reduce(x, getattr(dist.ReduceOp, first.how), group=group)
        except RuntimeError as error:
            raise RuntimeError(_lost(dist.get_world_size(group), error)) from error
    if len(requests) == 1:
        first.numbers = x.tolist() if first.told else []
        return
    numbers, start = x.tolist() if any(r.told for r in requests) else [], 0
    for r in requests:
        end = start + r.x.numel()
        if r.told:
            r.numbers = numbers[start:end]
        else:
            r.x.copy_(x[start:end].view_as(r.x))
        start = end


def side_by_side(jobs: Sequence[Callable[[], None]], ranks: Ranks | None) -> None:
    """Do several jobs that each ask the other processes for sums, so that one reduction answers all of them.

    Each job runs until it asks for something. When all are waiting or done, what they ask for travels together, and
    they go on. Only one runs at a time, and always in the same order: the result is that of one after the other. Every
    process must have the same jobs.

    Args:
        jobs: what to do.
        ranks: the processes that hold shards of anything; None where nothing will be asked.

    Example:
        >>> found = []
        >>> side_by_side([lambda: found.append("first"), lambda: found.append("second")], Ranks([], []))
        >>> found
        ['first', 'second']
    """
    if ranks is None or len(jobs) == 1:
        for work in jobs:
            work()
        return
    running = [_Job(work) for work in jobs]
    try:
        for job in running:
            job.go_on()
        while waiting := [job for job in running if job.request is not None]:
            kinds = [job.request.kind() for job in waiting if job.request is not None]
            first = min(kinds, key=lambda kind: kind[0])
            same = [job for job, kind in zip(waiting, kinds, strict=True) if kind == first]
            _answer([job.request for job in same if job.request is not None])
            for job in same:
                job.go_on()
    finally:
        for job in running:
            job.drop()


class _Dropped(BaseException):
    """Ends a job whose answer will not come."""


class _Job(threading.Thread):
    """A job in a thread of its own, as a coroutine: it and its caller take turns.

    A thread rather than a generator, because what asks for sums lies deep inside methods, which know nothing of it.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.request: _Request | None = None
        self.error: BaseException | None = None
        self._mine, self._callers = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._callers.acquire()
        self._dropped = False
        # What torch keeps for each thread.
        self._grad = torch.is_grad_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(self) -> None:
        """The thread."""
        _thread.job = self
        try:
            torch.set_grad_enabled(self._grad)
            if self._stream is not None:
                torch.cuda.set_stream(self._stream)
            self.work()
        except _Dropped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._callers.release()

    def go_on(self) -> None:
        """Let the job work until it asks for something or ends; its error is raised here."""
        self.request = None
        if self.ident is None:
            self.start()
        else:
            self._mine.release()
        self._callers.acquire()
        if self.error is not None:
            raise self.error

    def ask(self, request: _Request) -> None:
        """Wait for an answer; called by the job itself."""
        self.request = request
        self._callers.release()
        self._mine.acquire()
        if self._dropped:
            raise _Dropped

    def drop(self) -> None:
        """End the job, wherever it is."""
        if self.ident is not None and self.is_alive():
            self._dropped = True
            if self._mine.locked():
                self._mine.release()
            self.join()


_thread = threading.local()


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
