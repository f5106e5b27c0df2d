"""Answers problems with n of every m weights kept by Triton kernels.

Every run of m is solved where its mask is needed, in registers: neither masks nor the duals of the runs, which would be
2/m as many numbers as there are weights, are stored.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spartan.ops import rows
from spartan.problem.problem import Problem
from spartan.problem.targets import Target
from spartan.solvers.base import Grads
from spartan.solvers.forms import Form, Mask, Shrunk
from spartan.solvers.pools import Budgets
from spartan.solvers.rows import Rows
from spartan.solvers.torch import TorchSolver
from spartan.solvers.triton import nm, runs, weights
from spartan.solvers.triton.reading import Reading
from spartan.solvers.triton.single import TritonSolver
from spartan.solvers.triton.tables import Addresses, Numbers, Pieces
from spartan.solvers.triton.turning import plain

TILE = 2048  # entries that a program holds at once
LONGEST_RUN = 64  # every entry is compared with all of its run
AXES, INNER = 4, 3  # of a weight in memory, and of an output, as kernels count them


class RowSolver(TritonSolver):
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
        problem, m, device = self.problem, self.problem.pattern.rows or 1, self.device
        lanes, strides = 1 << (m - 1).bit_length(), [t.local.stride(t.axes.inputs) for t in problem.targets]
        self._tile = {"M": m, "LANES": lanes, "R": TILE // lanes}
        self._passes = {"PASSES": rows.PASSES[torch.float32]}
        self._side_by_side = set(strides) == {1} and m == lanes
        owners: dict[str, Any] = {"owners": problem.segment_of, "segments": len(problem.segments)}
        each = problem.unit_costs, problem.factors, device, TILE // lanes
        self.ranked = Pieces([n // m for n in problem.units], *each, **owners)
        self._strides = torch.tensor(strides, dtype=torch.int32).to(device)
        orders = [order_of(t, m) for t in problem.targets]
        known = [x for x in orders if x is not None]
        # Where all runs stand in vectors as they do in memory, there is nothing to look up.
        self._turned = any(x[AXES - 1] != n // m for x, n in zip(known, problem.units, strict=False))
        self._orders = torch.tensor(known, dtype=torch.int32).to(device) if len(known) == len(orders) else None
        self._numbers_there = Numbers(len(problem.segments), device)  # β, n and the n of B
        self._to_ranks, self._to_given, self._to_found = (
            Addresses(device, replay=self.kernels.replay) for _ in range(3)
        )
        self.prepare_gradients()

    def solve(
        self,
        k: Budgets,
        beta: Sequence[float] | None = None,
        ranks: Tensor | None = None,
        learned: str | None = None,
        shifted: str | None = None,
    ) -> None:
        """How many of every run are kept, and with a β their soft masks; what ranks is read when they are used."""
        self._by_torch = ranks is not None or shifted is not None or self.power != 1.0
        if self._by_torch:
            TorchSolver.solve(self, k, beta, ranks, learned, shifted)
            return
        self.a = self.pools.select(torch.empty(0), k)
        self.dual = None if beta is None else self.pools.duals(beta, self.a.n)

    def select(self, k: Budgets, ranks: Tensor) -> Any:
        """n of every run."""
        return TorchSolver.select(self, k, ranks)

    def top(self, k: Budgets, ranks: Tensor, among: Tensor | None = None, near: str | None = None) -> Tensor:
        """Bool per unit: the n of highest rank of every run, among all or some; ties by position."""
        if ranks.dtype != torch.float32:
            return TorchSolver.top(self, k, ranks, among)
        given = ranks if among is None else torch.where(among, ranks, -torch.inf)
        n, found = self.pools.select(ranks, k).n, torch.empty_like(ranks, dtype=torch.bool)
        count, tile = self.count // self._tile["M"], self._tile
        every = (-(-count // tile["R"]),)
        runs.keep[every](given.contiguous(), found.view(torch.int8), n, count, num_warps=8, **tile)
        return found if among is None else found & among

    def go_on_from(self, solution: Mapping[str, Any]) -> None:
        """Take over n and β."""
        TorchSolver.go_on_from(self, solution)

    def reading(self, form: Form) -> Reading | None:
        """Where kernels read what ranks, or what is stored: n and β are all that they need beside."""
        if form.own is not None or self.power != 1.0 or (form.mask is Mask.SOFT and self.dual.solved):
            return None
        if form.everything:
            return Reading(weights.EVERYTHING, None, None, None)
        if form.stored is None and form.learned is None:
            return Reading(weights.ABOVE, None, None, None)
        given = self.state.learned[form.learned or ""] if form.stored is None else self.state.per_unit[form.stored]
        right = given.dtype == (torch.float32 if form.stored is None else torch.bool) and given.is_contiguous()
        if self._orders is None or not right:
            return None
        if form.stored is None:
            return Reading(weights.ABOVE, self._to_ranks.along(given, self.starts), None, None)
        return Reading(weights.STORED, None, self._to_masks.along(given, self.starts), None)

    @cached_property
    def row_scales(self) -> "OutputScales | None":  # type: ignore[override]
        """What makes up for the magnitude that each output has lost; None where one lies in a way of its own."""
        lines = [line_of(t, self._tile["M"]) for t in self.problem.targets]
        known = [x for x in lines if x is not None]
        whole = len(known) == len(lines) and self._orders is not None
        return OutputScales(self.problem, known, self._tile["M"], self.device) if whole else None

    def _tell(self) -> Tensor:
        """β, n and the n of B of every segment, where kernels read them."""
        n, more = (0.0 if x is None else float(x.n) for x in (self.a, self.b))
        beta = [0.0] * len(self.problem.segments) if self.dual is None else self.dual.beta
        return self._numbers_there.of([x for b in beta for x in (float(b), n, more)])

    def _over_runs(self, kernel: Any, *arguments: Any, **kinds: Any) -> None:
        p = self.ranked
        tables = p.table, p.segments, self._strides, self._orders, p.factors, self._numbers_there.there
        kernel[(p.count,)](*arguments, *tables, **self._tile, TURNED=self._turned, num_warps=8, **kinds)

    def project(self, form: Form) -> None:
        """w = [kept] ⊙ mask ⊙ θ into the parameters."""
        x, reading = self.kernels, self.reading(form)
        assert reading is not None
        x.replay.flush_if("project")  # it has not read its numbers yet
        numbers = self._tell()
        outputs = self.row_scales if isinstance(form.mask, Shrunk) and form.mask.row_scale else None
        thetas = x.to_thetas.of(self._theta.views)
        scales = (None, None) if outputs is None else (outputs.scales, outputs.rows)
        tables = x.to_parameters.of(x.parameters), thetas, reading.ranks, reading.masks, *scales
        kinds = {
            **self.kinds_of(form),
            "WIDE": self._side_by_side and on_words(x.parameters, self._theta.views),
            "DTYPE": x.dtype,
        }

        def launch() -> None:
            if outputs is not None:
                given = self._on_shifts.stretches, self.ranked.segments, self._strides, self.ranked.factors, numbers
                outputs.launch(thetas, given, {**self._tile, "DTYPE": x.dtype})
            self._over_runs(nm.project, *tables, **kinds, **self._passes)

        x.write(("project", form.learned, *plain(kinds), outputs is not None), launch)

    def scores(self) -> Tensor:
        """u of every unit."""
        if self.power != 1.0 or self._orders is None:
            return super().scores()
        x, found = self.kernels, torch.empty(self.count, dtype=torch.float32, device=self.device)
        tables = x.to_thetas.of(self.theta.views), self._to_found.along(found, self.starts)
        self._over_runs(runs.scores, *tables, DTYPE=x.dtype, WIDE=self._side_by_side and on_words(self._theta.views))
        return found

    def products(self, grads: Sequence[Tensor | None]) -> Tensor:
        """g·θ of every unit; a missing gradient counts as zero."""
        if self.power != 1.0 or self._orders is None or not self.kernels.readable(grads):
            return super().products(grads)
        x, found = self.kernels, torch.empty(self.count, dtype=torch.float32, device=self.device)
        tables = self._to_given.of(grads), x.to_thetas.of(self.theta.views), self._to_found.along(found, self.starts)
        self._over_runs(
            runs.products, *tables, **x.kinds(grads), WIDE=self._side_by_side and on_words(grads, self._theta.views)
        )
        return found

    def launch_restart(self, masks: Tensor) -> Callable[[], None]:
        """What launches `restart`."""
        x = self.kernels
        tables, wide = (x.to_thetas.of(self._theta.views), masks), self._side_by_side and on_words(self._theta.views)
        return lambda: self._over_runs(runs.restart, *tables, DTYPE=x.dtype, WIDE=wide)

    def restart(self, where: Tensor, growing: bool = False) -> None:
        """θ ← 0 at these units."""
        if self._orders is None:
            TorchSolver.restart(self, where, growing)
        else:
            super().restart(where, growing)

    def through_mask(self, form: Form, grads: Grads) -> None:
        """Through the soft mask, in place: its slope goes to what ranks."""
        x, reading = self.kernels, self.reading(form)
        assert reading is not None
        self._tell()
        learned, add = (None, False) if form.learned is None else self._to_learn(form.learned)
        tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), reading.ranks, learned
        kinds = {**x.kinds(grads), "ADD": add, "WIDE": self._side_by_side and on_words(grads, self._theta.views)}
        key = "through_mask", form.learned, *kinds.values()
        x.replay(key, lambda: self._over_runs(nm.through_mask, *tables, **kinds, **self._passes))

    def place_b(self) -> None:
        """Nothing: its n is told with that of A."""

    def launch_where(
        self, to: Addresses, grads: Grads, reading: Reading, rest: tuple[Tensor | None, ...], kinds: dict[str, Any]
    ) -> Callable[[], None]:
        """What launches `where`."""
        x = self.kernels
        self._tell()
        kinds["WIDE"] = self._side_by_side and on_words(grads, self._theta.views)
        given = {key: kind for key, kind in kinds.items() if key != "POWER"}
        tables = to.of(grads), x.to_thetas.of(self._theta.views), reading.ranks, reading.masks, *rest
        return lambda: self._over_runs(nm.where, *tables, **given)


class OutputScales:
    """A number for every output: what makes up for the magnitude that it has lost."""

    def __init__(self, problem: Problem, lines: list[list[int]], m: int, device: torch.device) -> None:
        counts = [n // (m * line[3]) for n, line in zip(problem.units, lines, strict=True)]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        pairs = list(zip(firsts, [line[3] for line in lines], strict=True))
        self.rows = torch.tensor(pairs, dtype=torch.int32).to(device)
        self._lines = torch.tensor(lines, dtype=torch.int32).to(device)
        owners = [i for i, n in enumerate(counts) for _ in range(n)]
        self._owners = torch.tensor(owners, dtype=torch.int32).to(device)
        self.scales = torch.ones(len(owners), dtype=torch.float32, device=device)
        self._longest = 1 << (max(line[3] for line in lines) - 1).bit_length()

    def launch(self, thetas: Tensor, given: tuple[Tensor | None, ...], kinds: dict[str, Any]) -> None:
        """Make up for the magnitude that is not kept."""
        tables = thetas, self._owners, self.rows, self._lines
        kinds["R"] = min(kinds["R"], self._longest)
        runs.row_scales[(len(self.scales),)](*tables, *given, self.scales, num_warps=4, **kinds)


def _axes_of(target: Target, m: int) -> list[tuple[int, int]]:
    """Matrices, outputs, kernel, runs of inputs, as vectors of units have them: sizes, and the way in memory along each."""
    weight, first = target.axes.turned(target.local), int(target.axes.stacked)
    sizes, strides = list(weight.shape), list(weight.stride())
    inputs = sizes.pop(first + 1) // m, strides.pop(first + 1) * m
    return [*zip(sizes, strides, strict=True), inputs]


def order_of(target: Target, m: int) -> list[int] | None:
    """How the runs of a weight stand in vectors of units: as `nm` reads it; None for more axes than it does.

    Example:
        >>> weight = torch.nn.Parameter(torch.empty(6, 8, 3, 3))
        >>> order_of(Target(("w",), weight, torch.nn.Identity(), "weight"), 4)
        [1, 6, 2, 9, 0, 18, 1, 2]
    """
    axes = _axes_of(target, m)
    ways = [1] * len(axes)
    for i in reversed(range(len(axes) - 1)):
        ways[i] = ways[i + 1] * axes[i + 1][0]
    sizes = [(stride, n, way) for (n, stride), way in zip(axes, ways, strict=True) if n > 1]
    return _merged([(n, way) for _, n, way in sorted(sizes, reverse=True)], AXES)


def line_of(target: Target, m: int) -> list[int] | None:
    """How the runs of an output lie in memory: as `runs` reads it; None for more axes than it does."""
    axes, stacked = _axes_of(target, m), target.axes.stacked
    (outputs, step), rest = axes[int(stacked)], axes[1 + int(stacked) :]
    inner = _merged(sorted(((n, stride) for n, stride in rest if n > 1), key=lambda x: -x[1]), INNER)
    count = 1
    for n, _ in rest:
        count *= n
    return None if inner is None else [outputs, axes[0][1] if stacked else 0, step, count, *inner]


def _merged(axes: list[tuple[int, int]], most: int) -> list[int] | None:
    """Sizes, then ways, of so many axes; those that go on in one another are one."""
    found: list[tuple[int, int]] = []
    for n, way in axes:
        if found and found[-1][1] == n * way:
            found[-1] = found[-1][0] * n, way
        else:
            found.append((n, way))
    if len(found) > most:
        return None
    filled = [(1, 0)] * (most - len(found)) + found
    return [n for n, _ in filled] + [way for _, way in filled]


def on_words(*lists: Sequence[Tensor | None]) -> bool:
    """Whether all tensors begin at multiples of 16 bytes."""
    return all(t is None or t.data_ptr() % 16 == 0 for x in lists for t in x)
