"""Computes on vectors of all units piece by piece, in the memory that they have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spartan.ops.drawing import uniform
from spartan.ops.newton import tolerance
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment
from spartan.solvers.base import Flags, Grads
from spartan.solvers.chunks.gradients import ChunkGradients
from spartan.solvers.chunks.pieces import Piece, value_of
from spartan.solvers.clipping import PASSES


class ChunkVectors(ChunkGradients):
    """What methods keep per unit, and change entry by entry."""

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        self._memory: dict[str, Tensor] = {}  # of vectors that come and go, by name

    def update(
        self,
        names: Sequence[str],
        function: Callable[..., object],
        read: Sequence[str],
        grads: Grads | None = None,
        at: Moment | None = None,
    ) -> None:
        """What is kept per unit under these names ← f(what is kept or learned under others), in place."""
        drawn_in_order = at is None or all(t.parameter.is_contiguous() for t in self.problem.targets)
        if not drawn_in_order or (grads is not None and not (self.by_pieces and self._alike(grads))):
            super().update(names, function, read, grads, at)
            return
        units, learned = self.state.per_unit, self.state.learned
        given = [units[name] if name in units else learned[name].detach() for name in read]
        found = [self._room_for(name) for name in names]
        flat = self._flat(grads) if grads is not None else []
        drawn = self._drawn(at) if at is not None else None
        for piece in self._pieces:
            arguments = [x[piece.units] for x in given]
            if grads is not None:
                g, value = flat[piece.i], value_of(piece, self.power)
                arguments.append(
                    piece.room[2].zero_() if g is None else torch.mul(g[piece.here], value, out=piece.room[2])
                )
            if drawn is not None:
                arguments.append(drawn(piece))
            function(*arguments, [x[piece.units] for x in found])
        units.update(zip(names, found, strict=True))

    def _room_for(self, name: str) -> Tensor:
        """The memory of a vector, its own or what it had when it was last there."""
        there = self.state.per_unit.get(name)
        if there is None:
            there = self._memory.get(name)
        self._memory[name] = torch.empty(self.count, dtype=self.dtype) if there is None else there
        return self._memory[name]

    def _drawn(self, at: Moment) -> Callable[[Piece], Tensor]:
        """What draws the numbers of `random` for a piece, into room 3."""
        keys, longest = self.keys(at), max(len(piece.theta) for piece in self._pieces)
        index, room = torch.arange(longest, dtype=torch.int32), torch.empty(2, longest, dtype=torch.int32)

        def draw(piece: Piece) -> Tensor:
            size = len(piece.theta)
            return uniform(index[:size], keys[piece.i].after(piece.here.start), piece.room[3], room[:, :size])

        return draw

    def within_budget(self, s: Tensor) -> Tensor:
        """The nearest numbers in [0, 1], one per unit, whose cost fits the budgets, in place."""
        if s.dtype != self.dtype:
            return super().within_budget(s)
        unit, kind = max(self.problem.unit_costs), torch.finfo(self.dtype)
        shifts = [Shift(k, 1e-1 * tolerance(self.dtype), kind.eps) for k in self.k]
        for _ in range(PASSES):
            pending = {i for i, shift in enumerate(shifts) if not shift.done}
            if not pending:
                break
            sums = [[0.0, 0.0] for _ in shifts]
            for piece in self._pieces:
                if piece.segment in pending:
                    c = piece.cost
                    x = torch.sub(s[piece.units], shifts[piece.segment].v * (c / unit), out=piece.room[1])
                    # To the right: a whole unit gives way too.
                    inside = float(torch.gt(x, 0.0, out=piece.room[2]).sum())
                    if shifts[piece.segment].reaches(x, c / unit) > 1.0:
                        inside -= float(torch.gt(x, 1.0, out=piece.room[2]).sum())
                    sums[piece.segment][0] += c * float(x.clamp_(0.0, 1.0).sum(dtype=torch.float64))
                    sums[piece.segment][1] += c * c / unit * inside
            for i in pending:
                shifts[i].hear(*sums[i])
        for piece in self._pieces:
            s[piece.units].sub_(shifts[piece.segment].best * (piece.cost / unit)).clamp_(0.0, 1.0)
        return s

    def snapshot(self) -> Any:
        """All that a step may change; vectors are copied, since they change in place."""
        *rest, state = super().snapshot()
        state.per_unit = {name: x.clone() for name, x in state.per_unit.items()}
        return *rest, state

    def restore(self, snapshot: Any) -> None:
        """Go back, to vectors that may change again."""
        super().restore(snapshot)
        self.state.per_unit = {name: x.clone() for name, x in self.state.per_unit.items()}


@dataclass
class Shift:
    """The search for one shift v ≥ 0: bracketed Newton on Σ c·min(max(s − v·c, 0), 1) = k, as `clipping.within_budget`.

    It ends where the sum is as close to k as it needs to be, fits without a shift, or v cannot be told from the next.
    """

    k: float
    close: float  # as a fraction of k
    eps: float  # what v is rounded by, as a fraction of it
    v: float = 0.0
    low: float = 0.0
    high: float = 0.0
    most: float = 0.0  # the largest s/c
    best: float = 0.0
    least: float = float("inf")
    last: float = float("inf")
    done: bool = False

    def reaches(self, x: Tensor, c: float) -> float:
        """What the numbers s − v·c of a piece are at most; in the first pass it learns what leaves nothing of any."""
        if self.last == float("inf"):
            most = float(x.max())
            self.most = self.high = max(self.high, most / c)
            return most
        return (self.most - self.v) * c

    def hear(self, cost: float, slope: float) -> None:
        """The sum at v, and how fast it falls there."""
        excess, before = cost - self.k, self.v
        off = abs(excess)
        if off < self.least:
            self.best, self.least = self.v, off
        self.done = off <= self.close * self.k or (excess <= 0 and self.v == 0)
        if excess > 0:
            self.low = self.v
        else:
            self.high = self.v
        step = self.v + excess / slope if slope else float("nan")
        if self.low < step < self.high and off < 0.5 * self.last:
            self.v = step
        else:
            self.v = 0.5 * (self.low + self.high)
        self.last = off
        self.done = self.done or abs(self.v - before) <= self.eps * self.v
