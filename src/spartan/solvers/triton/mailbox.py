"""Sends a few numbers to the device at every step without a launch for it: replayed launches fetch them by themselves."""

import ctypes
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS = 256  # messages that may be under way: the host is rarely a hundred steps ahead of the device


@triton.jit
def fetch(slots, taken, to, width, columns, step, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """The next message, `width` numbers in rows of `columns`, into rows that are `step` apart; one program does it."""
    number = tl.load(taken)
    message = slots + (number % SLOTS) * width
    for first in range(0, width, BLOCK):
        i = first + tl.arange(0, BLOCK)
        there = i < width
        # From the host's memory, and never from a cache that may hold an older message.
        value = tl.load(message + i, mask=there, volatile=True)
        tl.store(to + i // columns * step + i % columns, value, mask=there)
    tl.store(taken, number + 1)


class Mailbox:
    """A ring of messages in the host's memory, and a count on the device of those that were fetched.

    A graph reads the same addresses at every replay, so what changes from step to step must come through memory; and the
    host runs ahead, so that one place for it would be overwritten before it is read.

    Args:
        rows: the tensor that messages are for, a row for each segment: its first columns are replaced.
        columns: how many.
    """

    def __init__(self, rows: Tensor, columns: int) -> None:
        self._rows, self._columns, self._width = rows, columns, len(rows) * columns
        cuda = rows.device.type == "cuda"
        self._slots = torch.zeros(SLOTS, self._width, dtype=torch.float64, pin_memory=cuda)
        self._memory = (ctypes.c_double * (SLOTS * self._width)).from_address(self._slots.data_ptr())
        self._taken = torch.zeros((), dtype=torch.int64, device=rows.device)
        self._sent = 0
        # Of both halves of the ring: when all messages there have been fetched.
        self._fetched = [torch.cuda.Event() for _ in range(2)] if cuda else []

    def send(self, numbers: Sequence[Sequence[float]]) -> None:
        """Write a message, which the next `fetch` takes."""
        half, first = divmod(self._sent % SLOTS, SLOTS // 2)
        if self._fetched and first == 0 and self._sent:
            self._fetched[1 - half].record()  # what was sent before is fetched by launches before this
            if self._sent >= SLOTS:
                self._fetched[half].synchronize()  # done long ago
        start = self._sent % SLOTS * self._width
        self._memory[start : start + self._width] = [number for row in numbers for number in row]
        self._sent += 1

    def fetch(self) -> None:
        """Launch what takes the next message."""
        fetch[(1,)](
            self._slots, self._taken, self._rows, self._width, self._columns, self._rows.stride(0),
            SLOTS=SLOTS, BLOCK=128, num_warps=4,
        )  # fmt: skip
