"""Moves a model to another device a block at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from spartan.prune.blocks import Blocks
from spartan.wording import first_line


class Mover:
    """Has the blocks of a model, and all else of it, on the device while they are needed there.

    Args:
        model: the model, on one device if it is to be moved.
        device: where to run it; None leaves it where it is.
    """

    def __init__(self, model: nn.Module, device: str | torch.device | None) -> None:
        self._model = model
        here = {p.device for p in model.parameters()}
        self.home = next(model.parameters()).device
        self.device = self.home if device is None else _with_its_number(device)
        if device is not None and len(here) > 1:
            places = ", ".join(sorted(map(str, here)))
            raise ValueError(f"device={str(device)!r}: the model lies on several devices ({places}); leave device out")
        self.moves = self.device != self.home

    @contextmanager
    def rest(self, blocks: Blocks) -> Iterator[None]:
        """Inside, everything but the blocks is on the device."""
        inside = {id(module) for block in blocks.values() for module in block.modules()}
        others = [module for module in self._model.modules() if id(module) not in inside]
        with self._moved(others):
            yield

    @contextmanager
    def block(self, block: nn.Module) -> Iterator[None]:
        """Inside, the block is on the device."""
        with self._moved(list(block.modules())):
            yield

    @contextmanager
    def _moved(self, modules: list[nn.Module]) -> Iterator[None]:
        if not self.moves:
            yield
            return
        try:
            self._move(modules, self.device)
            yield
        finally:
            try:
                self._move(modules, self.home)
            except BaseException:  # Ctrl-C in the middle of it
                self._move(modules, self.home)
                raise

    def _move(self, modules: list[nn.Module], device: torch.device) -> None:
        for module in modules:
            module._apply(lambda x: x.to(device), recurse=False)


def _with_its_number(device: str | torch.device) -> torch.device:
    """A device that is there, as tensors name it: cuda:0 for cuda."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={str(device)!r} cannot be used: {first_line(error)}") from None
