"""Chooses masks by Triton kernels: all segments in one launch, nothing waits for the device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.ops.newton import Dual
from spartan.problem.problem import Problem
from spartan.solvers.base import Flags
from spartan.solvers.forms import Form
from spartan.solvers.pools import Budgets
from spartan.solvers.theta import Theta
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton.launch import Launcher
from spartan.solvers.triton.tables import Pieces
from spartan.solvers.triton.topk import TopK


class KernelTheta(TorchSolver):
    """θ that launches move: some wait to be run together."""

    kernels: Launcher

    @property
    def theta(self) -> Theta:
        """θ; whoever asks for it may read it, so that what was only noted is done first."""
        self.kernels.replay.flush()
        return self._theta

    @theta.setter
    def theta(self, theta: Theta) -> None:
        self._theta = theta

    def hold(self) -> None:
        """Note launches, to run them as one."""
        self.kernels.replay.hold()

    def release(self) -> None:
        """Run them."""
        self.kernels.replay.release()


class KernelMasks(KernelTheta):
    """What is kept, and the soft masks, as states on the device; ranks of other kinds go to a top-k of their own."""

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        self.kernels = Launcher(problem, flags)
        super().__init__(problem, flags, alias)
        self._mine = False  # whether the masks in use were chosen by the kernels, from θ
        self._by_learned: str | None = None  # or from these learned ranks
        self._by_torch = False  # or by plain torch
        self._saved: tuple[Any, list[Dual] | None] | None = None  # a solution that was taken over, until the next one
        self._others: dict[str, TopK] = {}
        self.starts = [here.start for here in problem.slices]  # of each target, in vectors of units
        self.prepare()

    def prepare(self) -> None:
        """Tables of what competes, by segment."""
        problem = self.problem
        each = problem.units, problem.unit_costs, problem.factors, self.device
        owners: dict[str, Any] = {"owners": problem.segment_of, "segments": len(problem.segments)}
        self.ranked = Pieces(*each, **owners)
        self.topk = self.make_topk(*each, **owners, replay=self.kernels.replay)
        self._sums = torch.zeros(self.ranked.count, 4, dtype=torch.float64, device=self.device)

    def redivided(self) -> None:
        """The problem has other segments now."""
        super().redivided()
        self.kernels = Launcher(self.problem, self.flags)  # recorded launches read the tables so far
        self._mine, self._by_learned = False, None
        self._others = {}
        self.prepare()

    def competing(self) -> list[Tensor]:
        """What the kernels rank: θ, or a number per unit made of it."""
        return self._theta.views

    def solve(
        self,
        k: Budgets,
        beta: Sequence[float] | None = None,
        ranks: Tensor | None = None,
        learned: str | None = None,
        shifted: str | None = None,
    ) -> None:
        """The thresholds of the largest magnitudes, and with a β the soft masks: one launch for all segments."""
        if shifted is not None:
            ranks = self.ranks_to_search(shifted)
        seen = self.power == 1.0 or self.problem.pattern.single  # kernels of larger units know θ itself only
        self._mine, self._by_learned = ranks is None and learned is None and seen, None
        self._saved, self._by_torch = None, False
        if self._mine:
            self._solve_by(self.topk, self.competing(), k, beta, self.power)
        elif learned is not None and self.state.learned[learned].dtype == torch.float32:
            self._by_learned = learned
            self._solve_by(self.topk_of("learned"), self.state.learned[learned].detach(), k, beta)
        else:
            values = self.ranks(Form(learned=learned)) if ranks is None else ranks
            if values.dtype != torch.float32:
                self._by_torch = True
                super().solve(k, beta, values)
                return
            topk = self.topk_of("ranks")
            topk.cold = topk.cold or beta is not None  # where a soft mask comes to lie depends on where it began
            self._solve_by(topk, values.contiguous(), k, beta)
            if shifted is None:
                self.kernels.replay.flush()  # who gave the ranks may ask for what is kept of them

    def ranks_to_search(self, name: str) -> Tensor:
        """Ranks shifted by what is learned under this name, which stay as they are until the next search."""
        return self.shifted(name)

    def _solve_by(self, topk: TopK, values: Any, k: Budgets, beta: Sequence[float] | None, power: float = 1.0) -> None:
        topk.solve(values, k, beta, power)
        self.a, self.dual = topk.states.selection(), None if beta is None else topk.states.duals(beta)

    def select(self, k: Budgets, ranks: Tensor) -> Any:
        """A selection of the units of highest rank that fit the budgets."""
        if ranks.dtype != torch.float32:
            return super().select(k, ranks)
        return self.topk_of("any").solve_anew(ranks.contiguous(), k)[0]

    def sinkhorn(self, k: Budgets, beta: Sequence[float], init: Any) -> None:
        """By plain torch."""
        self._mine, self._by_torch = False, True
        super().sinkhorn(k, beta, init)

    def top(self, k: Budgets, ranks: Tensor, among: Tensor | None = None, near: str | None = None) -> Tensor:
        """Bool per unit: those of highest rank that fit the budgets, among all or some; exact, ties by position."""
        if ranks.dtype != torch.float32 or self.problem.pattern.rows is not None:
            return super().top(k, ranks, among)
        if among is not None:
            ranks = torch.where(among, ranks, -math.inf)
        ranks, topk = ranks.contiguous(), self.topk_of(near or "any")
        topk.cold = topk.cold or near is None
        topk.solve(ranks, k, None)
        found = topk.keep(ranks)
        return found if among is None else found & among

    def make_topk(self, *arguments: Any, **settings: Any) -> TopK:
        """What searches; the arguments are those of `TopK`."""
        return TopK(*arguments, **settings)

    def searches(self) -> bool:
        """Whether kernels found the masks in use."""
        return not self._by_torch

    def topk_of(self, name: str) -> TopK:
        """The top-k of other ranks than magnitudes; under its name one may begin where it was."""
        if name not in self._others:
            problem, segments = self.problem, len(self.problem.segments)
            each = problem.units, problem.unit_costs, None, self.device
            # Ranks that are made by launches: the search runs with them, and with what then writes weights.
            held = {"replay": self.kernels.replay, "name": "solve ranks", "fixed": False} if name == "ranks" else {}
            self._others[name] = self.make_topk(*each, problem.segment_of, segments, **held)
        return self._others[name]

    def go_on_from(self, solution: Mapping[str, Any]) -> None:
        """Take over masks that were saved, and start from them."""
        super().go_on_from(solution)
        duals = None if self.dual is None else self.dual.each()
        self._by_learned, self._saved = None, None if self.a is None else (solution["a"], duals)
        # A rescaled mask is a Sinkhorn iteration's, which kernels know nothing of.
        self._mine = self.a is not None and (duals is None or all(dual.scale == 1.0 for dual in duals))
        self._by_torch = self.a is not None and not self._mine
        if self._mine:
            self.competing()
            self._go_on_with(self.topk, solution["a"], duals)

    def _go_on_with(self, topk: TopK, chosen: Any, duals: Sequence[Dual] | None) -> None:
        """Have a top-k begin where it was."""
        topk.go_on_from(chosen, duals)
        self.a = topk.states.selection()
        self.dual = None if duals is None else topk.states.duals([dual.beta for dual in duals])

    def chosen_by(self, learned: str) -> bool:
        """Whether the masks in use were chosen by the kernels from these learned ranks. So is a solution taken over."""
        if self._by_learned is None and self._saved is not None and self.state.learned[learned].dtype == torch.float32:
            self._by_learned = learned
            self._go_on_with(self.topk_of("learned"), *self._saved)
        return self._by_learned == learned
