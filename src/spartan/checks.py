"""What must hold of a model while a sparsifier works on it: the same tensors, untouched, and finite numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spartan.groups import Group, Plan
from spartan.masters import Master
from spartan.methods.base import Method
from spartan.ops.collective import Ranks
from spartan.schedules import Moment
from spartan.sharding import version
from spartan.targets import Target, current
from spartan.watch import FINE, Watch

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine
    from spartan.kernels.frozen_engine import FrozenEngine


class Checks(ABC):
    """The part of a run that looks for mistakes."""

    plan: Plan
    method: Method
    at: Moment
    targets: list[Target]
    masters: list[Master]
    watch: Watch
    ranks: Ranks | None  # the processes that hold shards of any target
    _home: list[tuple[int, int]]
    _versions: list[int]

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """w = f(θ) of every target."""

    @abstractmethod
    def reshard(self) -> None:
        """Let the model hold shards again, where a forward pass has left whole weights."""

    @abstractmethod
    def _by_engine(self, which: Iterable[int]) -> tuple[list[Engine | FrozenEngine], list[int]]:
        """The kernels of the groups that are all there, and the targets that are left."""

    def check_same_tensors(self) -> None:
        """The model must hold the parameters that the run was built for."""
        held = [current(target) for target in self.targets]
        if any(now is not target.parameter for now, target in zip(held, self.targets, strict=True)):
            self.reshard()
            held = [current(target) for target in self.targets]
        for target, now, (m, _) in zip(self.targets, held, self._home, strict=True):
            theta = self.masters[m].theta
            if now is not target.parameter or now.device != theta.device or now.dtype != theta.dtype:
                raise RuntimeError(
                    f"{target.name} was moved, cast or replaced after the sparsifier was built (it is {now.dtype} on "
                    f"{now.device}, the dense weights are {theta.dtype} on {theta.device}). Build the sparsifier after "
                    "model.to(...); to continue a run, load sparsifier.state_dict() into the new one."
                )

    def _agree(self, bad: int | None) -> int | None:
        """The first bad target of any process: all of them must raise, or the others would wait for one that has."""
        if self.ranks is None:
            return bad
        number = torch.tensor(FINE if bad is None else bad, dtype=torch.int32, device=self.watch.flags.device)
        first = int(self.ranks.smallest(number))
        return None if first == FINE else first

    @torch.no_grad()
    def check_model(self) -> None:
        """The model must hold what was written into it."""
        self.check_same_tensors()
        versions = [version(target.parameter) for target in self.targets]
        if versions == self._versions or self.method.identity:
            return
        # Swapping an average in and out again bumps versions too, so look at the values before complaining.
        pairs = enumerate(zip(self.targets, self.weights(), strict=True))
        bad = self._agree(next((i for i, (target, w) in pairs if not torch.equal(target.local, w)), None))
        if bad is not None:
            raise RuntimeError(
                f"{self.targets[bad].name} was changed outside the optimizer step. After model.load_state_dict(), also call "
                "sparsifier.load_state_dict() with the state saved beside it; to set weights by hand, do so inside "
                "`with sparsifier.dense_weights():`."
            )
        self._versions = versions

    def check_gradients(self, which: Iterable[int]) -> None:
        """No NaN or infinite gradient may reach θ.

        On an accelerator nothing waits for the answer: a flag keeps θ as it is, and the error comes with a later step.
        """
        which = list(which)
        if self.watch.flags.device.type != "cpu" and self.ranks is None:
            for group, mine in self._groups_of(which):
                grads = [self.targets[i].parameter.grad if i in which else None for i in mine]
                engine = group.engine or group.frozen_engine
                if engine is not None and self._alike(group, grads):
                    engine.check(grads)
                else:
                    there = [(i, g) for i, g in zip(mine, grads, strict=True) if g is not None]
                    self.watch.note(0, [i for i, _ in there], [g for _, g in there])
            return
        bad = self._agree(_first_non_finite((i, self.targets[i].local_grad) for i in which))
        if bad is not None:
            raise RuntimeError(
                f"the gradient of {self.targets[bad].name} holds NaN or infinite values at step {self.at.step}; nothing "
                "was updated. Lower the learning rate, clip gradients, or use a GradScaler with float16."
            )

    def _groups_of(self, which: Sequence[int]) -> Iterator[tuple[Group, range]]:
        """The groups that these targets belong to, each with all its targets."""
        start = 0
        for group in self.plan.groups:
            mine = range(start, start + len(group.targets))
            if any(i in mine for i in which):
                yield group, mine
            start = mine.stop

    def _alike(self, group: Group, grads: Sequence[Tensor | None]) -> bool:
        """Whether gradients lie in memory as their parameters do."""
        pairs = zip(group.targets, grads, strict=True)
        return all(g is None or (g.stride() == t.parameter.stride() and not g.is_sparse) for t, g in pairs)

    def check_weights(self, which: Iterable[int]) -> None:
        """No NaN or infinite θ may be taken from the model."""
        which = list(which)
        if self.watch.flags.device.type != "cpu" and self.ranks is None:
            _, rest = self._by_engine(which)  # kernels look while they take
            self.watch.note(1, rest, [self.targets[i].parameter.detach() for i in rest])
            return
        bad = self._agree(_first_non_finite((i, self.targets[i].local) for i in which))
        if bad is not None:
            raise RuntimeError(
                f"{self.targets[bad].name} would hold NaN or infinite weights after step {self.at.step}; the update was "
                "taken back. The learning rate is probably too high."
            )


def _first_non_finite(tensors: Iterable[tuple[int, Tensor | None]]) -> int | None:
    """Index of the first tensor with a NaN or infinite entry, with one look at the device for all of them."""
    there = [(i, t.detach()) for i, t in tensors if t is not None and t.numel()]
    if not there:
        return None
    if torch.isfinite(torch.stack([t.sum().float() for _, t in there])).all():  # the sum of one that is not, is not
        return None
    largest = torch.stack([n.float() for n in torch._foreach_norm([t for _, t in there], math.inf)])
    finite = torch.isfinite(largest).tolist()
    return None if all(finite) else there[finite.index(False)][0]
