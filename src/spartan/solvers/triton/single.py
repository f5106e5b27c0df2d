"""Answers problems of single weights by Triton kernels: all segments in the same launches, nothing waits for the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import FINE, Flags, Grads
from spartan.solvers.forms import KEPT, Form, Mask, Stored, Where
from spartan.solvers.triton import gradient, weights
from spartan.solvers.triton.masks import KernelMasks
from spartan.solvers.triton.tables import Addresses


class TritonSolver(KernelMasks):
    """Launches the kernels of single weights. What they cannot do, plain torch does."""

    name = "triton"

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        self._to_masks = Addresses(self.device, before=self.kernels.replay.flush)

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Single weights."""
        return "" if problem.pattern.single else f"no kernels for {problem.pattern!r}"

    def put(self, which: Sequence[int]) -> None:
        """θ into the parameters of these targets."""
        x, parameters = self.kernels, self.kernels.some(which)
        tables = x.to_parameters.of(parameters), x.to_thetas.of(self._theta.views), x.pieces.table
        kinds = self._of_weights()
        x.write(("put", *kinds.values()), lambda: x.run(weights.put, *tables, **kinds), parameters)

    def take(self, which: Sequence[int]) -> None:
        """θ from these parameters, unless a gradient was not finite; entries that are not finite stay as they were."""
        x = self.kernels
        tables = x.to_parameters.of(x.some(which)), x.to_thetas.of(self._theta.views), x.pieces.table, x.bad, x.numbers
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
            tables = x.to_parameters.of(x.parameters), x.to_thetas.of(self._theta.views), stored, x.pieces.table
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
        tables = x.to_parameters.of(x.parameters), x.to_thetas.of(self._theta.views), p.table, p.segments, p.factors
        kinds = {"SOFT": soft} | self._of_weights()
        state = states.floats, states.ints
        x.write(("project", *kinds.values()), lambda: x.run(weights.project, *tables, *state, pieces=p, **kinds))

    def _chosen(self, form: Form) -> bool:
        """Whether what is kept follows from θ by the kernels' own states."""
        return self._mine and self.power == 1.0 and form.by_magnitude

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
        tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), p.table, p.segments, p.factors
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
        tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), p.table, p.segments, p.factors
        kinds, state = self._of_gradients(grads), (states.floats, states.ints)
        x.replay(
            ("where_kept", *kinds.values()), lambda: x.run(gradient.where_kept, *tables, *state, pieces=p, **kinds)
        )

    def _of_gradients(self, grads: Grads) -> dict[str, Any]:
        """Of what kind gradients and θ are."""
        x = self.kernels
        return x.kinds(grads) | {"ALIGNED": x.aligned(x.to_grads, x.to_thetas)}
