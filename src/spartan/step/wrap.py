"""Wraps `optimizer.step` on the instance, as learning-rate schedulers do, and checks which optimizer trains what."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spartan.problem.targets import Target

Step = Callable[[Optimizer, Callable[..., Any], Callable[[], Any] | None], Any]


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
                f"{type(optimizer).__name__} is schedule-free: it keeps the weights it evaluates apart from those it "
                "trains, which a sparsifier does too. Use the plain optimizer with a learning-rate schedule."
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


def add_learned(optimizer: Optimizer, learned: list[nn.Parameter], options: dict[str, Any]) -> None:
    """Give an optimizer a method's own parameters."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise RuntimeError(
            "this method has learned parameters, which join the optimizer on attach(): attach before building the "
            "learning-rate scheduler, which counts the optimizer's parameter groups"
        )
    optimizer.add_param_group({"params": learned, **options})


def remove_learned(optimizer: Optimizer, learned: list[nn.Parameter]) -> None:
    """Take them back."""
    mine = {id(p) for p in learned}
    optimizer.param_groups = [g for g in optimizer.param_groups if not all(id(p) in mine for p in g["params"])]
    for parameter in learned:
        optimizer.state.pop(parameter, None)
