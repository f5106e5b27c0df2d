"""Numbers that change over training: a start, an end and a shape; and the phases of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from spartan.scalars import as_plain

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "cosine": lambda x: 0.5 - 0.5 * math.cos(math.pi * x),
    "cubic": lambda x: 1.0 - (1.0 - x) ** 3,
    "constant": lambda x: 1.0,
}


@dataclass(frozen=True)
class Schedule:
    """A value that runs from `start` to `end` as progress goes from 0 to 1, and stays there."""

    start: float
    end: float
    shape: str = "linear"

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.end)):
            if math.isnan(value):
                raise ValueError(f"a schedule's {name} is NaN; a number is needed")
        if self.start != self.end and math.isinf(self.start) + math.isinf(self.end):
            raise ValueError(f"a schedule cannot run from {self.start} to {self.end}; only constant(inf) is infinite")

    def at(self, progress: float) -> float:
        """The value at a progress between 0 and 1."""
        if self.start == self.end:
            return self.end
        x = _SHAPES[self.shape](min(max(progress, 0.0), 1.0))
        return (1.0 - x) * self.start + x * self.end

    def scaled(self, factor: float) -> "Schedule":
        """The same schedule with its end multiplied; a constant is all end."""
        end = self.end * factor
        return replace(self, start=end if self.shape == "constant" else self.start, end=end)

    def __repr__(self) -> str:
        return f"constant({self.end:g})" if self.shape == "constant" else f"{self.shape}({self.start:g}, {self.end:g})"


@dataclass(frozen=True)
class Delayed(Schedule):
    """A schedule that begins only after a fraction `wait` of the time."""

    wait: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.wait < 1:
            raise ValueError(f"a schedule's wait={self.wait!r} is not a fraction of the time; it must lie in [0, 1)")

    def at(self, progress: float) -> float:
        """The value at a progress between 0 and 1."""
        return super().at((progress - self.wait) / (1.0 - self.wait))

    def __repr__(self) -> str:
        return f"{super().__repr__()} after {self.wait:g}"


def _schedule(start: float, end: float, shape: str) -> Schedule:
    return Schedule(float(as_plain(start)), float(as_plain(end)), shape)


def linear(start: float, end: float) -> Schedule:
    """From start to end at an even pace."""
    return _schedule(start, end, "linear")


def cosine(start: float, end: float) -> Schedule:
    """From start to end, slow at both ends: ½ − ½·cos(πx)."""
    return _schedule(start, end, "cosine")


def cubic(start: float, end: float) -> Schedule:
    """From start to end, fast at first: 1 − (1 − x)³, the pruning schedule of Zhu & Gupta (2018)."""
    return _schedule(start, end, "cubic")


def delayed(schedule: Schedule, wait: float) -> Schedule:
    """The same schedule, begun only after a fraction of the time: until then it is at its start."""
    return Delayed(schedule.start, schedule.end, schedule.shape, wait=float(as_plain(wait)))


def constant(value: float) -> Schedule:
    """The same value throughout."""
    return _schedule(value, value, "constant")


def as_schedule(value: Schedule | float) -> Schedule:
    """A number is a constant schedule."""
    return value if isinstance(value, Schedule) else constant(value)


Phase = Literal["warmup", "intermediate", "finetune"]


@dataclass(frozen=True)
class Moment:
    """Where a run stands: `step` optimizer steps taken of `total_steps`.

    Sparsity grows until `warmup_steps`; the mask is fixed from `freeze_step` on.
    """

    step: int
    total_steps: int
    warmup_steps: int
    freeze_step: int
    seed: int = 0

    @property
    def phase(self) -> Phase:
        """The phase the next step belongs to."""
        if self.step >= self.freeze_step:
            return "finetune"
        return "warmup" if self.step < self.warmup_steps else "intermediate"

    @property
    def warmed(self) -> float:
        """Progress through the warm-up, 0 to 1."""
        return min(1.0, self.step / self.warmup_steps) if self.warmup_steps else 1.0

    @property
    def progress(self) -> float:
        """Progress to the freeze, 0 to 1: what β follows."""
        return min(1.0, self.step / self.freeze_step) if self.freeze_step else 1.0

    @property
    def due(self) -> bool:
        """Whether it is time for what is not done at every step: a hundred times in a run."""
        return self.step % max(1, self.total_steps // 100) == 0

    def next(self) -> "Moment":
        """One step later."""
        return Moment(self.step + 1, self.total_steps, self.warmup_steps, self.freeze_step, self.seed)

    def before(self) -> "Moment":
        """One step earlier."""
        return replace(self, step=self.step - 1)

    @classmethod
    def start(cls, total_steps: int, warmup: float, finetune: float, seed: int) -> "Moment":
        """Step 0 of a run, with its arguments checked."""
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps <= 0:
            raise ValueError(
                f"total_steps={total_steps!r} is not a number of optimizer steps; a positive int is needed"
            )
        for name, fraction in (("warmup", warmup), ("finetune", finetune)):
            if not 0 <= fraction <= 1:
                raise ValueError(f"{name}={fraction!r} is not a fraction of total_steps; it must lie in [0, 1]")
        if warmup + finetune > 1 + 1e-9:
            raise ValueError(
                f"warmup={warmup!r} and finetune={finetune!r} together exceed the run; their sum must be ≤ 1"
            )
        warm, freeze = round(warmup * total_steps), total_steps - round(finetune * total_steps)
        return cls(0, total_steps, min(warm, freeze), freeze, seed)
