"""What a solver is, and which one answers a part of the problem."""

import importlib.util
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.forms import Form

KERNELS = ("auto", "triton", "torch")
FINE = torch.iinfo(torch.int32).max  # a flag that names no target

Grads = Sequence[Tensor | None]  # one per target, where there is one
there = partial(operator.is_not, None)  # whether it is; with `map` all of it is C, for what runs in every step


@dataclass(frozen=True)
class Flags:
    """Numbers on the device that a step leaves behind, for somebody to look at when they have arrived.

    Args:
        bad: the number of the first target with a gradient, and with a weight, that is not finite, and of the first that
            somebody else has changed; FINE for none.
        residuals: a row per segment of the part: a₁/a₂, and |Σ c m − k| / k of the soft mask.
    """

    bad: Tensor
    residuals: Tensor


class Solver(ABC):
    """Answers a part of the problem: moves θ in and out of the model, writes w, turns gradients.

    `form` is what the method declares for the moment. With the mask fixed there is none.
    """

    name: ClassVar[str]  # which of the four it is
    why: str = ""  # why none of those before it
    problem: Problem

    @classmethod
    @abstractmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Why it cannot answer this part; "" if it can."""

    @abstractmethod
    def put(self, which: Sequence[int]) -> None:
        """θ into the parameters of these targets, by their number in the part."""

    @abstractmethod
    def take(self, which: Sequence[int]) -> None:
        """θ from the parameters of these targets."""

    @abstractmethod
    def write(self, form: Form | None) -> None:
        """w into the parameters of all targets."""

    @abstractmethod
    def weights(self, form: Form | None) -> list[Tensor]:
        """w of every target."""

    @abstractmethod
    def turn(self, form: Form | None, grads: Grads) -> Grads:
        """Gradients for w into gradients for θ; given tensors may be changed in place, missing ones may be made."""

    @abstractmethod
    def snapshot(self) -> Any:
        """All that a step may change, to go back to."""

    @abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Go back."""

    def hold(self) -> None:  # noqa: B027
        """From now on put, take, solve, write and checks may wait until `release`, to be started together."""

    def release(self) -> None:  # noqa: B027
        """Now they must not."""

    def check_gradients(self, grads: Grads) -> None:
        """Flag the first gradient that is not finite; with kernels, none of them is then used."""
        self._flag(0, [(i, g) for i, g in enumerate(grads) if g is not None])

    def check_weights(self, which: Sequence[int]) -> None:
        """Flag the first parameter that is not finite; kernels look while they take."""
        self._flag(1, [(i, self.problem.targets[i].local) for i in which])

    def _flag(self, kind: int, tensors: Sequence[tuple[int, Tensor]]) -> None:
        if not tensors:
            return
        bad = self.flags.bad
        norms = torch._foreach_norm([x for _, x in tensors], float("inf"))
        numbers = self._numbers[[i for i, _ in tensors]] if len(tensors) < len(self._numbers) else self._numbers
        finite = torch.isfinite(torch.stack([norm.float() for norm in norms]))
        bad[kind] = torch.minimum(bad[kind], torch.where(finite, FINE, numbers).min())

    def __init__(self, problem: Problem, flags: Flags) -> None:
        self.problem, self.flags = problem, flags
        self._numbers = torch.tensor(problem.numbers, dtype=torch.int32).to(flags.bad.device)

    def searches(self) -> bool:
        """Whether it found the masks in use by itself, or left that to plain torch."""
        return True

    def serves(self, form: Form) -> bool:
        """The same of writing what the form says."""
        return True

    def turns(self, form: Form) -> bool:
        """The same of turning gradients as the form says."""
        return True

    def path(self, form: Form | None) -> str:
        """What does the work, and why; and what of it plain torch does."""
        found = self.name + (f" ({self.why})" if self.why else "")
        if form is None:
            return found
        does = {"thresholds": self.searches(), "weights": self.serves(form), "gradients": self.turns(form)}
        mine, rest = ([verb for verb in does if does[verb] is own] for own in (True, False))
        if not rest:
            return found
        return f"{found} for {_listed(mine or ['moving weights'])}, torch for {_listed(rest)}"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def check_kernels(kernels: str) -> str:
    """The argument, or an error that says what is accepted."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown; accepted: {', '.join(map(repr, KERNELS))}")
    if kernels == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("kernels='triton': Triton is not installed; pip install triton, or use kernels='auto'")
    return kernels


def why_no_kernels(problem: Problem, kernels: str, frozen: bool = False) -> str:
    """Why Triton's kernels cannot work on these weights; "" where they can, if they have the pattern.

    With the mask fixed any order of memory will do.
    """
    device = problem.targets[0].parameter.device
    if kernels == "torch":
        return "kernels='torch'"
    if kernels == "auto" and (device.type != "cuda" or torch.version.hip is not None):
        return "no NVIDIA device" if device.type == "cuda" else f"on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    dtypes = {t.parameter.dtype for t in problem.targets}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return f"weights of {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}"
    for target in problem.targets:
        if target.dense_stride is None:
            return f"{target.name} has gaps in its memory"
        # The order that ties are cut by.
        if problem.pattern.single and not problem.by_memory and not target.local.is_contiguous() and not frozen:
            return f"{target.name} is not in row-major order"
        units = not problem.pattern.single and problem.pattern.rows is None
        if units and target.axes.matrix(target.local) is None and not frozen:
            return f"{target.name} is experts of inputs × outputs"
    for target, place in zip(problem.targets, problem.places, strict=bool(problem.places)):
        if place.window is None and not frozen:
            return f"the shard of {target.name} is in several pieces"
    return ""
