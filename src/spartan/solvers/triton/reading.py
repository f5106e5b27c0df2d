"""Tells where kernels of single weights read what a form says: thresholds, ranks, stored masks."""

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import Flags
from spartan.solvers.forms import VJP, Along, Form, Mask, Shifted, Shrunk, Stored
from spartan.solvers.triton import gradient, weights
from spartan.solvers.triton.launch import Sources
from spartan.solvers.triton.state import States
from spartan.solvers.triton.tables import Addresses
from spartan.solvers.triton.vectors import KernelVectors

LONGEST = 1024  # entries of a row that a program reads at a time


class Reading(NamedTuple):
    """Where kernels read A: the kind, and the tables of ranks, of stored masks, and of thresholds.

    Runs of m weights have no thresholds.
    """

    kind: Any
    ranks: Tensor | None
    masks: Tensor | None
    states: Any


class FormReader(KernelVectors):
    """Knows which forms kernels have, and gives them their tables."""

    has_along = False  # whether there is a kernel for what lies along θ

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        self._to_masks, self._to_more = (Addresses(self.device, replay=self.kernels.replay) for _ in range(2))
        self._damp_there = torch.zeros(len(problem.targets), dtype=torch.float64, device=self.device)
        self._damp_told: Tensor | None = None

    def redivided(self) -> None:
        """The problem has other segments now."""
        for made in ("row_scales", "bands"):
            self.__dict__.pop(made, None)
        super().redivided()

    def serves(self, form: Form) -> bool:
        """Whether kernels write what the form says."""
        if self.reading(form) is None:
            return False
        if isinstance(form.mask, Shrunk):
            return form.by_magnitude and (not form.mask.row_scale or self.row_scales is not None)
        return True

    def turns(self, form: Form) -> bool:
        """Whether kernels turn gradients as the form says."""
        reading = self.reading(form)
        if reading is None or (form.damp is not None and not self.damps(form)):
            return False
        if isinstance(form.back, Along):
            return self.has_along
        if form.back is not VJP.THROUGH:
            return True
        return (
            form.mask is Mask.SOFT
            or isinstance(form.mask, Shifted)
            or (isinstance(form.mask, Stored) and form.learned is None)
        )

    def damps(self, form: Form) -> bool:
        """Whether kernels damp gradients as the form says: not those of runs of weights."""
        return False

    def damp_of(self, form: Form) -> Tensor:
        """Where kernels read how much gradients are damped by: always the same place, so that launches are replayed."""
        if form.damp is not None and form.damp is not self._damp_told:
            self.kernels.replay.flush()
            self._damp_there.copy_(form.damp)
            self._damp_told = form.damp  # it lives on, so that no other comes to lie where it does
        return self._damp_there

    def reading(self, form: Form) -> Reading | None:
        """Where kernels read what is kept; None where they cannot."""
        if isinstance(form.mask, Shifted):
            return self._shifted(form.mask.name)
        if form.own is not None:
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
            return Reading(kind, None, self._to_masks.along(mask, self.starts), states)
        if form.learned is not None:
            if not self.chosen_by(form.learned):
                return None
            topk = self.topk_of("learned")
            ranks = topk.addresses.along(self.state.learned[form.learned], topk.starts)
            return Reading(weights.ABOVE, ranks, None, topk.states)
        return Reading(weights.ABOVE, None, None, states) if self._mine else None

    def sources(self, form: Form) -> Sources | None:
        """Where kernels read what the form names; None where more than that may differ from one step to the next."""
        if form.learned is not None or form.more is not None:
            return None
        if isinstance(form.mask, Shifted):
            shifts, topk = self.state.learned_per_target[form.mask.name], self.topk_of("ranks")
            known = self._saved is None and self.a is topk.states.selection()
            return (shifts.data_ptr(), topk.addresses.version) if known else None
        if form.stored is not None:
            return (
                None if form.damp is not None else (self.state.per_unit[form.stored].data_ptr(), self._to_masks.version)
            )
        damp = () if form.damp is None else (form.damp.data_ptr(),)
        return damp if self._mine and form.own is None else None

    def _shifted(self, name: str) -> Reading | None:
        """Ranks that a learned number per target moves; after a resume they are made once more."""
        topk, shifts = self.topk_of("ranks"), self.state.learned_per_target[name].detach()
        if shifts.dtype != torch.float32:
            return None
        if self._saved is not None:
            self._go_on_with(topk, *self._saved)
            self._saved = None
            topk.addresses.along(self.ranks_to_search(name), topk.starts)
        return (
            Reading(weights.ABOVE, topk.addresses.table, None, topk.states)
            if self.a is topk.states.selection()
            else None
        )

    def stored_more(self, mask: Tensor) -> Tensor:
        """Where another mask of bools lies."""
        return self._to_more.along(mask.contiguous(), self.starts)

    @cached_property
    def row_scales(self) -> "RowScales | None":
        """The rows of all targets; None where one's do not lie in one piece."""
        targets = self.problem.targets
        plain = all(t.axes.plain and t.local.stride(0) == math.prod(t.local.shape[1:]) for t in targets)
        return RowScales(self.problem, self.device) if plain else None


class RowScales:
    """The rows of all targets, what makes an output each: a number for every one of them."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        shapes = [t.local.shape for t in problem.targets]
        counts = [shape[0] for shape in shapes]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        longs = [math.prod(shape[1:]) for shape in shapes]
        owners = [i for i, n in enumerate(counts) for _ in range(n)]
        self.table = torch.tensor(list(zip(firsts, longs, strict=True)), dtype=torch.int64).to(device)
        self._owners = torch.tensor(owners, dtype=torch.int32).to(device)
        positions = [0] * len(problem.segments)  # among the units that are here
        places = []
        for s, n in zip(problem.segment_of, problem.units, strict=True):
            places.append((s, positions[s]))
            positions[s] += n
        self._places = torch.tensor(places, dtype=torch.int64).to(device)
        self._factors = torch.tensor(problem.factors, dtype=torch.float32).to(device)
        self.scales = torch.ones(len(owners), dtype=torch.float32, device=device)

    def launch(self, thetas: Tensor, states: States, dtype: Any, power: float) -> None:
        """Make up for the magnitude that is not kept."""
        weights.row_scales[(len(self.scales),)](
            thetas, *self._tables(states), self.scales, POWER=power, DTYPE=dtype, BLOCK=LONGEST, num_warps=4
        )

    def damp(self, grads: Tensor, parameters: Tensor, thetas: Tensor, by: Tensor, states: States, **kinds: Any) -> None:
        """Gradients outside A, times what of the length of their rows is kept."""
        gradient.damp[(len(self.scales),)](
            grads, parameters, thetas, by, *self._tables(states), BLOCK=LONGEST, num_warps=4, **kinds
        )

    def _tables(self, states: States) -> tuple[Tensor, ...]:
        return self._owners, self.table, self._places, self._factors, states.floats, states.ints
