"""Knows which gradients are for w and which for θ, and has them turned at the end of every backward.

Whoever clips or logs gradients should see those for θ. So the first one that a backward accumulates queues a call for the
end of that backward, which turns all that are fresh. (With DDP or FSDP2 it queues itself once more there, to come after
their own calls.) The map is linear: what a further backward would add to a gradient for θ is accumulated apart, turned by
itself, and added. Where the end of a backward is not the end of the gradient's making, it stays one for w, and the
optimizer's step has it turned: see `left_for_the_step`.

Gradients written by hand are told by their identity and version.
"""

import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from spartan.distributed import fsdp_modules, is_dtensor, local, replicas, version
from spartan.problem.targets import Target
from spartan.solvers.base import there
from spartan.solvers.theta import copy_all

Turn = Callable[[list[bool], list[Tensor | None]], None]  # told which gradients are fresh, and all of them
# What a gradient is: one for w, or none; one for θ; one for θ that an optimizer has used.
RAW, TURNED, USED = 0, 1, 2
grad_of = operator.attrgetter("grad")  # with `map` it is C: this runs in every backward
_version_of = operator.attrgetter("_version")
_NOTHING: AbstractContextManager[Any] = nullcontext()


class GradientState:
    """Keeps what the gradient of every target is, from its accumulation to the next.

    Hooks run for every target in every backward, so they hardly do anything.

    Args:
        targets: whose gradients.
        turn: turns all fresh gradients, at the end of a backward; it calls `turn_fresh`. It is told whether to look at the
            model closely, since no step, which does so, has come after the last backward.
        model: the model, possibly wrapped.
    """

    def __init__(self, targets: Sequence[Target], turn: Callable[[bool], None], model: nn.Module) -> None:
        for target in targets:
            if target.sparse_gradient:
                raise ValueError(
                    f"{target.name} belongs to an embedding with sparse=True, whose gradient is a sparse tensor; the one "
                    "for its dense weights is not. Build the layer with sparse=False, or exclude it."
                )
        n = len(targets)
        self._parameters, self._turn = [t.parameter for t in targets], weakref.WeakMethod(turn)
        self._kind = [RAW] * n  # this list stays: hooks hold it
        self._lacks_decay = [False] * n  # what the method adds whatever the loss is not in it yet
        self._used: list[weakref.ref[Tensor] | None] = [None] * n  # what an optimizer has used, and the versions
        self._used_versions = [0] * n
        self._first: weakref.ref[Tensor] | None = None  # the first target's gradient when last turned
        self._aside: dict[int, Tensor] = {}  # gradients for θ, by target, while others are accumulated
        self._seen: dict[int, Tensor] = {}  # gradients for w, where a method looks at them
        self._task = [-1]  # the backward at whose end a call is queued; this list stays too
        self._stepped = True  # whether a step has come since the last backward
        self.raw = False  # whether what the last backward accumulated was left as it is
        self._differentiable = False  # whether gradients since the last step are to be differentiated again
        self.paused = False  # whether gradients are none of ours for a while
        self.unused = 0  # gradients that were cleared, one after the other, without a step
        self._model, self._sharded = model, bool(fsdp_modules(model))
        self._whole = not any(map(is_dtensor, self._parameters))
        self._handles: list[RemovableHandle] = []
        self._accumulators: list[Node] = []  # what accumulates each gradient; a hook lives as long as they do
        me = weakref.ref(self)  # a hook must not keep a discarded state alive
        for i, parameter in enumerate(self._parameters):
            hook = _hook(me, self._kind, self._task, i)
            if self._sharded:
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            else:
                self._accumulators.append(get_gradient_edge(parameter).node)
                self._handles.append(self._accumulators[-1].register_prehook(hook))
        if self._sharded:  # FSDP2 gives no notice before it accumulates

            def forward(module: nn.Module, inputs: Any) -> None:
                state = me()
                if state is not None and torch.is_grad_enabled():
                    state.set_aside()

            self._handles.append(model.register_forward_pre_hook(forward))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._accumulators = []

    def fresh(self, i: int) -> bool:
        """Whether the gradient of target i is there and still one for w."""
        grad = self._parameters[i].grad
        if grad is None or self._kind[i] != USED:
            return grad is not None and self._kind[i] == RAW
        # Changed since the step: written anew. Changed before the step: clipped or unscaled, perhaps out of place.
        return _referred(self._used[i]) is not grad or version(grad) != self._used_versions[i]

    def turned(self, i: int) -> None:
        """Target i's gradient is now one for θ."""
        self._kind[i] = RAW if self._parameters[i].grad is None else TURNED
        self._lacks_decay[i] = True

    def undecayed(self, i: int) -> bool:
        """Whether target i's gradient, one for θ, still lacks what the method adds whatever the loss; asked once."""
        lacks, self._lacks_decay[i] = self._kind[i] == TURNED and self._lacks_decay[i], False
        return lacks

    def stepped(self, which: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """An optimizer has used the gradients of these targets; those of all targets, before it did, are given."""
        self.unused, self._differentiable, self._stepped = 0, False, True
        kind, used, versions, whole = self._kind, self._used, self._used_versions, self._whole
        if whole and len(which) == len(kind) == kind.count(TURNED) and all(map(there, grads)):  # the rule
            kind[:], used[:] = [USED] * len(kind), map(weakref.ref, grads)  # type: ignore[arg-type]
            versions[:] = map(_version_of, grads)
            return
        for i in which:
            if kind[i] != RAW:
                grad = grads[i]
                if grad is None:
                    kind[i], used[i] = RAW, None
                else:
                    kind[i], used[i] = USED, weakref.ref(grad)
                    versions[i] = grad._version if whole else version(grad)

    def summed(self, numbers: Sequence[int], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients for w of these targets, from all backwards since the last step."""
        given = [(n, grad) for n, grad in zip(numbers, grads, strict=True) if grad is not None]
        adding = {n for n in numbers if n in self._aside and n in self._seen}
        # Into the memory of the last ones: a few launches, and new memory takes a CPU as long as the copy does.
        rooms = [self._seen[n] if n in self._seen and n not in adding else torch.empty_like(g) for n, g in given]
        copy_all(rooms, [grad for _, grad in given])
        for (n, _), copy in zip(given, rooms, strict=True):
            self._seen[n] = self._seen[n] + copy if n in adding else copy
        for n, grad in zip(numbers, grads, strict=True):
            if grad is None and n not in adding:
                self._seen.pop(n, None)
        return [self._seen.get(n) for n in numbers]

    @property
    def adding(self) -> bool:
        """Whether the fresh gradients will be added to others of the same step."""
        return bool(self._aside)

    def listed(self) -> list[Tensor | None]:
        """The gradient of every target."""
        return list(map(grad_of, self._parameters))

    def turn_fresh(self, turn: Turn) -> bool:
        """Have the fresh gradients turned, and add them to those of earlier backwards; whether there were any."""
        if self._aside or self._kind.count(TURNED) < len(self._kind):  # not so after any backward
            with without_grad():
                return self._turn_fresh(turn)
        return False

    def _turn_fresh(self, turn: Turn) -> bool:
        grads = self.listed()
        fresh = [self.fresh(i) for i in range(len(grads))] if any(self._kind) else list(map(there, grads))
        if any(fresh):
            all_of_them = all(fresh)
            if not all_of_them:  # also where this backward did not reach: through the budget it adds something there
                self.set_aside(fresh)
            turn(fresh, grads)
            if all_of_them:  # what was there still is
                self._kind[:] = [TURNED] * len(fresh)
            else:
                self._kind[:] = [RAW if p.grad is None else TURNED for p in self._parameters]
            self._lacks_decay = [True] * len(fresh)
            first = self._parameters[0].grad
            self._first = None if first is None else weakref.ref(first)
        while self._aside:
            i, before = self._aside.popitem()
            parameter = self._parameters[i]
            if parameter.grad is None:
                parameter.grad = before
            else:
                parameter.grad.add_(before)
            self.turned(i)
        return any(fresh)

    def set_aside(self, fresh: Sequence[bool] | None = None) -> None:
        """Put gradients for θ where nothing is added to them, until fresh ones are turned."""
        for i in range(len(self._kind)):
            if not (self.fresh(i) if fresh is None else fresh[i]):
                self._put_aside(i)

    def _put_aside(self, i: int) -> None:
        grad = self._parameters[i].grad
        if grad is not None and self._kind[i] != RAW:
            mine = grad.clone() if grad._is_view() else grad  # a view of DDP's bucket is written to again
            before = self._aside.get(i)
            self._aside[i] = mine if before is None else before + mine
            self._parameters[i].grad, self._kind[i] = None, RAW

    def _begin(self, task: int) -> None:
        """The first gradient of a backward is there."""
        reentrant = _inside_checkpoint()
        if not self.raw and self._task[0] != -1 and not reentrant:
            self._aside = {}  # the last backward failed, and never came to its end
        grad, turned = self._parameters[0].grad, self._kind[0] == TURNED and self._first is not None
        cleared = turned and (grad is None or _referred(self._first) is not grad)
        self.unused = self.unused + 1 if cleared else self.unused
        self._task[0], self.raw = task, False
        if not any(map(there, map(grad_of, self._parameters))):
            self._kind[:] = [RAW] * len(self._kind)
        self._differentiable = self._differentiable or torch.is_grad_enabled()  # backward(create_graph=True)
        me, queue = weakref.ref(self), torch.autograd.Variable._execution_engine.queue_callback
        ddp = replicas(self._model)

        def end() -> None:
            state = me()
            if state is not None:
                state._end(reentrant, ddp)

        queue(end if ddp is None and not self._sharded else lambda: queue(end))

    def _end(self, reentrant: bool, ddp: DistributedDataParallel | None) -> None:
        self._task[0] = -1
        self.raw = reentrant or self._left_for_the_step(ddp)
        turn, check = self._turn(), not self._stepped
        self._stepped = False
        if not self.raw and turn is not None and not self.paused:
            turn(check)

    def left_for_the_step(self) -> bool:
        """Whether gradients stay those for w until the step: where the end of a backward is not the end of their making.

        So it is under DDP's `no_sync`, with several processes whose gradients somebody else adds up, in compiled autograd,
        and where gradients are to be differentiated again.
        """
        return self._left_for_the_step(replicas(self._model))  # asked anew: accelerate and others wrap a model later

    def _left_for_the_step(self, ddp: DistributedDataParallel | None) -> bool:
        if ddp is not None:
            if not ddp.require_backward_grad_sync:
                return True
        elif not self._sharded and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return True
        compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
            return True
        return self._differentiable


def _referred(reference: "weakref.ref[Tensor] | None") -> Tensor | None:
    """The tensor of a weak reference, where it still lives; `TensorWeakRef` does the same, and is slow to make."""
    found = None if reference is None else reference()
    if found is not None:
        found._fix_weakref()  # type: ignore[attr-defined]
    return found


def without_grad() -> AbstractContextManager[Any]:
    """Nothing where gradients are off already, as they mostly are in a step: to turn them off takes several calls."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def of_part(grads: Sequence[Tensor | None], numbers: Sequence[int], whole: bool) -> Sequence[Tensor | None]:
    """What this process holds of the gradients of a part's targets; all of it, where none is in shards."""
    mine = grads if len(numbers) == len(grads) else [grads[n] for n in numbers]  # the only part has them in order
    return mine if whole else [None if grad is None else local(grad) for grad in mine]


def _hook(me: "weakref.ref[GradientState]", kind: list[int], now: list[int], i: int) -> Callable[[Any], None]:
    """What is done when target i's gradient is accumulated: before it is, but after it where FSDP2 does that."""
    task_of = torch._C._current_graph_task_id

    def accumulates(_: Any) -> None:
        task = task_of()
        if task != now[0] or kind[i] != RAW:
            state = me()
            if state is not None:
                if task != now[0]:
                    state._begin(task)
                if kind[i] != RAW:
                    if not state._sharded and not state.fresh(i):
                        state._put_aside(i)
                    kind[i] = RAW

    return accumulates


def _inside_checkpoint() -> bool:
    """Whether this is a backward within another, of `torch.utils.checkpoint` with `use_reentrant=True`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.backward.__code__:
        frame = frame.f_back
    return frame is not None
