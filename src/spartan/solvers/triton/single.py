"""Answers problems of single weights by Triton kernels: all segments in the same launches, nothing waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import FINE, Flags, Grads
from spartan.solvers.forms import KEPT, Form, Mask, Stored, Where
from spartan.solvers.pools import Budgets
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton import gradient, weights
from spartan.solvers.triton.launch import Launcher
from spartan.solvers.triton.tables import Addresses, Pieces
from spartan.solvers.triton.topk import TopK


class TritonSolver(TorchSolver):
    """Launches the kernels of single weights. What they cannot do, plain torch does."""

    name = "triton"

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        self.kernels = Launcher(problem, flags)
        self._to_masks = Addresses(self.device)
        self._mine = False  # whether the masks in use were chosen by the kernels, from θ
        self.prepare()

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Single weights."""
        return "" if problem.pattern.single else f"no kernels for {problem.pattern!r}"

    def prepare(self) -> None:
        """Tables of what competes, by segment."""
        problem = self.problem
        each = problem.units, problem.unit_costs, problem.factors, self.device
        owners: dict[str, Any] = {"owners": problem.segment_of, "segments": len(problem.segments)}
        self.ranked = Pieces(*each, **owners)
        self.topk = TopK(*each, **owners)
        self._sums = torch.zeros(self.ranked.count, 4, dtype=torch.float64, device=self.device)
        self._ranks_topk: TopK | None = None

    def redivided(self) -> None:
        """The problem has other segments now."""
        super().redivided()
        self.prepare()

    # ------------------------------------------------------------------ masks

    def competing(self) -> list[Tensor]:
        """What the kernels rank: θ, or a number per unit made of it."""
        return self.theta.views

    def solve(self, k: Budgets, beta: Sequence[float] | None = None, ranks: Tensor | None = None) -> None:
        """The thresholds of the largest magnitudes, and with a β the soft masks: one launch for all segments."""
        self._mine = ranks is None and self.power == 1.0
        if self._mine:
            self.topk.solve(self.competing(), k, beta)
            self.a, self.dual = self.topk.states.selection(), None if beta is None else self.topk.states.duals(beta)
            return
        ranks = self.scores() if ranks is None else ranks
        if ranks.dtype == torch.float32:
            self.a, self.dual = self._rank_topk().solve_anew(self._by_target(ranks), k, beta)
        else:
            super().solve(k, beta, ranks)

    def select(self, k: Budgets, ranks: Tensor) -> Any:
        """A selection of the units of highest rank that fit the budgets."""
        if ranks.dtype != torch.float32:
            return super().select(k, ranks)
        return self._rank_topk().solve_anew(self._by_target(ranks), k)[0]

    def sinkhorn(self, k: Budgets, beta: Sequence[float], init: Any) -> None:
        """By plain torch."""
        self._mine = False
        super().sinkhorn(k, beta, init)

    def _rank_topk(self) -> TopK:
        """The top-k of ranks that have nothing to do with θ."""
        if self._ranks_topk is None:
            problem, segments = self.problem, len(self.problem.segments)
            each = problem.units, problem.unit_costs, None, self.device
            self._ranks_topk = TopK(*each, problem.segment_of, segments)
        return self._ranks_topk

    def _by_target(self, units: Tensor) -> list[Tensor]:
        units = units.contiguous()
        return [units[here] for here in self.problem.slices]

    # ------------------------------------------------------------------ weights

    def put(self, which: Sequence[int]) -> None:
        """θ into the parameters of these targets."""
        x, parameters = self.kernels, self.kernels.some(which)
        tables = x.to_parameters.of(parameters), x.to_thetas.of(self.theta.views), x.pieces.table
        kinds = self._of_weights()
        x.write(("put", *kinds.values()), lambda: x.run(weights.put, *tables, **kinds), parameters)

    def take(self, which: Sequence[int]) -> None:
        """θ from these parameters, unless a gradient was not finite; entries that are not finite stay as they were."""
        x = self.kernels
        tables = x.to_parameters.of(x.some(which)), x.to_thetas.of(self.theta.views), x.pieces.table, x.bad, x.numbers
        kinds = self._of_weights()
        x.replay(("take", *kinds.values()), lambda: x.run(weights.take, *tables, FINE=FINE, **kinds))

    def check_weights(self, which: Sequence[int]) -> None:
        """Nothing: kernels look while they take."""

    def check_gradients(self, grads: Grads) -> None:
        """Name the first gradient that is not finite, and take them all away if there is one."""
        lie = zip(grads, self.kernels.parameters, strict=True)
        if all(g is None or (g.stride() == p.stride() and not g.is_sparse) for g, p in lie):
            self.kernels.check(grads)
        else:
            super().check_gradients(grads)

    def write(self, form: Form | None) -> None:
        """w into the parameters: masks are made on the way and never stored."""
        assert form is not None
        stored = self._stored(form)
        if stored is not None:
            x = self.kernels
            tables = x.to_parameters.of(x.parameters), x.to_thetas.of(self.theta.views), stored, x.pieces.table
            x.write("project stored", lambda: x.run(weights.project_stored, *tables, DTYPE=x.dtype))
        elif self.serves(form):
            self.project(form.mask is Mask.SOFT)
        else:
            super().write(form)

    def serves(self, form: Form) -> bool:
        """Whether kernels write what the form says."""
        return self._stored(form) is not None or (
            self._chosen(form) and form.project and form.mask in (Mask.ONE, Mask.SOFT)
        )

    def project(self, soft: bool) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters."""
        x, p, states = self.kernels, self.ranked, self.topk.states
        tables = x.to_parameters.of(x.parameters), x.to_thetas.of(self.theta.views), p.table, p.segments, p.factors
        kinds = {"SOFT": soft} | self._of_weights()
        state = states.floats, states.ints
        x.write(("project", *kinds.values()), lambda: x.run(weights.project, *tables, *state, pieces=p, **kinds))

    def _chosen(self, form: Form) -> bool:
        """Whether what is kept follows from θ by the kernels' own states."""
        return self._mine and self.power == 1.0 and form.own is None and form.stored is None and form.learned is None

    def _stored(self, form: Form) -> Tensor | None:
        """Where stored masks of bools lie, if the form has such a mask and kernels can read it."""
        if not (isinstance(form.mask, Stored) and self.problem.pattern.single and self.power == 1.0):
            return None
        mask = self.state.per_unit[form.mask.name]
        if mask.dtype != torch.bool or not mask.is_contiguous():
            return None
        return self._to_masks.of([mask[here] for here in self.problem.slices])

    def _of_weights(self) -> dict[str, Any]:
        """Of what kind parameters and θ are."""
        x = self.kernels
        return {"DTYPE": x.dtype, "ALIGNED": x.aligned(x.to_parameters, x.to_thetas)}

    # ------------------------------------------------------------------ gradients

    def turn(self, form: Form | None, grads: Grads) -> list[Tensor | None]:
        """Gradients for w into gradients for θ, in place."""
        assert form is not None
        turned = self.kernels.laid_out(self.with_missing(form, grads))
        if all(g is None for g in turned):
            return turned
        stored = self._stored(form) if form.back == KEPT else None
        if stored is not None:
            self.teach(form, turned)
            x, kind = self.kernels, self.kernels.kinds(turned)["GRAD"]
            tables = x.to_grads.of(turned), stored, x.pieces.table
            x.replay(("where stored", kind), lambda: x.run(gradient.where_stored, *tables, GRAD=kind))
        elif self._chosen(form) and form.couples:
            self.through_mask(turned)
        elif self._chosen(form) and form.back == KEPT:
            self.where_kept(turned)
        elif self._chosen(form) and isinstance(form.back, Where) and form.back.everywhere:
            return turned
        else:
            return super().turn(form, turned)
        return turned

    def through_mask(self, grads: Grads) -> None:
        """Through the soft mask, in place."""
        x, p, floats, out = self.kernels, self.ranked, self.topk.states.floats, self.flags.residuals
        tables = x.to_grads.of(grads), x.to_thetas.of(self.theta.views), p.table, p.segments, p.factors
        kinds = self._of_gradients(grads)

        def launch_all() -> None:
            x.run(gradient.pull, *tables, floats, self._sums, pieces=p, **kinds)
            gradient.ratios[(len(p.limits),)](
                tables[0], p.limits, self._sums, p.costs, floats, out, ROWS=512, num_warps=8
            )
            x.run(gradient.through_mask, *tables, p.costs, floats, out, pieces=p, **kinds)

        x.replay(("through_mask", *kinds.values()), launch_all)

    def where_kept(self, grads: Grads) -> None:
        """Zero where not kept, in place."""
        x, p, states = self.kernels, self.ranked, self.topk.states
        tables = x.to_grads.of(grads), x.to_thetas.of(self.theta.views), p.table, p.segments, p.factors
        kinds, state = self._of_gradients(grads), (states.floats, states.ints)
        x.replay(
            ("where_kept", *kinds.values()), lambda: x.run(gradient.where_kept, *tables, *state, pieces=p, **kinds)
        )

    def _of_gradients(self, grads: Grads) -> dict[str, Any]:
        """Of what kind gradients and θ are."""
        x = self.kernels
        return x.kinds(grads) | {"ALIGNED": x.aligned(x.to_grads, x.to_thetas)}

    # ------------------------------------------------------------------ going back, and saving

    def snapshot(self) -> Any:
        """θ, the masks, what the method knows, and the kernels' states."""
        return super().snapshot(), self.topk.states.copy(), self._mine

    def restore(self, snapshot: Any) -> None:
        """Go back."""
        rest, states, self._mine = snapshot
        super().restore(rest)
        self.topk.states.go_back(states)

    def go_on_from(self, solution: Mapping[str, Any]) -> None:
        """Take over masks that were saved, and start from them."""
        super().go_on_from(solution)
        duals = None if self.dual is None else self.dual.each()
        # A rescaled mask is a Sinkhorn iteration's, which kernels know nothing of.
        self._mine = self.a is not None and (duals is None or all(dual.scale == 1.0 for dual in duals))
        if self._mine:
            self.competing()
            self.topk.states.set(solution["a"], duals)
            self.topk.cold = False
            self.a = self.topk.states.selection()
            self.dual = None if duals is None else self.topk.states.duals([dual.beta for dual in duals])
