"""Answers problems of single weights by Triton kernels: all segments in the same launches, nothing waits for the device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import FINE, Grads
from spartan.solvers.forms import Along, Form, Mask, Shifted, Shrunk, Stored, Where
from spartan.solvers.triton import gradient, powers, weights
from spartan.solvers.triton.reading import Reading
from spartan.solvers.triton.state import CUT
from spartan.solvers.triton.tables import Addresses
from spartan.solvers.triton.turning import KernelGradients, Launch, plain


class TritonSolver(KernelGradients):
    """Launches the kernels of single weights. What they cannot do, plain torch does."""

    name = "triton"
    bands: Any = None  # the rows of units, where units have several weights
    cut_in = CUT  # where states say whether any unit equal to the threshold is kept

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Single weights."""
        return "" if problem.pattern.single else f"no kernels for {problem.pattern!r}"

    def damps(self, form: Form) -> bool:
        """Whether kernels damp gradients as the form says."""
        if isinstance(form.back, Along):
            return self.bands is not None
        straight = isinstance(form.back, Where) and form.back.everywhere
        known = straight and form.by_magnitude and not form.everything and self.problem.pattern.single
        return known and self.row_scales is not None

    def put(self, which: Sequence[int]) -> None:
        """θ into the parameters of these targets."""
        x, parameters = self.kernels, self.kernels.some(which)
        tables = x.to_parameters.of(parameters), x.to_thetas.of(self._theta.views), x.pieces.table
        x.write("put", lambda: x.run(weights.put, *tables, DTYPE=x.dtype), parameters)

    def take(self, which: Sequence[int]) -> None:
        """θ from these parameters, unless a gradient was not finite; entries that are not finite stay as they were."""
        x = self.kernels
        tables = x.to_parameters.of(x.some(which)), x.to_thetas.of(self._theta.views), x.pieces.table, x.bad, x.numbers
        x.replay("take", lambda: x.run(weights.take, *tables, FINE=FINE, DTYPE=x.dtype))

    def pace(self, form: Form, which: Sequence[int]) -> None:
        """Of these parameters, which an optimizer has moved away from θ: let them go as far as the form says."""
        assert form.pace is not None
        if self.reading(form) is None:
            super().pace(form, which)
            return
        moved = self.kernels.some(which)
        key, launch, _ = self.where_launch(form, form.pace, moved, self.pace_there, gradient.PACE)
        self.kernels.write(key, launch, moved)

    def check_weights(self, which: Sequence[int]) -> None:
        """Nothing: kernels look while they take."""

    def check_gradients(self, grads: Grads) -> None:
        """Name the first gradient that is not finite, and take them all away if there is one."""
        if self.kernels.alike(grads):
            self.kernels.check(grads)
        else:
            super().check_gradients(grads)

    def write(self, form: Form | None) -> None:
        """w into the parameters: masks are made on the way and never stored."""
        assert form is not None
        x = self.kernels
        if last := x.before.of("write", form, x.to_parameters, x.parameters, self.sources(form)):
            x.write(*last)
        elif self.serves(form):
            self.project(form)
        else:
            super().write(form)

    def values(self) -> list[Tensor]:
        """θ, or ψ as the kernels make it, by slab: one at the threshold must not come out above it."""
        if self.power == 1.0 or not self.problem.pattern.single:
            return super().values()
        found, x = [torch.empty_like(theta) for theta in self.theta.slabs], self.kernels
        there = Addresses(self.device).of(self.per_target(found))  # one of its own: it keeps what it lists
        tables = x.to_thetas.of(self._theta.views), there, x.pieces.table
        x.run(powers.values, *tables, DTYPE=x.dtype, POWER=self.power)
        return found

    def project(self, form: Form) -> None:
        """w = [kept] ⊙ mask ⊙ ψ into the parameters."""
        x, p, reading, mask = self.kernels, self.ranked, self.reading(form), self.kinds_of(form)
        assert reading is not None
        rows = self.row_scales if isinstance(form.mask, Shrunk) and form.mask.row_scale else None
        kinds = {**mask, "POWER": self.power, "DTYPE": x.dtype}
        scales = (None, None) if rows is None else (rows.scales, rows.table)
        thetas, states = x.to_thetas.of(self._theta.views), reading.states
        tables = x.to_parameters.of(x.parameters), thetas, reading.ranks, reading.masks, self._taus, *scales
        rest = p.table, p.segments, p.factors, states.floats, states.ints

        def launch() -> None:
            if rows is not None:
                rows.launch(thetas, states, x.dtype, self.power)
            x.run(weights.project, *tables, *rest, pieces=p, **kinds)

        key = "project", form.learned, *plain(kinds), rows is not None
        if mask["MASK"] in (weights.SHRUNK, weights.SHIFTED):
            self.write_below(form, key, lambda: self.launch_below(thetas, reading), launch)
        else:
            x.write(key, launch)
            x.before.note("write", form, x.to_parameters, self.sources(form), key, launch)

    def write_below(self, form: Form, key: Any, below: Launch, launch: Launch) -> None:
        """Launch what finds τ of every segment, then what reads it and writes parameters."""

        def launch_both() -> None:
            below()
            launch()

        x = self.kernels
        x.write(key, launch_both)
        x.before.note("write", form, x.to_parameters, self.sources(form), key, launch_both)

    def kinds_of(self, form: Form) -> dict[str, Any]:
        """What is kept and what the mask is, in the kernels' words."""
        reading, shrunk = self.reading(form), form.mask if isinstance(form.mask, Shrunk) else None
        assert reading is not None
        mask = weights.SOFT if form.mask is Mask.SOFT else weights.SHRUNK if shrunk else weights.ONE
        if isinstance(form.mask, Shifted):
            mask = weights.SHIFTED
        if isinstance(form.mask, Stored) and reading.kind is weights.EVERYTHING:
            mask = weights.NUMBERS
        kept = reading.kind if form.project else weights.EVERYTHING
        return {"KEPT": kept, "MASK": mask, "P": shrunk.p if shrunk else 1.0}

    def launch_below(self, thetas: Tensor, reading: Reading) -> None:
        """τ of every segment."""
        x, p, states = self.kernels, self.ranked, reading.states
        tables = thetas, reading.ranks, p.table, p.segments, p.factors, states.floats, states.ints, self._found
        x.run(weights.largest_below, *tables, pieces=p, POWER=self.power, DTYPE=x.dtype, CUT=self.cut_in)
        weights.below[(len(p.limits),)](
            p.limits, self._found, states.floats, states.ints, self._taus, ROWS=512, CUT=self.cut_in, num_warps=4
        )

    def where(self, form: Form, grads: Grads) -> None:
        """Factors on A, on B∖A and on the rest, or outside A what of its output is kept, in place; the model holds w."""
        if form.damp is None:
            super().where(form, grads)
            return
        x, reading, rows, kinds = self.kernels, self.reading(form), self.row_scales, self._kinds(grads)
        assert reading is not None
        assert rows is not None
        to_parameters, by, key = x.to_parameters.of(x.parameters), self.damp_of(form), ("damp", *plain(kinds))
        tables = x.to_grads.of(grads), to_parameters, x.to_thetas.of(self._theta.views), by, reading.states
        if self.power == 1.0:
            self.replay_turn(form, key, lambda: rows.damp(*tables, **kinds))
        else:
            x.replay(key, lambda: rows.damp(*tables, **kinds))
            self._times_slope(grads)

    def restart(self, where: Tensor, growing: bool = False) -> None:
        """θ ← 0 at these units; with `growing` only at the entries that the pattern starts from zero."""
        if growing and any(self.problem.growing(i) is not None for i in range(len(self.problem.targets))):
            super().restart(where, growing)
            return
        self.kernels.replay("restart", self.launch_restart(self.stored_more(where)))
        torch.autograd.graph.increment_version(self._theta.views)

    def launch_restart(self, masks: Tensor) -> Callable[[], None]:
        """What launches `restart`."""
        x = self.kernels
        tables = x.to_thetas.of(self._theta.views), masks, x.pieces.table
        return lambda: x.run(weights.restart, *tables, DTYPE=x.dtype)
