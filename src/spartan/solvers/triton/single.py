"""Answers problems of single weights by Triton kernels: all segments in the same launches, nothing waits for the device."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import FINE, Flags, Grads
from spartan.solvers.forms import KEPT, VJP, Form, Mask, PerSegment, Shrunk, Stored, Where
from spartan.solvers.triton import gradient, weights
from spartan.solvers.triton.masks import KernelMasks
from spartan.solvers.triton.state import States
from spartan.solvers.triton.tables import Addresses, Numbers

LONGEST = 1024  # entries of a row that a program reads at a time


class Reading(NamedTuple):
    """Where kernels read A: the kind, and the tables of ranks, of stored masks, and of thresholds."""

    kind: Any
    ranks: Tensor | None
    masks: Tensor | None
    states: States


class TritonSolver(KernelMasks):
    """Launches the kernels of single weights. What they cannot do, plain torch does."""

    name = "triton"

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        flush, device = self.kernels.replay.flush, self.device
        self._to_masks, self._to_more, self._to_learned = (Addresses(device, before=flush) for _ in range(3))
        self._b_there = torch.empty(0), torch.empty(0)  # the thresholds of B, where kernels read them

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Single weights."""
        return "" if problem.pattern.single else f"no kernels for {problem.pattern!r}"

    def prepare(self) -> None:
        """Tables of what competes, and of what forms say of it."""
        super().prepare()
        n = len(self.problem.segments)
        self._factors_there, self._decay_there = (Numbers(n, self.device) for _ in range(2))
        self._taus = torch.zeros(n, dtype=torch.float64, device=self.device)
        self._found = torch.zeros(self.ranked.count, dtype=torch.float32, device=self.device)

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

    # ------------------------------------------------------------------ what forms say

    def serves(self, form: Form) -> bool:
        """Whether kernels write what the form says."""
        if self.reading(form) is None:
            return False
        if isinstance(form.mask, Shrunk):
            return form.by_magnitude and (not form.mask.row_scale or self._rows is not None)
        return True

    def turns(self, form: Form) -> bool:
        """Whether kernels turn gradients as the form says."""
        reading = self.reading(form)
        if reading is None or form.back is not VJP.THROUGH:
            return reading is not None
        return form.mask is Mask.SOFT or (isinstance(form.mask, Stored) and form.learned is None)

    def reading(self, form: Form) -> Reading | None:
        """Where kernels read what is kept; None where they cannot."""
        if form.own is not None or self.power != 1.0:
            return None
        states = self.topk.states
        if form.everything:
            return Reading(weights.EVERYTHING, None, None, states)
        if form.stored is not None:
            mask = self.state.per_unit[form.stored]
            numbers = isinstance(form.mask, Stored) and mask.dtype == torch.float32 and not form.project
            if not mask.is_contiguous() or not (numbers or mask.dtype == torch.bool):
                return None
            kind = weights.EVERYTHING if numbers else weights.STORED
            return Reading(kind, None, self._to_masks.of(self._by_target(mask)), states)
        if form.learned is not None:
            if self._by_learned != form.learned:
                return None
            return Reading(weights.ABOVE, self._learned_ranks(form.learned), None, self._learned_topk().states)
        return Reading(weights.ABOVE, None, None, states) if self._mine else None

    def _learned_ranks(self, name: str) -> Tensor:
        """Where learned ranks lie."""
        return self._learned_topk().addresses.of(self.learned_values(name))

    def write(self, form: Form | None) -> None:
        """w into the parameters: masks are made on the way and never stored."""
        assert form is not None
        if self.serves(form):
            self.project(form)
        else:
            super().write(form)

    def project(self, form: Form) -> None:
        """w = [kept] ⊙ mask ⊙ θ into the parameters."""
        x, p, reading = self.kernels, self.ranked, self.reading(form)
        assert reading is not None
        masks = {Mask.ONE: weights.ONE, Mask.SOFT: weights.SOFT}
        shrunk = form.mask if isinstance(form.mask, Shrunk) else None
        mask = weights.SHRUNK if shrunk else masks.get(form.mask, weights.ONE)  # type: ignore[arg-type]
        if isinstance(form.mask, Stored) and reading.kind is weights.EVERYTHING:
            mask = weights.NUMBERS
        rows = self._rows if shrunk is not None and shrunk.row_scale else None
        kept = reading.kind if form.project else weights.EVERYTHING
        kinds = {"KEPT": kept, "MASK": mask, "P": shrunk.p if shrunk else 1.0, **self._of_weights()}
        scales = (None, None) if rows is None else (rows.scales, rows.table)
        thetas, states = x.to_thetas.of(self._theta.views), reading.states
        tables = x.to_parameters.of(x.parameters), thetas, reading.ranks, reading.masks, self._taus, *scales
        rest = p.table, p.segments, p.factors, states.floats, states.ints

        def launch() -> None:
            if shrunk is not None:
                self._launch_below(thetas)
            if rows is not None:
                rows.launch(thetas, states, x.dtype)
            x.run(weights.project, *tables, *rest, pieces=p, **kinds)

        names = *(k.value if hasattr(k, "value") else k for k in kinds.values()), rows is not None
        x.write(("project", form.learned, *names), launch)

    def _launch_below(self, thetas: Tensor) -> None:
        """τ of every segment."""
        x, p, states = self.kernels, self.ranked, self.topk.states
        kinds = {"DTYPE": x.dtype, "ALIGNED": x.aligned(x.to_thetas)}
        tables = thetas, p.table, p.segments, p.factors, states.floats, states.ints, self._found
        x.run(weights.largest_below, *tables, pieces=p, **kinds)
        weights.below[(len(p.limits),)](
            p.limits, self._found, states.floats, states.ints, self._taus, ROWS=512, num_warps=4
        )

    @cached_property
    def _rows(self) -> "Rows | None":
        """The rows of all targets; None where one's do not lie in one piece."""
        targets = self.problem.targets
        plain = all(t.axes.plain and t.parameter.stride(0) == t.numel // t.shape[0] for t in targets)
        return Rows(self.problem, self.device) if plain else None

    def redivided(self) -> None:
        """The problem has other segments now."""
        self.__dict__.pop("_rows", None)
        super().redivided()

    def restart(self, where: Tensor, growing: bool = False) -> None:
        """θ ← 0 at these units; with `growing` only at the entries that the pattern starts from zero."""
        if growing or not self.problem.pattern.single:
            super().restart(where, growing)
            return
        x = self.kernels
        tables = x.to_thetas.of(self._theta.views), self._to_more.of(self._by_target(where)), x.pieces.table
        x.replay("restart", lambda: x.run(weights.restart, *tables, DTYPE=x.dtype))
        torch.autograd.graph.increment_version(self._theta.views)

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
        if not self.turns(form):
            return super().turn(form, turned)
        if form.back is VJP.THROUGH:
            self.through_mask(form, turned)
        else:
            self.teach(form, turned)
            if not form.back.everywhere:
                self.where(form, turned)
        return turned

    def through_mask(self, form: Form, grads: Grads) -> None:
        """Through the mask, in place: the slope of a soft one goes to what ranks."""
        x, p, reading = self.kernels, self.ranked, self.reading(form)
        assert reading is not None
        kinds, to_grads = self._of_gradients(grads), x.to_grads.of(grads)
        if isinstance(form.mask, Stored):
            masked = to_grads, reading.masks, x.pieces.table
            x.replay(("times", kinds["GRAD"]), lambda: x.run(gradient.times_mask, *masked, GRAD=kinds["GRAD"]))
            return
        thetas, floats, out = x.to_thetas.of(self._theta.views), reading.states.floats, self.flags.residuals
        tables = to_grads, thetas, p.table, p.segments, p.factors
        learned, add = (None, False) if form.learned is None else self._to_learn(form.learned)

        def launch_all() -> None:
            x.run(gradient.pull, *tables[:2], reading.ranks, *tables[2:], floats, self._sums, pieces=p, **kinds)
            gradient.ratios[(len(p.limits),)](
                tables[0], p.limits, self._sums, p.costs, floats, out, ROWS=512, num_warps=8
            )
            if learned is None:
                x.run(gradient.through_mask, *tables, p.costs, floats, out, pieces=p, **kinds)
            else:
                both = *tables[:2], reading.ranks, learned, p.table, p.segments, p.costs, floats, out
                plain = {key: kinds[key] for key in ("GRAD", "DTYPE")}
                x.run(gradient.through_learned, *both, pieces=p, ADD=add, **plain)

        x.replay(("through_mask", form.learned, add, *kinds.values()), launch_all)

    def where(self, form: Form, grads: Grads) -> None:
        """Factors on A, on B∖A and on the rest, in place."""
        x, reading = self.kernels, self.reading(form)
        assert reading is not None
        assert isinstance(form.back, Where)
        if reading.kind is weights.STORED and form.back == KEPT:
            kind, tables = x.kinds(grads)["GRAD"], (x.to_grads.of(grads), reading.masks, x.pieces.table)
            x.replay(("where stored", kind), lambda: x.run(gradient.where_stored, *tables, GRAD=kind))
        else:
            self._where_or_decay(form, form.back, grads, self._factors_there, None, False)

    def add_decay(self, form: Form, grads: Grads, scale: Tensor | None = None) -> None:
        """Add to gradients for θ what the form adds whatever the loss."""
        assert form.decay is not None
        alike = all(g is None or g.stride() == p.stride() for g, p in zip(grads, self.kernels.parameters, strict=True))
        if self.reading(form) is None or not alike:
            super().add_decay(form, grads, scale)
        else:
            self._where_or_decay(form, form.decay, grads, self._decay_there, scale, True)

    def _where_or_decay(
        self, form: Form, by: Where, grads: Grads, there: Numbers, scale: Tensor | None, decay: bool
    ) -> None:
        x, p, reading = self.kernels, self.ranked, self.reading(form)
        assert reading is not None
        more, more_masks = weights.EVERYTHING, None
        if by.b != by.c and form.more is not None:
            more, more_masks = weights.STORED, self._to_more.of(self._by_target(self.state.per_unit[form.more]))
        elif by.b != by.c and self.b is not None:
            more = weights.ABOVE
            if len(self._b_there[0]) != len(self.b.value):
                self._b_there = torch.empty_like(self.b.value), torch.empty_like(self.b.cut)
            self._b_there[0].copy_(self.b.value)
            self._b_there[1].copy_(self.b.cut)
        numbers = there.of([each(n, s) for s in range(len(self.problem.segments)) for n in (by.a, by.b, by.c)])
        kinds = {"KEPT": reading.kind, "MORE": more, "DECAY": decay, **self._of_gradients(grads)}
        sources = x.to_thetas.of(self._theta.views), reading.ranks, reading.masks, more_masks, numbers, scale
        tables = x.to_grads.of(grads), *sources, p.table, p.segments, p.factors
        states = reading.states.floats, reading.states.ints, *self._b_there

        def launch() -> None:
            x.run(gradient.where, *tables, *states, pieces=p, **kinds)

        names = (k.value if hasattr(k, "value") else k for k in kinds.values())
        if scale is None:
            x.replay(("where", form.learned, *names), launch)
        else:  # its address may change
            launch()

    def teach(self, form: Form, grads: Grads) -> None:
        """The gradient of learned ranks, into their `.grad`: g·θ, where masks are stored."""
        if form.learned is None or form.mask is Mask.ONE:
            return
        if self.power != 1.0 or not isinstance(form.mask, Stored) or not self.problem.pattern.single:
            super().teach(form, grads)
            return
        learned, add = self._to_learn(form.learned)
        x, kinds = self.kernels, {**self.kernels.kinds(grads), "ADD": add}
        tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), learned, x.pieces.table
        x.replay(("teach", *kinds.values()), lambda: x.run(gradient.teach, *tables, **kinds))

    def _to_learn(self, name: str) -> tuple[Tensor, bool]:
        """Where the gradient of learned ranks lies, and whether there is one to add to."""
        parameter = self.state.learned[name]
        add = parameter.grad is not None
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        return self._to_learned.of(self._by_target(parameter.grad)), add

    def _of_gradients(self, grads: Grads) -> dict[str, Any]:
        """Of what kind gradients and θ are."""
        x = self.kernels
        to_grads = x.to_grads
        to_grads.of(grads)
        return x.kinds(grads) | {"ALIGNED": x.aligned(to_grads, x.to_thetas)}


class ByMagnitude(TritonSolver):
    """What kernels of units of several weights know: masks by magnitude, of 1 or soft, and gradients through these."""

    def _known(self, form: Form) -> bool:
        return self._mine and self.power == 1.0 and form.by_magnitude and isinstance(form.mask, Mask)

    def serves(self, form: Form) -> bool:
        """Whether kernels write what the form says."""
        return self._known(form) and form.project

    def turns(self, form: Form) -> bool:
        """Whether kernels turn gradients as the form says."""
        return self._known(form) and (form.back is VJP.THROUGH or form.back == KEPT or form.back.everywhere)

    def reading(self, form: Form) -> Reading | None:
        """None: units of several weights are read in other ways."""
        return None


class Rows:
    """The rows of all targets, what makes an output each: a number for every one of them."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        counts = [t.shape[0] for t in problem.targets]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        longs = [t.numel // n for t, n in zip(problem.targets, counts, strict=True)]
        owners = [i for i, n in enumerate(counts) for _ in range(n)]
        self.table = torch.tensor(list(zip(firsts, longs, strict=True)), dtype=torch.int64).to(device)
        self._owners = torch.tensor(owners, dtype=torch.int32).to(device)
        places = list(zip(problem.segment_of, problem.first_position, strict=True))
        self._places = torch.tensor(places, dtype=torch.int64).to(device)
        self._factors = torch.tensor(problem.factors, dtype=torch.float32).to(device)
        self.scales = torch.ones(len(owners), dtype=torch.float32, device=device)

    def launch(self, thetas: Tensor, states: States, dtype: Any) -> None:
        """Make up for the magnitude that is not kept."""
        weights.row_scales[(len(self.scales),)](
            thetas, self._owners, self.table, self._places, self._factors, states.floats, states.ints, self.scales,
            DTYPE=dtype, BLOCK=LONGEST, num_warps=4,
        )  # fmt: skip


def each(number: PerSegment, segment: int) -> float:
    """A number of one segment."""
    return number[segment] if isinstance(number, tuple) else number
