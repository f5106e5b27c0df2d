"""Answers problems of blocks, rows and columns of a weight by Triton kernels."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import Grads
from spartan.solvers.forms import Along, Form, Shrunk, Stored
from spartan.solvers.triton import slopes as of_units
from spartan.solvers.triton import spread, units, weights
from spartan.solvers.triton.launch import DTYPES
from spartan.solvers.triton.reading import LONGEST, Reading
from spartan.solvers.triton.single import TritonSolver
from spartan.solvers.triton.state import States
from spartan.solvers.triton.tables import Addresses, Pieces
from spartan.solvers.triton.turning import plain

TILE = 2048  # entries that a program holds at once


class Grid(NamedTuple):
    """How a matrix divides into units: how many down, the rows of each, how many across, the columns of each.

    `step` is the way in memory from one row to the next. `columns` is where in a row each column lies, None in order.
    """

    down: int
    h: int
    across: int
    w: int
    step: int
    columns: Tensor | None


class BlockSolver(TritonSolver):
    """Launches the kernels of units that are rectangles of a weight seen as a matrix."""

    has_along = True

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Rectangles, in weights whose places fit 32 bits."""
        if problem.pattern.rows is not None or None in _sides(problem):
            return f"no kernels for {problem.pattern!r}"
        return "a weight of 2³¹ entries or more" if any(t.local.numel() >= 1 << 31 for t in problem.targets) else ""

    def prepare(self) -> None:
        """Tables of the units, by segment."""
        problem, device = self.problem, self.device
        weights = [t.axes.matrix(t.local) for t in problem.targets]
        pairs = zip(weights, _sides(problem), strict=True)
        grids = [grid_of(weight, *side) for weight, side in pairs if weight is not None and side is not None]
        widest = max(g.w for g in grids)
        self._tile: dict[str, Any] = {"W": min(TILE, 1 << (widest - 1).bit_length())}
        self._tile["U"] = TILE // self._tile["W"]
        self._tile["INLINE"] = inline = all(g.columns is None for g in grids)
        self._grain = math.gcd(8, *(side for g in grids for side in (g.w, g.step))) if inline else 1
        owners: dict[str, Any] = {"owners": problem.segment_of, "segments": len(problem.segments)}
        numbers = [g.down * g.across for g in grids]
        self.ranked = Pieces(numbers, problem.unit_costs, problem.factors, device, smallest=self._tile["U"], **owners)
        columns, rows = [torch.empty(0, dtype=torch.int32)], []
        for g in grids:
            rows.append((g.h, g.across, g.w, g.step, sum(c.numel() for c in columns)))
            if not self._tile["INLINE"]:
                columns.append(torch.arange(g.across * g.w, dtype=torch.int32) if g.columns is None else g.columns)
        bases = torch.tensor([here.start for here in problem.slices], dtype=torch.int64).to(device)
        self._grids = bases, torch.tensor(rows, dtype=torch.int32).to(device), torch.cat(columns).to(device)
        # u, G = Σ g·θ and a mask of every unit; what the gradients sum of each piece.
        self._u, self._pulls, self._masks = torch.zeros(3, sum(numbers), dtype=torch.float32, device=device)
        self._sums = torch.zeros(self.ranked.count, 4, dtype=torch.float64, device=device)
        self._u_by_target = [self._u[here] for here in problem.slices]
        self._u_there = Addresses(device, fixed=True).of(self._u_by_target)
        self.topk = self.make_topk(numbers, problem.unit_costs, None, device, **owners, replay=self.kernels.replay)
        self.prepare_gradients()
        replay = self.kernels.replay
        self._to_given, self._to_found = (Addresses(device, replay=replay) for _ in range(2))

    def _over_units(self, kernel: Any, *arguments: Any, **kinds: Any) -> None:
        kernel[(self.ranked.count,)](*arguments, num_warps=8, **self._tile, **kinds)

    def _grain_of(self, *tables: Addresses) -> dict[str, int]:
        """So many entries lie side by side wherever a unit has them, in memory that can be read as one word."""
        return {"GRAIN": self._grain if all(table.aligned for table in tables) else 1}

    def reading(self, form: Form) -> Reading | None:
        """Where kernels read what is kept; None where they cannot, and for powers of weights."""
        return None if self.power != 1.0 else super().reading(form)

    @cached_property
    def bands(self) -> "Bands | None":
        """The rows of units, with what of their length is kept."""
        return Bands(self.problem, self.device)

    @cached_property
    def row_scales(self) -> "BandScales":  # type: ignore[override]
        """What makes up for the magnitude that each row of units has lost."""
        return BandScales(self.problem, self.device)

    def competing(self) -> list[Tensor]:
        """u of every unit, summed from θ anew."""
        x, p = self.kernels, self.ranked
        tables = x.to_thetas.of(self._theta.views), p.table, *self._grids, p.factors, self._u
        kinds = {"DTYPE": x.dtype, **self._grain_of(x.to_thetas)}
        x.replay(("sum units", *kinds.values()), lambda: self._over_units(units.sum_units, *tables, **kinds))
        return self._u_by_target

    def scores(self) -> Tensor:
        """u of every unit, summed in the kernels' order: one at the threshold must not come out above it."""
        if self.power != 1.0:
            return super().scores()
        self.competing()
        self.kernels.replay.flush()
        return self._u.clone()

    def magnitudes(self, slabs: Sequence[Tensor]) -> Tensor:
        """Σ|x| of every unit, by its cost and the value power, of one tensor per target."""
        if not self.kernels.readable(slabs):
            return super().magnitudes(slabs)
        p, found = self.ranked, torch.empty_like(self._u)
        tables = self._to_given.of(slabs), p.table, *self._grids, p.factors, found
        self._over_units(units.sum_units, *tables, DTYPE=DTYPES[slabs[0].dtype], **self._grain_of(self._to_given))
        return found

    def products(self, grads: Sequence[Tensor | None]) -> Tensor:
        """G = Σ g·θ over every unit; a missing gradient counts as zero."""
        if self.power != 1.0 or not self.kernels.readable(grads):
            return super().products(grads)
        found = torch.empty_like(self._u)
        self._sum_products(grads, found)
        self.kernels.replay.flush()
        return found

    def _sum_products(self, grads: Sequence[Tensor | None], found: Tensor) -> None:
        x, sums = self.kernels, self._to_found.along(found, self.starts)
        tables = self._to_given.of(grads), x.to_thetas.of(self._theta.views), sums, self.ranked.table, *self._grids[1:]
        kinds = {**x.kinds(grads), **self._grain_of(self._to_given, x.to_thetas)}
        x.replay(("products", *kinds.values()), lambda: self._over_units(spread.sum_products, *tables, **kinds))

    def project(self, form: Form) -> None:
        """w = [kept] ⊙ mask ⊙ θ into the parameters."""
        x, p, reading, mask = self.kernels, self.ranked, self.reading(form), self.kinds_of(form)
        assert reading is not None
        bands = self.row_scales if isinstance(form.mask, Shrunk) and form.mask.row_scale else None
        thetas, states = x.to_thetas.of(self._theta.views), reading.states
        scales = (None, None) if bands is None else (bands.scales, bands.firsts)
        given = self._u, reading.ranks, reading.masks, self._taus, *scales, p.table, p.segments, *self._grids
        tables = x.to_parameters.of(x.parameters), thetas, *given, states.floats, states.ints
        kinds = {**mask, "DTYPE": x.dtype, **self._grain_of(x.to_parameters, x.to_thetas)}
        by_units = reading if reading.ranks is not None else reading._replace(ranks=self._u_there)

        def launch() -> None:
            if bands is not None:
                bands.launch(thetas, self._u, self._grids, states, {"DTYPE": x.dtype, "INLINE": self._tile["INLINE"]})
            self._over_units(spread.project, *tables, **kinds)

        key = "project", form.learned, *plain(kinds), bands is not None
        if mask["MASK"] in (weights.SHRUNK, weights.SHIFTED):
            self.write_below(form, key, lambda: self.launch_below(thetas, by_units), launch)
        else:
            x.write(key, launch)
            x.before.note("write", form, x.to_parameters, self.sources(form), key, launch)

    def launch_restart(self, masks: Tensor) -> Callable[[], None]:
        """What launches `restart`."""
        x = self.kernels
        tables = x.to_thetas.of(self._theta.views), masks, self.ranked.table, *self._grids[1:]
        return lambda: self._over_units(spread.restart, *tables, DTYPE=x.dtype, **self._grain_of(x.to_thetas))

    def through_mask(self, form: Form, grads: Grads) -> None:
        """Through the mask, in place: the slope of a soft one goes to what ranks."""
        x, p, reading = self.kernels, self.ranked, self.reading(form)
        assert reading is not None
        to_grads, floats, out = x.to_grads.of(grads), reading.states.floats, self.flags.residuals
        kinds = {**x.kinds(grads), **self._grain_of(x.to_grads, x.to_thetas)}
        soft = weights.NUMBERS if isinstance(form.mask, Stored) else weights.SOFT
        given = to_grads, reading.ranks, reading.masks, p.table, p.segments, *self._grids[1:], floats
        only = {"MASK": soft, "GRAD": kinds["GRAD"], "GRAIN": kinds["GRAIN"]}
        if soft is weights.NUMBERS:
            x.replay(("times", *plain(only)), lambda: self._over_units(spread.times_mask, *given, **only))
            return
        learned, add = (None, False) if form.learned is None else self._to_learn(form.learned)
        ranks = self._u if form.learned is None else self.state.learned[form.learned].detach()
        where = to_grads, x.to_thetas.of(self._theta.views), p.table, p.segments, *self._grids
        slopes = reading.ranks, self._pulls, learned, p.table, p.segments, self._grids[0], p.costs, floats, out

        def launch_pull() -> None:
            self._over_units(units.pull, *where, ranks, self._pulls, floats, self._sums, **kinds)

        def launch_turn() -> None:
            if learned is None:
                rest = p.factors, p.costs, self._u, self._pulls, floats, out
                self._over_units(units.through_mask, *where, *rest, **kinds)
            else:
                self._over_units(spread.times_mask, *given, **only)
                x.run(of_units.learn, *slopes, pieces=p, ADD=add)

        key = "through_mask", form.learned, add, ranks.data_ptr(), *kinds.values()
        self.pull_back(form, key, launch_pull, launch_turn, to_grads, floats)

    def where(self, form: Form, grads: Grads) -> None:
        """Factors on A, on B∖A and on the rest, or what lies along θ outside A, in place."""
        if not isinstance(form.back, Along):
            super().where(form, grads)
            return
        x, p, reading = self.kernels, self.ranked, self.reading(form)
        assert reading is not None
        bands, by = None if form.damp is None else self.bands, self.damp_of(form)
        shares = (None, None) if bands is None else (bands.shares, bands.firsts)
        given = self._u, reading.ranks, reading.masks, *shares, p.table, p.segments, *self._grids
        to_grads, thetas = x.to_grads.of(grads), x.to_thetas.of(self._theta.views)
        to_parameters, states = x.to_parameters.of(x.parameters), reading.states
        kinds = {"KEPT": reading.kind, **x.kinds(grads), **self._grain_of(x.to_grads, x.to_thetas)}

        def launch() -> None:
            if bands is not None:
                sides = {"DTYPE": x.dtype, "INLINE": self._tile["INLINE"]}
                bands.share(to_parameters, thetas, by, self._grids[1:], sides)
            self._over_units(spread.along, to_grads, thetas, *given, states.floats, states.ints, **kinds)

        key = "along", form.learned, bands is None, *plain(kinds)
        self.replay_turn(form, key, launch)

    def through_shift(self, name: str, form: Form, grads: Grads) -> None:
        """Through a mask that a learned number per target shifts, in place; and the sum over each target for that."""
        x, p, reading = self.kernels, self.ranked, self.reading(form)
        assert reading is not None
        states, kinds = reading.states, x.kinds(grads)
        self._sum_products(grads, self._pulls)
        given = self._u, reading.ranks, self._pulls, self._taus, self._masks, p.table, p.segments, self._grids[0]
        rest = p.factors, states.floats, states.ints, self._sums
        shifts = self.state.learned_per_target[name]
        learn = self._on_shifts.launch(shifts, self._sums)

        def launch_pull() -> None:
            x.run(of_units.of_shifted, *given, *rest, pieces=p)
            learn()

        x.replay(("on shift", shifts.data_ptr(), *plain(kinds)), launch_pull)
        tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), self._masks, self._pulls, p.table
        self._over_units(spread.bend, *tables, *self._grids, **kinds, **self._grain_of(x.to_grads, x.to_thetas))

    def launch_where(
        self, to: Addresses, grads: Grads, reading: Reading, rest: tuple[Tensor | None, ...], kinds: dict[str, Any]
    ) -> Callable[[], None]:
        """What launches `where`."""
        x, p, states = self.kernels, self.ranked, reading.states
        given = self._u, reading.ranks, reading.masks, *rest, p.table, p.segments, *self._grids
        tables = to.of(grads), x.to_thetas.of(self._theta.views), *given, states.floats, states.ints
        kinds["GRAIN"] = self._grain_of(to, x.to_thetas)["GRAIN"]
        mine = {key: kind for key, kind in kinds.items() if key != "POWER"}
        return lambda: self._over_units(spread.where, *tables, *self._b_there, **mine)


class Bands:
    """Rows of units side by side, and of their entries: a number for every band."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        rows, firsts, owners = [0], list[int](), list[int]()
        bands: list[tuple[int, int]] = []
        of_bands: list[int] = []
        for i, (target, side) in enumerate(zip(problem.targets, _sides(problem), strict=True)):
            matrix = target.axes.matrix(target.local)
            assert matrix is not None
            assert side is not None
            firsts.append(len(bands))
            bands += [(rows[-1] + first, side[0]) for first in range(0, matrix.shape[0], side[0])]
            of_bands += [i] * (len(bands) - firsts[-1])
            owners += [i] * matrix.shape[0]
            rows.append(rows[-1] + matrix.shape[0])
        tables = rows[:-1], bands, firsts
        self._rows, self._bands, self.firsts = (torch.tensor(x, dtype=torch.int64).to(device) for x in tables)
        self._owners, self._of_bands = (torch.tensor(x, dtype=torch.int32).to(device) for x in (owners, of_bands))
        self._lengths = torch.zeros(2 * len(owners), dtype=torch.float32, device=device)
        self.shares = torch.ones(len(bands), dtype=torch.float32, device=device)

    def share(
        self, parameters: Tensor, thetas: Tensor, by: Tensor, grids: tuple[Tensor, ...], kinds: dict[str, Any]
    ) -> None:
        """What of the length of each band is kept."""
        of_units.row_lengths[(len(self._owners),)](
            parameters, thetas, by, self._owners, self._rows, *grids, self._lengths,
            BLOCK=LONGEST, num_warps=4, **kinds,
        )  # fmt: skip
        given = self._lengths, self._bands, self._of_bands, by, self.shares
        of_units.band_shares[(len(self.shares),)](*given, ROWS=512, num_warps=4)


class BandScales(Bands):
    """What makes up for the magnitude that rows have lost."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        super().__init__(problem, device)
        places = list(zip(problem.segment_of, problem.first_position, strict=True))
        self._places = torch.tensor(places, dtype=torch.int64).to(device)
        self._found = torch.ones(len(self._owners), dtype=torch.float32, device=device)
        self.scales = torch.ones(len(self.shares), dtype=torch.float32, device=device)

    def launch(
        self, thetas: Tensor, u: Tensor, grids: tuple[Tensor, ...], states: States, kinds: dict[str, Any]
    ) -> None:
        """Make up for the magnitude that is not kept."""
        of_units.row_scales[(len(self._owners),)](
            thetas, u, self._owners, self._rows, self._places, *grids, states.floats, states.ints, self._found,
            BLOCK=LONGEST, num_warps=4, **kinds,
        )  # fmt: skip
        of_units.band_scales[(len(self.scales),)](self._found, self._bands, self.scales, ROWS=512, num_warps=4)


def _sides(problem: Problem) -> list[tuple[int, int] | None]:
    """The rows and columns of a unit of each target."""
    return [problem.pattern.sides(t.axes.shape(t.shape)) for t in problem.targets]


def grid_of(weight: Tensor, h: int, w: int) -> Grid:
    """The grid of a weight, seen as a matrix, with units of h × w.

    Example:
        >>> grid_of(torch.empty(8, 4, 2, 2), 4, 8)
        Grid(down=2, h=4, across=2, w=8, step=16, columns=None)
    """
    wide = math.prod(weight.shape[1:])
    columns = torch.zeros((), dtype=torch.int64)
    for n, stride in zip(weight.shape[1:], weight.stride()[1:], strict=True):
        columns = columns[..., None] + stride * torch.arange(n)
    # Of rows that are units the order does not matter, only that each lies in one piece.
    whole = w == wide and weight.stride(0) == wide
    inline = whole or bool((columns.reshape(-1) == torch.arange(wide)).all())
    where = None if inline else columns.reshape(-1).int()
    return Grid(weight.shape[0] // h, h, wide // w, w, weight.stride(0), where)
