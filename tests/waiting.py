"""A check that nothing waits for a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever synchronizes the host with the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_step_waits(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Twenty steps after the first few, in which kernels are compiled, graphs recorded and kept places listed."""

    def steps(n: int) -> None:
        for _ in range(n):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(6)
    with no_waiting():
        steps(20)
