"""Knows which gradients are for w and which for θ, and has them turned at the end of every backward.

Whoever clips or logs gradients should see those for θ. So the first one that a backward accumulates queues a call for the
end of that backward, which turns all that are fresh. (There it queues itself once more, to come after DDP's and FSDP2's
own calls.) The map is linear: what a further backward would add to a gradient for θ is accumulated apart, turned by
itself, and added. Where the end of a backward is not the end of the gradient's making, it stays one for w, and the
optimizer's step has it turned: see `left_for_the_step`.

Gradients written by hand are told by their identity and version.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from spartan.distributed import fsdp_modules, replicas, version
from spartan.problem.targets import Target


@dataclass
class _Record:
    grad: TensorWeakRef  # the turned gradient
    version: int  # its version when turned, or when the optimizer was done with it
    stepped: bool = False  # an optimizer has used it
    decayed: bool = False  # what the method adds whatever the loss is in it


class GradientState:
    """Keeps one record per target from the turning of its gradient to its next accumulation.

    Args:
        targets: whose gradients.
        turn: turns all fresh gradients, at the end of a backward; it calls `turn_fresh`.
        model: the model, possibly wrapped.
    """

    def __init__(self, targets: Sequence[Target], turn: Callable[[], None], model: nn.Module) -> None:
        for target in targets:
            if target.sparse_gradient:
                raise ValueError(
                    f"{target.name} belongs to an embedding with sparse=True, whose gradient is a sparse tensor; the one "
                    "for its dense weights is not. Build the layer with sparse=False, or exclude it."
                )
        self._targets, self._turn = list(targets), weakref.WeakMethod(turn)
        self._records: list[_Record | None] = [None] * len(targets)
        self._aside: list[Tensor | None] = [None] * len(targets)  # gradients for θ, while others are accumulated
        self._seen: dict[int, Tensor] = {}  # gradients for w, where a method looks at them
        self._task = -1  # the backward at whose end a call is queued
        self._raw = False  # whether what the last backward accumulated was left as it is
        self.paused = False  # whether gradients are none of ours for a while
        self.unused = 0  # gradients that were cleared, one after the other, without a step
        self._ddp, self._sharded = replicas(model), bool(fsdp_modules(model))
        me = weakref.ref(self)  # a parameter's hook must not keep a discarded state alive

        def before(i: int) -> None:
            state = me()
            if state is not None:
                state._before(i)

        def after(i: int) -> None:
            state = me()
            if state is not None:
                state._after(i)

        def forward(module: nn.Module, inputs: Any) -> None:
            state = me()
            if state is not None and torch.is_grad_enabled():
                state.set_aside()

        self._handles: list[RemovableHandle] = []
        for i, target in enumerate(self._targets):
            self._handles.append(target.parameter.register_hook(lambda grad, i=i: before(i)))
            self._handles.append(target.parameter.register_post_accumulate_grad_hook(lambda p, i=i: after(i)))
        if self._sharded:  # FSDP2 gives no notice before it accumulates
            self._handles.append(model.register_forward_pre_hook(forward))

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
        self.unused = 0
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

    def summed(self, numbers: Sequence[int], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients for w of these targets, from all backwards since the last step."""
        for n, grad in zip(numbers, grads, strict=True):
            before = self._seen.get(n) if self._aside[n] is not None else None
            if grad is not None:
                self._seen[n] = grad.clone() if before is None else before + grad
            elif before is None:
                self._seen.pop(n, None)
        return [self._seen.get(n) for n in numbers]

    @torch.no_grad()
    def turn_fresh(self, turn: Callable[[list[bool]], None]) -> None:
        """Have the fresh gradients turned, and add them to those of earlier backwards."""
        fresh = [self.fresh(i) for i in range(len(self._targets))]
        if any(fresh):
            self.set_aside(fresh)  # also where this backward did not reach: through the budget it adds something there
            turn(fresh)
            for i in range(len(fresh)):
                self.turned(i)
        for i, (target, before) in enumerate(zip(self._targets, self._aside, strict=True)):
            if before is not None:
                grad, self._aside[i] = target.parameter.grad, None
                if grad is None:
                    target.parameter.grad = before
                else:
                    grad.add_(before)
                self.turned(i)

    def set_aside(self, fresh: Sequence[bool] | None = None) -> None:
        """Put gradients for θ where nothing is added to them, until fresh ones are turned."""
        for i in range(len(self._targets)):
            if not (self.fresh(i) if fresh is None else fresh[i]):
                self._put_aside(i)

    def _put_aside(self, i: int) -> None:
        parameter, record = self._targets[i].parameter, self._records[i]
        grad = parameter.grad
        if grad is not None and record is not None:
            mine = grad.clone() if grad._is_view() else grad  # a view of DDP's bucket is written to again
            before = self._aside[i]
            self._aside[i] = mine if before is None else before + mine
            parameter.grad, self._records[i] = None, None

    def _before(self, i: int) -> None:
        """Before a gradient is accumulated, or taken by `torch.autograd.grad`, which accumulates nothing."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
        if not self.fresh(i):
            self._put_aside(i)

    def _begin(self, task: int) -> None:
        """The first gradient of a backward is there."""
        reentrant = _inside_checkpoint()
        if not self._raw and self._task != -1 and not reentrant:
            self._aside = [None] * len(self._targets)  # the last backward failed, and never came to its end
        grad, record = self._targets[0].parameter.grad, self._records[0]
        cleared = record is not None and not record.stepped and (grad is None or record.grad() is not grad)
        self.unused = self.unused + 1 if cleared else self.unused
        self._task, self._raw = task, False
        me, engine = weakref.ref(self), torch.autograd.Variable._execution_engine

        def end() -> None:
            state = me()
            if state is not None:
                state._end(reentrant)

        engine.queue_callback(lambda: engine.queue_callback(end))

    def _after(self, i: int) -> None:
        """A gradient was accumulated."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # FSDP2's, which come without notice
            self._begin(task)
        self._records[i] = None

    def _end(self, reentrant: bool) -> None:
        self._task = -1
        self._raw = reentrant or self.left_for_the_step()
        turn = self._turn()
        if not self._raw and turn is not None and not self.paused:
            turn()

    def left_for_the_step(self) -> bool:
        """Whether gradients stay those for w until the step: where the end of a backward is not the end of their making.

        So it is under DDP's `no_sync`, with several processes whose gradients somebody else adds up, in compiled autograd,
        and where gradients are to be differentiated again.
        """
        if self._ddp is not None:
            if not self._ddp.require_backward_grad_sync:
                return True
        elif not self._sharded and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return True
        compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
            return True
        return any(t.parameter.grad is not None and t.parameter.grad.requires_grad for t in self._targets)


def _inside_checkpoint() -> bool:
    """Whether this is a backward within another, of `torch.utils.checkpoint` with `use_reentrant=True`."""
    from torch.utils.checkpoint import CheckpointFunction

    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.backward.__code__:
        frame = frame.f_back
    return frame is not None
