"""The kernels of a group in which n of every m weights are kept.

Every run of m is solved where its mask is needed, in registers: neither masks nor the duals of the runs, which would be
2/m as many numbers as there are weights, are stored. What the group holds is n and β.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spartan.kernels import nm
from spartan.kernels.engine import Engine
from spartan.kernels.tables import Pieces
from spartan.kernels.triton_engine import TritonEngine
from spartan.ops import rows
from spartan.ops.rows import RowDual, RowThreshold
from spartan.ops.select import Boundary, Threshold
from spartan.ops.soft_topk import Dual

TILE = 2048  # entries that a program holds at once


class Owner(Protocol):
    """What the kernels ask of their group."""

    threshold: Threshold | None
    dual: Dual | RowDual | None
    engine: Engine | None

    def scores(self, thetas: Sequence[Tensor]) -> list[Tensor]:
        """u of every weight, run after run."""

    def boundary(self, scores: Sequence[Tensor], k: float) -> Boundary:
        """How many of every run a budget keeps; the scores do not matter."""

    def solve(self, scores: Sequence[Tensor], k: float, beta: float, start: Boundary) -> Dual | RowDual:
        """The soft mask of every run in plain torch."""


class SolvedAnew(RowDual):
    """The soft masks of all runs, solved from θ whenever somebody asks: by β and n, they follow from it."""

    n: int
    start: Boundary
    owner: Owner

    def __init__(self, beta: float, start: Boundary, owner: Owner) -> None:
        assert isinstance(start.threshold, RowThreshold)
        n, m = start.threshold.n, start.threshold.m
        self.__dict__.update(beta=beta, n=n, m=m, passes=rows.PASSES[torch.float32], start=start, owner=owner)

    @property
    def center(self) -> Tensor:
        """One per run, for who saves it."""
        return self._whole().center

    @property
    def offset(self) -> Tensor:
        """One per run, for who saves it."""
        return self._whole().offset

    def _whole(self) -> RowDual:
        engine = self.owner.engine
        if not isinstance(engine, NMEngine):  # the mask is fixed: nobody asks for it here, and θ is gone
            return RowDual(self.beta, torch.empty(0), torch.empty(0), self.m)
        found = self.owner.solve(self.owner.scores(engine.thetas), math.nan, self.beta, self.start)
        assert isinstance(found, RowDual)
        return found

    def mask(self, u: Tensor, start: int = 0) -> Tensor:
        """The mask of whole runs, which it is solved from."""
        center, offset = rows.solve(u.reshape(-1, self.m), self.n, self.beta)
        return RowDual(self.beta, center, offset, self.m).mask(u)


class NMEngine(TritonEngine):
    """Launches the kernels of one group with n of every m kept.

    Args:
        owner: the group, whose threshold says n and whose dual says β.
        m: entries of a run.
        strides: the step in memory from one input to the next, of each target; no target has gaps.
        rest: as for single weights.
    """

    ranks_anything = False
    # A target that the loss does not reach competes with no other: its gradient stays what it is, none.
    fills_in = False

    def __init__(self, owner: Owner, m: int, strides: Sequence[int], *rest: Any) -> None:
        self.owner, self.m, self._strides_of = owner, m, list(strides)
        super().__init__(*rest)

    def _prepare(self, costs: Sequence[float], factors: Sequence[float]) -> None:
        device, lanes = self.thetas[0].device, 1 << (self.m - 1).bit_length()
        self._tile = {"M": self.m, "LANES": lanes, "R": TILE // lanes}
        self._passes = {"PASSES": rows.PASSES[torch.float32]}
        self._side_by_side = set(self._strides_of) == {1} and self.m == lanes
        self._runs = Pieces([t.numel() // self.m for t in self.thetas], costs, factors, device, TILE // lanes)
        self._strides = torch.tensor(self._strides_of, dtype=torch.int32).to(device)
        self._numbers = torch.zeros(2, dtype=torch.float64, device=device)
        self._told = [0.0, 0.0]

    # ------------------------------------------------------------------ masks

    def choose(self, k: float, beta: float | None) -> tuple[Threshold, Any]:
        """How many of every run a budget keeps, and with a β their soft masks; θ is read when they are used."""
        start = self.owner.boundary([], k)
        return start.threshold, None if beta is None else SolvedAnew(beta, start, self.owner)

    def restore(self, threshold: Threshold, dual: Dual | None) -> tuple[Threshold, Dual | None]:
        """Go on from masks that were saved: there is nothing to be known of them but n, and β."""
        return RowThreshold.of(int(threshold.cut), self.m, float(threshold.cost)), dual

    def _tell(self) -> None:
        """n and β to the device: a number is an argument of the launch, so that nothing waits."""
        threshold, dual = self.owner.threshold, self.owner.dual
        assert threshold is not None
        now = [0.0 if dual is None else float(dual.beta), float(int(threshold.cut))]
        for place, number in enumerate(now):
            if self._told[place] != number:
                self._numbers[place].fill_(number)
        self._told = now

    def _wide(self, *lists: Sequence[Tensor | None]) -> bool:
        """Whether runs can be read in words of 16 bytes."""
        return self._side_by_side and all(t is None or t.data_ptr() % 16 == 0 for x in lists for t in x)

    def _over_runs(self, kernel: Any, *arguments: Any, **kinds: Any) -> None:
        p = self._runs
        kernel[(p.count,)](
            *arguments, p.table, self._strides, p.factors, self._numbers, **self._tile, num_warps=8, **kinds
        )

    # ------------------------------------------------------------------ weights and gradients

    def project(self, soft: bool) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters."""
        self._tell()
        tables = self._to_parameters.of(self.parameters), self._to_thetas.of(self.thetas)
        wide = self._wide(self.parameters, self.thetas)
        kinds = {"SOFT": soft, "WIDE": wide, "DTYPE": self._dtype, **self._passes}
        self._weights(("project", soft, wide), lambda: self._over_runs(nm.project, *tables, **kinds))

    def through_mask(self, grads: Sequence[Tensor | None]) -> None:
        """Through the soft mask, in place."""
        self._to_gradients("through_mask", nm.through_mask, grads, **self._passes)

    def where_kept(self, grads: Sequence[Tensor | None]) -> None:
        """Zero where not kept, in place."""
        self._to_gradients("where_kept", nm.where_kept, grads)

    def _to_gradients(self, key: str, kernel: Any, grads: Sequence[Tensor | None], **kinds: Any) -> None:
        self._tell()
        tables = self._to_grads.of(grads), self._to_thetas.of(self.thetas)
        kinds |= {**self._kinds(grads), "WIDE": self._wide(grads, self.thetas)}
        self._replay((key, kinds["GRAD"], kinds["WIDE"]), lambda: self._over_runs(kernel, *tables, **kinds))
