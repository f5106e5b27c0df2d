"""Chooses masks where every m consecutive units have a budget of their own: n of them, hard or soft.

Rows are solved where they are read; what is known of them is n and β.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spartan.ops import rows
from spartan.solvers.pools import Budgets, Pools, numbers


@dataclass(frozen=True, eq=False)
class RowSelection:
    """The n largest of every row; of equal ones, the first."""

    n: int
    cost: Tensor  # of every segment

    def decisive(self) -> list[Tensor]:
        """None: n follows from the budget."""
        return []

    def saved(self) -> list[dict[str, float]]:
        """Plain numbers for every segment."""
        return [{"n": self.n, "cost": cost} for cost in self.cost.tolist()]


@dataclass(frozen=True, eq=False)
class RowDuals:
    """The soft mask of every row, by the sharpness of its segment; `solved` holds centers and offsets that are at hand."""

    beta: tuple[float, ...]
    n: int
    passes: Tensor
    solved: tuple[Tensor, ...] = ()  # center and offset of every row of each stretch

    def decisive(self) -> list[Tensor]:
        """None: it follows from n and β."""
        return []

    def mu(self) -> None:
        """Every row has a μ of its own, so there is none to name."""

    def saved(self) -> list[dict[str, float]]:
        """Plain numbers for every segment; the rest follows from θ."""
        return [{"beta": beta, "n": self.n, "passes": int(self.passes[0])} for beta in self.beta]


class Rows(Pools):
    """Segments in which every m units compete."""

    def _rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.problem.pattern.rows or 1)

    def select(self, ranks: Tensor, k: Budgets) -> Any:
        """n of every row, rounded down; the ranks do not matter, since rows are ranked where they are read."""
        m, segments = self.problem.pattern.rows or 1, self.problem.segments
        n = min(min(m, math.floor(m * k / s.total + 1e-9)) for k, s in zip(numbers(k), segments, strict=True))
        return RowSelection(n, self.units.constant([float(segment.total * n / m) for segment in segments]))

    def solve(self, ranks: Tensor, k: Budgets, beta: Sequence[float]) -> tuple[Any, Any]:
        """The same, and the soft top-n mask of every row."""
        chosen = self.select(ranks, k)
        solved: list[Tensor] = []
        for here, s, _, _ in self.problem.stretches:
            solved += rows.solve(self._rows(ranks[here]), chosen.n, beta[s])
        return chosen, self.duals(beta, chosen.n, tuple(solved))

    def duals(self, beta: Sequence[float], n: int, solved: tuple[Tensor, ...] = ()) -> RowDuals:
        """The soft masks of rows, solved or not."""
        passes = torch.full((len(beta),), rows.PASSES[self.units.dtype])
        return RowDuals(tuple(beta), n, passes, solved)

    def keep(self, ranks: Tensor, chosen: Any) -> Tensor:
        """Bool per unit."""
        return rows.top(self._rows(ranks), chosen.n).reshape(-1)

    def soft(self, ranks: Tensor, duals: Any) -> Tensor:
        """The soft mask of every unit."""
        found = []
        for i, (here, s, _, _) in enumerate(self.problem.stretches):
            u, beta = self._rows(ranks[here]), duals.beta[s]
            center, offset = duals.solved[2 * i : 2 * i + 2] or rows.solve(u, duals.n, beta)
            found.append((u - center[:, None]).mul_(beta).add_(offset[:, None]).sigmoid_().reshape(-1))
        return found[0] if len(found) == 1 else torch.cat(found)

    def below(self, ranks: Tensor, chosen: Any) -> Tensor:
        """τ of every row, at each of its units."""
        u = self._rows(ranks)
        return rows.below(u, chosen.n).expand(u.shape).reshape(-1)

    def pulled_back(self, pulls: Tensor, slopes: Tensor) -> Tensor:
        """a₁/a₂ of every row, at each of its units."""
        u = self._rows(pulls)
        return rows.pull(u, self._rows(slopes)).expand(u.shape).reshape(-1)

    def restored(self, chosen: Any, duals: Any) -> tuple[Any, Any]:
        """What `saved` gave, of every segment."""
        a = None
        if chosen is not None:
            costs = torch.tensor([x["cost"] for x in chosen], dtype=torch.float64, device=self.units.device)
            a = RowSelection(int(chosen[0]["n"]), costs)
        return a, None if duals is None else self.duals([x["beta"] for x in duals], int(duals[0]["n"]))
