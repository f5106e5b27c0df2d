"""Answers problems with n of every m weights kept by Triton kernels.

Every run of m is solved where its mask is needed, in registers: neither masks nor the duals of the runs, which would be
2/m as many numbers as there are weights, are stored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.ops import rows
from spartan.problem.problem import Problem
from spartan.solvers.base import Grads
from spartan.solvers.forms import Form, Mask
from spartan.solvers.pools import Budgets
from spartan.solvers.rows import Rows
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton import nm
from spartan.solvers.triton.single import ByMagnitude
from spartan.solvers.triton.tables import Pieces

TILE = 2048  # entries that a program holds at once
LONGEST_RUN = 64  # every entry is compared with all of its run


class RowSolver(ByMagnitude):
    """Launches the kernels of runs of m weights along the inputs."""

    pools: Rows

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Runs that are not long, in weights whose places fit 32 bits."""
        if problem.pattern.rows is None or problem.pattern.rows > LONGEST_RUN:
            return f"no kernels for {problem.pattern!r}"
        return "a weight of 2³¹ entries or more" if any(t.local.numel() >= 1 << 31 for t in problem.targets) else ""

    def prepare(self) -> None:
        """Tables of the runs."""
        problem, m = self.problem, self.problem.pattern.rows or 1
        lanes, strides = 1 << (m - 1).bit_length(), [t.local.stride(t.axes.inputs) for t in problem.targets]
        self._tile = {"M": m, "LANES": lanes, "R": TILE // lanes}
        self._passes = {"PASSES": rows.PASSES[torch.float32]}
        self._side_by_side = set(strides) == {1} and m == lanes
        runs = [n // m for n in problem.units]
        self.ranked = Pieces(runs, problem.unit_costs, problem.factors, self.device, TILE // lanes)
        self._strides = torch.tensor(strides, dtype=torch.int32).to(self.device)
        # n and β as the kernels know them, and as they were last told.
        self._numbers_there = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._told = [0.0, 0.0]

    def solve(
        self,
        k: Budgets,
        beta: Sequence[float] | None = None,
        ranks: Tensor | None = None,
        learned: str | None = None,
        shifted: str | None = None,
    ) -> None:
        """How many of every run are kept, and with a β their soft masks; θ is read when they are used."""
        by_magnitude = ranks is None and learned is None and shifted is None and self.power == 1.0
        self._mine = by_magnitude and (beta is None or len(set(beta)) == 1)
        if not self._mine:
            TorchSolver.solve(self, k, beta, ranks, learned, shifted)
            return
        self.a = self.pools.select(torch.empty(0), k)
        self.dual = None if beta is None else self.pools.duals(beta, self.a.n)

    def select(self, k: Budgets, ranks: Tensor) -> Any:
        """n of every run."""
        return TorchSolver.select(self, k, ranks)

    def go_on_from(self, solution: Mapping[str, Any]) -> None:
        """Take over n and β."""
        TorchSolver.go_on_from(self, solution)
        self._mine = self.a is not None

    def _tell(self) -> None:
        """n and β to the device: a number is an argument of the launch, so that nothing waits."""
        now = [0.0 if self.dual is None else float(self.dual.beta[0]), float(self.a.n)]
        for place, number in enumerate(now):
            if self._told[place] != number:
                self._numbers_there[place].fill_(number)
        self._told = now

    def _wide(self, *lists: Sequence[Tensor | None]) -> bool:
        """Whether runs can be read in words of 16 bytes."""
        return self._side_by_side and all(t is None or t.data_ptr() % 16 == 0 for x in lists for t in x)

    def _over_runs(self, kernel: Any, *arguments: Any, **kinds: Any) -> None:
        p = self.ranked
        tables = p.table, self._strides, p.factors, self._numbers_there
        kernel[(p.count,)](*arguments, *tables, **self._tile, num_warps=8, **kinds)

    def project(self, form: Form) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters."""
        soft = form.mask is Mask.SOFT
        self._tell()
        x = self.kernels
        tables = x.to_parameters.of(x.parameters), x.to_thetas.of(self._theta.views)
        wide = self._wide(x.parameters, self._theta.views)
        kinds = {"SOFT": soft, "WIDE": wide, "DTYPE": x.dtype, **self._passes}
        x.write(("project", soft, wide), lambda: self._over_runs(nm.project, *tables, **kinds))

    def through_mask(self, form: Form, grads: Grads) -> None:
        """Through the soft mask, in place."""
        self._to_gradients("through_mask", nm.through_mask, grads, **self._passes)

    def where(self, form: Form, grads: Grads) -> None:
        """Zero where not kept, in place."""
        self._to_gradients("where_kept", nm.where_kept, grads)

    def _to_gradients(self, key: str, kernel: Any, grads: Grads, **kinds: Any) -> None:
        self._tell()
        x = self.kernels
        tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views)
        kinds |= {**x.kinds(grads), "WIDE": self._wide(grads, self._theta.views)}
        x.replay((key, kinds["GRAD"], kinds["WIDE"]), lambda: self._over_runs(kernel, *tables, **kinds))
