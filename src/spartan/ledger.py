"""The ledger: which gradients are for w (fresh from backward) and which are already for θ.

A transformed gradient must not be transformed again, and nothing may be accumulated onto it. A tensor hook sees every
accumulation; gradients written by hand are told by their identity and version.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from spartan.targets import Target


@dataclass
class _Record:
    grad: Tensor  # the transformed gradient
    version: int  # its version when transformed, or when the optimizer was done with it
    stepped: bool = False  # an optimizer has used it


class Ledger:
    """Keeps one record per target from its transformation to its next accumulation."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = list(targets)
        self._records: list[_Record | None] = [None] * len(targets)
        me = weakref.ref(self)  # a parameter's hook must not keep a discarded ledger alive

        def hook(i: int, grad: Tensor) -> None:
            ledger = me()
            if ledger is not None:
                ledger._accumulating(i)

        self._handles: list[RemovableHandle] = []
        for i, target in enumerate(self._targets):
            self._handles.append(target.parameter.register_hook(lambda grad, i=i: hook(i, grad)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def fresh(self, i: int) -> bool:
        """Whether the gradient of target i is there and still one for w."""
        grad, record = self._targets[i].parameter.grad, self._records[i]
        if grad is None:
            return False
        if record is None or record.grad is not grad:
            return True
        # Changed in place since the step: written anew. Changed before the step: clipped or unscaled.
        return record.stepped and grad._version != record.version

    def transformed(self, i: int) -> None:
        """Target i's gradient is now one for θ."""
        grad = self._targets[i].parameter.grad
        self._records[i] = None if grad is None else _Record(grad, grad._version)

    def stepped(self, i: int) -> None:
        """An optimizer has used target i's gradient."""
        record = self._records[i]
        if record is not None:
            record.stepped, record.version = True, record.grad._version

    def _accumulating(self, i: int) -> None:
        grad, record = self._targets[i].parameter.grad, self._records[i]
        if record is None:
            return
        if record.grad is grad:
            touched = grad._version != record.version
            # After a step a touched gradient has been zeroed in place; before it, it may only have been clipped.
            zeroed = touched and (record.stepped or not grad.any())
            if not zeroed:
                name = self._targets[i].name
                raise RuntimeError(
                    f"backward() would add to the gradient of {name}, which sparsifier.backward() or an optimizer step "
                    "has already turned into the gradient for the dense weights. Call optimizer.zero_grad() before the "
                    "next batch; to accumulate, call sparsifier.backward() once, after the last micro-batch."
                )
        self._records[i] = None
