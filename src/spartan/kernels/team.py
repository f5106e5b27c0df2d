"""The kernels of many groups as one: with a budget for every layer, a step launches as many as with a single budget.

A team goes over the targets of all groups. Two things make it work for methods that see one group at a time:

- Inside `at_once()`, engines only say what they are to do, and for which tensors. At its end every kind of work that
  was left is launched once, over all of them.
- Inside `expecting()`, the first group that asks for the masks it was expected to ask for has those of all groups
  solved. The others find their answer there. One is used only for exactly the question it answers, of θ as it was then;
  one that nobody asks for is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from spartan.kernels.frozen_engine import FrozenEngine
from spartan.kernels.state import States
from spartan.kernels.tables import Pieces
from spartan.kernels.topk import TopK
from spartan.kernels.triton_engine import Kernels, Launcher, TritonEngine

Ask = tuple[float, float | None]  # k and β


class Together(Launcher):
    """Launches over the tensors of many groups what their engines leave to it."""

    _left: dict[tuple[Any, ...], list[Tensor | None]] | None = None

    def leave(self, first: int, what: Callable[..., None], tensors: Sequence[Tensor | None], *how: Any) -> bool:
        """Whether this will be done later, over these tensors from number `first` on and those of other groups."""
        if self._left is None:
            return False
        kind = next((t.dtype for t in tensors if t is not None), None)
        if kind is not None:
            whole = self._left.setdefault((what, kind, *how), [None] * len(self.parameters))
            whole[first : first + len(tensors)] = tensors
        return True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, engines leave their work; at the end it is done."""
        self._left = {}
        try:
            yield
        finally:
            left, self._left = self._left, None
            for (what, _, *how), tensors in left.items():
                what(self, tensors, *how)


class Team(Together, Kernels):
    """The kernels of many groups.

    Args:
        engines: those of the groups, all of one dtype; masks are solved together for groups of single weights.
        owners: the group of every target of the model, in order.
        out: two numbers a group that the gradients leave.
    """

    state: States

    def __init__(self, engines: Mapping[int, TritonEngine], owners: Sequence[int], out: Tensor) -> None:
        some, n = next(iter(engines.values())), len(owners)
        parameters: list[Tensor | None] = [None] * n
        thetas: list[Tensor | None] = [None] * n
        sizes, ranked, costs, factors = [0] * n, [0] * n, [1.0] * n, [1.0] * n
        for engine in engines.values():
            mine = slice(engine.first, engine.first + len(engine.parameters))
            parameters[mine], thetas[mine] = engine.parameters, engine.thetas
            sizes[mine] = [t.numel() for t in engine.thetas]
            if type(engine) is TritonEngine:
                ranked[mine], costs[mine], factors[mine] = sizes[mine], engine.costs, engine.factors
        device = some.bad.device
        everything = Pieces(sizes, [1.0] * n, [1.0] * n, device)
        of_groups = Pieces(ranked, costs, factors, device, owners=owners, groups=len(out))
        super().__init__(parameters, thetas, everything, some.bad, 0, out, of_groups)
        self.engines = {g: engine for g, engine in engines.items() if type(engine) is TritonEngine}
        for engine in engines.values():
            engine.together = self
        self._expected: dict[int, Ask] = {}
        self._ready: dict[int, list[int]] = {}  # θ's versions when a group's answer was found
        self._asked = False
        if self.engines:
            self.topk = TopK(ranked, costs, factors, device, owners, len(out))
            self.state = States(len(out), device)
            for g, engine in self.engines.items():
                engine.team, engine.number, engine.state = self, g, self.state.rows[g]

    @contextmanager
    def expecting(self, asks: Mapping[int, Ask]) -> Iterator[None]:
        """Inside, groups are likely to ask for masks with these k and β."""
        mine = {g: ask for g, ask in asks.items() if g in self.engines}
        alike = len({beta is None for _, beta in mine.values()}) == 1
        if len(mine) > 1 and alike:
            self._expected, self._asked = mine, False
        try:
            yield
        finally:
            for g in self._ready:
                self.state.go_back(g)
            self._expected, self._ready = {}, {}

    def knows(self, engine: TritonEngine, k: float, beta: float | None) -> bool:
        """Whether the group's state holds the answer to this."""
        if self._expected.get(engine.number) != (k, beta):
            return False
        if not self._asked:
            self._asked = True
            cold = any(each.cold for each in self.engines.values())
            self.topk.solve_all(self.thetas, self.state, self._expected, cold)
            self._ready = {g: _versions(each.thetas) for g, each in self.engines.items()}
        return self._ready.pop(engine.number, None) == _versions(engine.thetas)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers that grow when torch writes to the tensors."""
    return [t._version for t in tensors]


class FrozenTeam(Together, FrozenEngine):
    """The kernels of many groups whose masks are fixed.

    Args:
        engines: those of the groups, all of one dtype and with places of one.
        targets: how many the model has.
    """

    def __init__(self, engines: Sequence[FrozenEngine], targets: int) -> None:
        lists: tuple[list[Any], ...] = tuple([None] * targets for _ in range(5))
        parameters, slabs, thetas, masks, indices = lists
        for engine in engines:
            mine = slice(engine.first, engine.first + len(engine.parameters))
            parameters[mine], slabs[mine], thetas[mine] = engine.parameters, engine.slabs, engine.thetas
            masks[mine], indices[mine] = engine.masks, engine.indices
        super().__init__(parameters, slabs, thetas, masks, indices, engines[0].bad, 0)
        for engine in engines:
            engine.together = self
