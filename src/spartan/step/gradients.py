"""Knows which gradients are for w (fresh from backward) and which are already for θ.

A turned gradient must not be turned again, and nothing may be accumulated onto it. One hook looks before every
accumulation, another acts after it (the first also runs for `torch.autograd.grad`, which accumulates nothing);
gradients written by hand are told by their identity and version.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from spartan.distributed import is_dtensor, local, version
from spartan.problem.targets import Target


@dataclass
class _Record:
    grad: TensorWeakRef  # the turned gradient
    version: int  # its version when turned, or when the optimizer was done with it
    stepped: bool = False  # an optimizer has used it
    decayed: bool = False  # what the method adds whatever the loss is in it


class GradientState:
    """Keeps one record per target from the turning of its gradient to its next accumulation."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = list(targets)
        self._records: list[_Record | None] = [None] * len(targets)
        self._spoilt = [False] * len(targets)
        me = weakref.ref(self)  # a parameter's hook must not keep a discarded state alive

        def before(i: int, grad: Tensor) -> None:
            state = me()
            if state is not None:
                state._spoilt[i] = state._would_spoil(i)

        def after(i: int, parameter: Tensor) -> None:
            state = me()
            if state is not None:
                state._accumulated(i)

        self._handles: list[RemovableHandle] = []
        for i, target in enumerate(self._targets):
            self._handles.append(target.parameter.register_hook(lambda grad, i=i: before(i, grad)))
            self._handles.append(target.parameter.register_post_accumulate_grad_hook(lambda p, i=i: after(i, p)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def fresh(self, i: int) -> bool:
        """Whether the gradient of target i is there and still one for w."""
        grad, record = self._targets[i].parameter.grad, self._records[i]
        if grad is None or record is None:
            return grad is not None
        # Changed since the step: written anew. Changed before the step: clipped or unscaled, perhaps out of place.
        return record.stepped and (record.grad() is not grad or version(grad) != record.version)

    def turned(self, i: int) -> None:
        """Target i's gradient is now one for θ."""
        grad = self._targets[i].parameter.grad
        self._records[i] = None if grad is None else _Record(TensorWeakRef(grad), version(grad))

    def undecayed(self, i: int) -> bool:
        """Whether target i's gradient, one for θ, still lacks what the method adds whatever the loss; asked once."""
        record = self._records[i]
        if record is None or record.decayed:
            return False
        record.decayed = True
        return True

    def stepped(self, i: int) -> None:
        """An optimizer has used target i's gradient."""
        record = self._records[i]
        if record is None:
            return
        grad = self._targets[i].parameter.grad
        if grad is None or record.grad() is not grad:
            self.turned(i)
            record = self._records[i]
        else:
            record.version = version(grad)
        if record is not None:
            record.stepped = record.decayed = True

    def _would_spoil(self, i: int) -> bool:
        """Whether adding to the gradient of target i mixes one for θ with one for w; zeros may be added to."""
        grad = self._targets[i].parameter.grad
        if grad is None or self._records[i] is None or self.fresh(i):
            return False
        return bool(local(grad).any())

    def _spoilt_unseen(self, i: int) -> bool:
        """Whether FSDP2, which gives no notice before, has just added to a gradient for θ, as its version tells."""
        grad, record = self._targets[i].parameter.grad, self._records[i]
        if record is None or grad is None or not is_dtensor(grad) or record.grad() is not grad:
            return False
        return version(grad) == record.version + 1

    def _accumulated(self, i: int) -> None:
        if self._spoilt[i] or self._spoilt_unseen(i):
            name = self._targets[i].name
            raise RuntimeError(
                f"backward() would add to the gradient of {name}, which sparsifier.backward() or an optimizer step "
                "has already turned into the gradient for the dense weights. Call optimizer.zero_grad() before the "
                "next batch; to accumulate, call sparsifier.backward() once, after the last micro-batch."
            )
        self._records[i] = None
