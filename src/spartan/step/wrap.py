"""Wraps `optimizer.step` on the instance, as learning-rate schedulers do, and checks which optimizer trains what.

Whatever else steps an optimizer that holds a target is stopped before it changes anything: torch calls `_guard` before
every optimizer's step.
"""

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spartan.distributed import local
from spartan.problem.targets import Target

Step = Callable[[Optimizer, Callable[..., Any], Callable[[], Any] | None], Any]
# True under this key in the first parameter group of an attached optimizer, so that a copy of it can be told. What the
# optimizer saves has the sparsifier's state there: torch.distributed.checkpoint loads only keys that the group has.
MARK = "spartan"


class Attachment:
    """Whose targets some parameters are, and whether an attached optimizer is in its step."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = list(targets)
        self.optimizers: list[Optimizer] = []  # those whose step is wrapped
        self.first: Any = None  # the one that trains the first target
        self.round: set[int] = set()  # by number, those that have stepped since the schedule last advanced
        self.outer: list[Any] = []  # those around them, which call that step
        self.scheduled = False  # whether a learning-rate scheduler has counted their parameter groups
        self.stepping = False
        self.released = False  # detach() was called: others may do what they like
        self.perturbed = False  # the weights are moved for a while by an optimizer that puts them back, as SAM does
        self._undo: list[Callable[[], None]] = []
        for target in targets:
            _ATTACHMENTS[id(target.parameter)] = self

    def attach(self, optimizers: Sequence[Any], step: Step) -> list[list[int]]:
        """Wrap the steps of optimizers; the targets that each of them trains."""
        each = [part for optimizer in optimizers for part in _parts(optimizer)]
        inner = [unwrapped(optimizer) for optimizer in each]
        owner = check_optimizers(inner, self.targets)
        self.optimizers, self.outer = inner, [x for x in (*optimizers, *each) if not any(x is y for y in inner)]

        def in_step(optimizer: Optimizer, update: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
            self.stepping = True
            _STEPPING.add(id(optimizer))
            try:
                return step(optimizer, update, closure)
            finally:
                self.stepping = self.perturbed = False
                _STEPPING.discard(id(optimizer))

        self.released = False
        for optimizer in inner:
            if optimizer.param_groups[0].get(MARK) is True and optimizer not in _ATTACHED:
                optimizer.__dict__.pop("step", None)  # copied with the optimizer, and bound to another sparsifier
        self._undo = [wrap_step(optimizer, in_step) for optimizer in inner]
        for optimizer in inner:
            optimizer.param_groups[0].setdefault(MARK, True)  # a state may wait there
        _ATTACHED.update([*inner, *self.outer])
        for optimizer in self.outer:
            if hasattr(optimizer, "_optimizer_original_step_method"):  # accelerate keeps the step it saw first
                optimizer.__setstate__(optimizer.__getstate__())
            if _is_sam(optimizer):
                self._undo.append(_wrap_first_step(optimizer, self))
        self.first = inner[owner[0]]
        self.scheduled = any(map(is_scheduled, [*inner, *self.outer]))
        return [[i for i, j in enumerate(owner) if j == me] for me in range(len(inner))]

    def number_of(self, optimizer: Optimizer) -> int:
        """Which of the attached optimizers this is."""
        for j, other in enumerate(self.optimizers):
            if other is optimizer:
                return j
        raise RuntimeError(
            "this optimizer is a copy of one that a sparsifier is attached to. Copy model, optimizer and sparsifier "
            "together, or attach() a sparsifier of its own to the copy."
        )

    def advances(self, me: int) -> bool:
        """Whether the schedule moves on with this optimizer's step: when all have stepped, or one steps again."""
        again = me in self.round
        self.round = {me} if again else self.round | {me}
        everyone = len(self.round) == len(self.optimizers)
        if everyone:
            self.round = set()
        return again or everyone

    def detach(self) -> None:
        """Give the optimizers their own steps back."""
        for undo in self._undo:
            undo()
        for optimizer in self.optimizers:
            optimizer.param_groups[0].pop(MARK, None)
        _ATTACHED.difference_update([*self.optimizers, *self.outer])
        self.optimizers, self.outer, self._undo, self.round, self.released = [], [], [], set(), True

    def close(self) -> None:
        """Nobody has to be attached any more."""
        for target in self.targets:
            _ATTACHMENTS.pop(id(target.parameter), None)


# Whose target a parameter is, by its id: while the attachment lives, the parameter does.
_ATTACHMENTS: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()
_ATTACHED: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose step is wrapped
_STEPPING: set[int] = set()  # by id, those in their step


def _guard(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Stop a step that would change weights behind a sparsifier's back."""
    if id(optimizer) in _STEPPING:
        return
    for group in optimizer.param_groups if _ATTACHMENTS else ():
        for parameter in group["params"]:
            mine = _ATTACHMENTS.get(id(parameter))
            if mine is None or mine.stepping or mine.released or any(optimizer is x for x in mine.outer):
                continue
            name = next(t.name for t in mine.targets if t.parameter is parameter)
            raise RuntimeError(_why_not(optimizer, mine, name))
    if optimizer.param_groups and optimizer.param_groups[0].get(MARK) is True and optimizer not in _ATTACHED:
        raise RuntimeError(
            f"this {type(optimizer).__name__} is a copy of an optimizer that a sparsifier is attached to, and would train "
            "its model dense. Copy or pickle model, optimizer and sparsifier together, or attach() a sparsifier to it."
        )


register_optimizer_step_pre_hook(_guard)


def _why_not(optimizer: Optimizer, mine: Attachment, name: str) -> str:
    """What is wrong with a step, and what to do."""
    what = f"{type(optimizer).__name__}.step() would change {name} behind the sparsifier's back"
    if not mine.optimizers:
        return f"{what}: no optimizer is attached. Call sparsifier.attach(optimizer) before training."
    if any(optimizer is other for other in mine.optimizers):
        return (
            f"{what}: something put back the step that this optimizer had before attach(), as accelerate does with a loss "
            "scaler. Attach the optimizer that accelerator.prepare() returned, not the one inside it."
        )
    return (
        f"{what}: another optimizer is attached. If this one was built anew, call sparsifier.detach() and "
        "sparsifier.attach(optimizer) with it; if both train the model, attach both."
    )


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside those that pass their step on to it: accelerate's, Lightning's, SAM's, and the like."""
    *_, innermost = _inwards(optimizer)
    return innermost


def _inwards(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those inside it that it passes its step on to."""
    while optimizer is not None:
        yield optimizer
        names = ("optimizer", "_optimizer", "base_optimizer") if _is_sam(optimizer) else ("optimizer", "_optimizer")
        optimizer = next((x for x in map(getattr(optimizer, "__dict__", {}).get, names) if _steps(x)), None)


def is_scheduled(optimizer: Any) -> bool:
    """Whether a learning-rate scheduler has been built for an optimizer, or for one inside it."""
    return any(hasattr(each.step, "_wrapped_by_lr_sched") for each in _inwards(optimizer))


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers that one passes its step on to, all of them, as torchtitan's container does; or the one itself."""
    parts = getattr(optimizer, "__dict__", {}).get("optimizers")
    return list(parts) if isinstance(parts, (list, tuple)) and parts and all(map(_steps, parts)) else [optimizer]


def _steps(thing: object) -> bool:
    return hasattr(thing, "param_groups") and callable(getattr(thing, "step", None))


def _is_sam(optimizer: object) -> bool:
    """Whether an optimizer moves the weights, has the loss taken there, and puts them back before its base steps."""
    return all(hasattr(optimizer, name) for name in ("first_step", "second_step", "base_optimizer"))


def _wrap_first_step(sam: Any, mine: Attachment) -> Callable[[], None]:
    """Let SAM move the weights, until the step of its base."""
    inner = sam.first_step

    @functools.wraps(inner)
    def first_step(*args: Any, **kwargs: Any) -> Any:
        mine.perturbed = True
        return inner(*args, **kwargs)

    sam.first_step = first_step

    def undo() -> None:
        sam.__dict__.pop("first_step", None)

    return undo


def only_creates_state(optimizer: Optimizer, agree: Callable[[int | None], int | None]) -> bool:
    """Whether a step moves no weight and only makes the optimizer's state, to be saved or loaded into.

    torch.distributed.checkpoint makes one, with learning rates and gradients of zero. A first step of a schedule that
    begins at zero has other gradients, if not on every process that holds shards: `agree` asks them all.
    """
    if optimizer.state:
        return False
    rates = [group.get("lr") for group in optimizer.param_groups]
    if any(rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu") or rate != 0 for rate in rates):
        return False
    grads = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return agree(0 if not grads or any(bool(grad.any()) for grad in grads) else None) is None


def wrap_step(optimizer: Optimizer, step: Step) -> Callable[[], None]:
    """Make `optimizer.step(closure)` call `step(optimizer, inner, closure)`; returns what undoes it."""
    had_own, inner = "step" in optimizer.__dict__, optimizer.step

    @functools.wraps(getattr(inner, "__func__", inner))
    def wrapped(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return step(self, functools.partial(inner, **kwargs) if kwargs else inner, closure)

    # A bound method: schedulers built later look for `__func__`.
    bound = types.MethodType(wrapped, optimizer)
    optimizer.step = bound  # type: ignore[method-assign]

    def undo() -> None:
        if optimizer.__dict__.get("step") is not bound:
            # A scheduler wrapped us in turn; its wrapper stays, so ours is made to pass through.
            nonlocal step
            step = lambda opt, call, closure: call() if closure is None else call(closure)  # noqa: E731
        elif had_own:
            optimizer.step = inner  # type: ignore[method-assign]
        else:
            del optimizer.__dict__["step"]

    return undo


def check_optimizers(optimizers: Sequence[Optimizer], targets: Sequence[Target]) -> list[int]:
    """Which optimizer owns each target; an error where none or two do, or where one cannot be used."""
    if not optimizers:
        raise ValueError("attach() needs the optimizer, or optimizers, that train the model")
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
            raise ValueError(f"attach() got {type(optimizer).__name__}, which is not a torch optimizer")
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"{type(optimizer).__name__} is schedule-free: its eval() and train() write other weights into the model "
                "than those it trains, outside its step, and these are not sparse. Use the plain optimizer with a "
                "learning-rate schedule; sparsifier.ema() averages weights."
            )
    owners: dict[int, list[int]] = {}
    for j, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), []).append(j)
    missing = [t.name for t in targets if id(t.parameter) not in owners]
    if missing:
        raise ValueError(
            f"no optimizer given to attach() trains {', '.join(missing[:6])}{' …' if len(missing) > 6 else ''}; pass the "
            "optimizers that hold these parameters, or exclude them (was the optimizer built before the model moved?)"
        )
    twice = [t.name for t in targets if len(owners[id(t.parameter)]) > 1]
    if twice:
        raise ValueError(f"more than one optimizer given to attach() trains {', '.join(twice[:6])}")
    return [owners[id(t.parameter)][0] for t in targets]


def add_learned(
    optimizer: Optimizer, learned: list[nn.Parameter], options: Mapping[str, Any], beside: Tensor, scheduled: bool
) -> dict[str, Any]:
    """Give an optimizer a method's own parameters, unless it has them, as a copy does; returns their parameter group.

    An option of None is that of the group which this parameter is in. Where all options are, they join that group.
    """
    for group in optimizer.param_groups:
        if any(p is learned[0] for p in group["params"]):
            return group
    if scheduled:
        raise RuntimeError(
            "this method has learned parameters, which join the optimizer on attach(): attach before building the "
            "learning-rate scheduler, which counts the optimizer's parameter groups"
        )
    group = next(group for group in optimizer.param_groups if any(p is beside for p in group["params"]))
    each = {key: group.get(key, 0.0) if value is None else value for key, value in options.items()}
    if all(_same(group.get(key), value) for key, value in {**optimizer.defaults, **each}.items()):
        group["params"].extend(learned)  # an optimizer takes its time for every group
        return group
    optimizer.add_param_group({"params": learned, **each})
    return optimizer.param_groups[-1]


def _same(one: Any, other: Any) -> bool:
    """Whether two options are equal; of tensors, which may lie on a device, whether they are one."""
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))


def remove_learned(optimizer: Optimizer, learned: list[nn.Parameter]) -> None:
    """Take them back."""
    mine = {id(p) for p in learned}
    optimizer.param_groups = [g for g in optimizer.param_groups if not all(id(p) in mine for p in g["params"])]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in mine]
    for parameter in learned:
        optimizer.state.pop(parameter, None)
