"""Answers problems whose weights lie in shards by the same kernels: on each process its own, and only sums go around.

What kernels cannot do, plain torch does as it does for all shards.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spartan.problem.schedules import Moment
from spartan.solvers.forms import Form
from spartan.solvers.pools import Pools
from spartan.solvers.sharded import ShardedSolver
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton import ratios
from spartan.solvers.triton.blocks import Bands, BlockSolver
from spartan.solvers.triton.reading import Reading, RowScales
from spartan.solvers.triton.rows import RowSolver
from spartan.solvers.triton.sharded_topk import ShardedTopK, Shards
from spartan.solvers.triton.single import TritonSolver
from spartan.solvers.triton.state import WHOLE_CUT
from spartan.solvers.triton.topk import TopK
from spartan.solvers.triton.turning import KernelGradients, Launch
from spartan.solvers.triton.vectors import KernelVectors


class SharedVectors(KernelVectors):
    """Vectors of units in shards: what all processes must agree on is left to plain torch."""

    draws_in_torch = True

    def random(self, at: Moment) -> Tensor:
        """A random number per unit: the same however many processes there are."""
        return TorchSolver.random(self, at)

    def within_budget(self, s: Tensor) -> Tensor:
        """The nearest numbers in [0, 1], one per unit, whose cost fits the budgets of all processes."""
        return TorchSolver.within_budget(self, s)


class InShards(SharedVectors, KernelGradients):
    """What solvers by kernels do otherwise where weights lie in shards."""

    cut_in = WHOLE_CUT

    def make_pools(self) -> Pools:
        """Who compares units in plain torch."""
        return ShardedSolver.make_pools(self)  # type: ignore[arg-type]

    def prepare(self) -> None:
        """Tables of what competes, and of where it stands in the whole weights."""
        self._shards = Shards(self.problem, self.device)
        super().prepare()
        counts = [int(self.problem.ranks.counts[i]) for i in self.ranked.tensors]
        self._counted = torch.tensor(counts, dtype=torch.int32).to(self.device)
        self._pulled = torch.zeros(len(self.problem.segments), 4, dtype=torch.float64, device=self.device)

    def make_topk(self, *arguments: Any, **settings: Any) -> TopK:
        """What searches on all processes."""
        return ShardedTopK(self.problem, self._shards, *arguments, **settings)

    def pull_back(self, form: Form, key: Any, pull: Launch, turn: Launch, to_grads: Tensor, floats: Tensor) -> None:
        """The same, with a sum over the processes before a₁/a₂ is known."""
        x, p, told, out = self.kernels, self.ranked, self._pulled, self.flags.residuals
        segments = (len(p.limits),)

        def launch_pull() -> None:
            pull()
            tables = to_grads, p.limits, self._counted, self._sums, p.costs
            ratios.tell_pulls[segments](*tables, told, ROWS=512, num_warps=8)

        def launch_turn() -> None:
            ratios.told_ratios[segments](told, floats, out, num_warps=1)
            turn()

        x.replay.flush()
        x.replay.run(("pull", *key), launch_pull)
        self.problem.ranks.sum(told)
        x.replay.run(("turn", *key), launch_turn)

    def kept(self, form: Form) -> Tensor:
        """A: bool per unit; asked for at every step, since processes count together what they keep."""
        learned = form.learned
        topk = self.topk if learned is None else self.topk_of("learned")
        if form.everything or form.stored is not None or self.a is not topk.states.selection():
            return super().kept(form)
        return topk.keep(self.scores() if learned is None else self.state.learned[learned].detach())

    def sum_by_target(self, *vectors: Tensor) -> Tensor:
        """Σ over each target, in float64, of several vectors at once; masks are counted by a kernel."""
        if len(vectors) != 1 or vectors[0].dtype != torch.bool:
            return super().sum_by_target(*vectors)
        assert isinstance(self.topk, ShardedTopK)
        ranks = self.problem.ranks
        return ranks.sum(ranks.counted(self.topk.count(vectors[0].contiguous()).double()[None]))

    def cuts_here(self, cuts: Tensor) -> Tensor:
        """Positions among all units as those among the units here."""
        found = torch.empty_like(cuts)
        self._shards.cut(cuts, found)
        return found

    def _shifted(self, name: str) -> Reading | None:
        """None: what shifts ranks learns from the weights of all processes, by plain torch."""
        return None

    def write_below(self, form: Form, key: Any, below: Launch, launch: Launch) -> None:
        """The same; τ of a segment is the largest that any process found."""
        self.kernels.replay.flush()
        self.kernels.replay.run(("below", *key), below)
        self.problem.ranks.largest(self._taus)
        self.kernels.write(key, launch)


class ShardedSingles(InShards, TritonSolver):
    """Single weights in shards."""

    @cached_property
    def row_scales(self) -> RowScales | None:
        """The rows of all targets; None where shards cut one's."""
        return super().row_scales if _rows_are_whole(self) else None


class ShardedBlocks(InShards, BlockSolver):
    """Blocks, rows and columns in shards, which cut none."""

    @cached_property
    def bands(self) -> Bands | None:
        """The rows of units; None where shards cut a row of entries."""
        return super().bands if _rows_are_whole(self) else None

    @property
    def row_scales(self) -> None:  # type: ignore[override]
        """None: what rows have lost, plain torch adds up."""


class ShardedRuns(SharedVectors, RowSolver):
    """N of every M weights in shards, which cut no run: every process solves its own."""

    @property
    def row_scales(self) -> None:
        """None: what outputs have lost, plain torch adds up."""


def _rows_are_whole(solver: TorchSolver) -> bool:
    return all(t.axes.plain and t.local.shape[1:] == t.shape[1:] for t in solver.problem.targets)
