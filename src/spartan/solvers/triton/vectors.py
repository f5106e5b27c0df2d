"""Works on vectors of units by Triton kernels: random numbers, and numbers that are brought within a budget."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from spartan.ops.drawing import key_of
from spartan.problem.schedules import Moment
from spartan.solvers import clipping
from spartan.solvers.base import Grads
from spartan.solvers.triton import drawing
from spartan.solvers.triton.masks import KernelMasks
from spartan.solvers.triton.tables import Addresses, Pieces
from spartan.solvers.units import send

BLOCK = 2048


class KernelVectors(KernelMasks):
    """What methods ask of vectors of units, without a launch per target."""

    draws_in_torch = False  # where units are numbered otherwise than they lie here

    @cached_property
    def _vectors(self) -> "Vectors":
        return Vectors(self)

    def redivided(self) -> None:
        """The problem has other segments now."""
        self.__dict__.pop("_vectors", None)
        super().redivided()

    def random(self, at: Moment) -> Tensor:
        """A random number in (0, 1) per unit, of this run and step."""
        x = self._vectors
        if x.orders is None:
            return super().random(at)
        found = torch.empty(self.count, dtype=torch.float32, device=self.device)
        tables = x.starts_there, x.pieces.table, x.orders
        drawing.uniform[(x.pieces.count,)](found, *tables, *key_of(at.seed, at.step), BLOCK=BLOCK, num_warps=8)
        return found

    def shifted(self, name: str, u: Tensor | None = None) -> Tensor:
        """z = u − sigmoid(s) of every unit; where u is not given, from what other kernels make of θ."""
        shifts = self.state.learned_per_target[name].detach()
        if u is not None or not self.problem.pattern.single or shifts.dtype != torch.float32:
            return super().shifted(name, u)
        found = torch.empty(self.count, dtype=torch.float32, device=self.device)
        self.kernels.replay.flush()
        self._launch_shift(shifts, found)()
        return found

    def ranks_to_search(self, name: str) -> Tensor:
        """The same where they stay until the next search: in one place, so that launches are replayed."""
        shifts = self.state.learned_per_target[name].detach()
        if not self.problem.pattern.single or shifts.dtype != torch.float32:
            return self.shifted(name)
        self.kernels.replay(("shift", shifts.data_ptr()), self._launch_shift(shifts, self._vectors.shifted))
        return self._vectors.shifted

    def _launch_shift(self, shifts: Tensor, to: Tensor) -> Callable[[], None]:
        x, v = self.kernels, self._vectors
        tables = x.to_thetas.of(self._theta.views), shifts, to, v.starts_there, v.pieces.table, v.pieces.factors
        return lambda: x.run(drawing.shift_ranks, *tables, pieces=v.pieces, POWER=self.power, DTYPE=x.dtype)

    def sample(self, s: str, m: str, beta: float, at: Moment) -> None:
        """m ← sigmoid(β·(logit s + logit U)), U those of `random`."""
        units, v = self.state.per_unit, self._vectors
        if v.orders is None or units[s].dtype != torch.float32 or self.draws_in_torch:
            super().sample(s, m, beta, at)
            return
        found, tables = torch.empty_like(units[s]), (v.starts_there, v.pieces.table, v.orders)
        drawn = *tables, *key_of(at.seed, at.step), beta
        drawing.sample[(v.pieces.count,)](units[s], found, *drawn, BLOCK=BLOCK, num_warps=8)
        units[m] = found

    def sample_gradient(self, s: str, m: str, out: str, beta: float, grads: Grads) -> None:
        """∂L/∂s of every unit where w = m·θ."""
        units, x, v = self.state.per_unit, self.kernels, self._vectors
        if not self.problem.pattern.single or units[s].dtype != torch.float32 or not x.readable(grads):
            super().sample_gradient(s, m, out, beta, grads)
            return
        x.replay.flush()
        units[out] = torch.empty_like(units[s])
        tables = units[s], units[m], units[out], v.starts_there, v.pieces.table, beta
        there = x.to_grads.of(grads), x.to_thetas.of(self._theta.views)
        x.run(drawing.sample_gradient, *there, *tables, pieces=v.pieces, POWER=self.power, **x.kinds(grads))

    def adam(self, names: Sequence[str], rate: float, betas: tuple[float, float], eps: float, t: int) -> None:
        """Adam's t-th step, into tensors of its own: a failed step goes back to the old ones."""
        units, (one, two) = self.state.per_unit, betas
        old = [units[name] for name in names]
        if any(vector.dtype != torch.float32 or not vector.is_contiguous() for vector in old):
            super().adam(names, rate, betas, eps, t)
            return
        new = [torch.empty_like(vector) for vector in old[:3]]
        numbers = self.count, rate, 1.0 - one, 1.0 - two, 1.0 - one**t, 1.0 - two**t, eps
        drawing.adam[(-(-self.count // BLOCK),)](*old, *new, *numbers, BLOCK=BLOCK, num_warps=8)
        units.update(zip(names, new, strict=False))
        del units[names[3]]

    def within_budget(self, s: Tensor) -> Tensor:
        """The nearest numbers in [0, 1], one per unit, whose cost fits the budgets."""
        if s.dtype != torch.float32:
            return super().within_budget(s)
        return self._vectors.within_budget(s.contiguous(), self.k)


class Vectors:
    """Tables for kernels that work on vectors of units."""

    def __init__(self, solver: KernelMasks) -> None:
        problem, device = solver.problem, solver.device
        many = {"owners": problem.segment_of, "segments": len(problem.segments)}
        self.pieces = Pieces(problem.units, problem.unit_costs, problem.factors, device, **many)  # type: ignore[arg-type]
        self.starts = [here.start for here in problem.slices]
        self.starts_there = torch.tensor(self.starts, dtype=torch.int64).to(device)
        self.orders = self._orders(solver)
        self._relative = self.pieces.costs / max(problem.unit_costs)
        self._found = torch.zeros(self.pieces.count, 3, dtype=torch.float64, device=device)
        self._known = torch.zeros(len(problem.segments), drawing.KNOWN.value, dtype=torch.float64, device=device)
        self._budgets = torch.zeros(len(problem.segments), dtype=torch.float64, device=device)
        self._told: list[float] = []
        self._count = solver.count
        self._from, self._to, self._replay = Addresses(device), Addresses(device), solver.kernels.replay

    @cached_property
    def shifted(self) -> Tensor:
        """Room for ranks."""
        return torch.empty(self._count, dtype=torch.float32, device=self._found.device)

    def _orders(self, solver: KernelMasks) -> Tensor | None:
        """How units lie in memory, and their keys; None where that is neither row-major nor with the channels last."""
        found = []
        for target, key in zip(solver.problem.targets, solver.target_keys, strict=True):
            parameter, turned = target.parameter, (1, 1)
            if solver.problem.pattern.single and solver.problem.by_memory and not parameter.is_contiguous():
                if parameter.ndim != 4 or not parameter.is_contiguous(memory_format=torch.channels_last):
                    return None
                turned = parameter.shape[1], parameter.shape[2] * parameter.shape[3]
            found.append((*turned, *key))
        return torch.tensor(found, dtype=torch.int64).to(solver.device)

    def within_budget(self, s: Tensor, budgets: list[float]) -> Tensor:
        """`clipping.within_budget`, by kernels."""
        p, known, found, out = self.pieces, self._known, self._found, torch.empty_like(s)
        if budgets != self._told:
            self._budgets.copy_(send(budgets, s.device), non_blocking=True)
            self._told = list(budgets)
        values, to = self._from.along(s, self.starts), self._to.along(out, self.starts)
        sums, segments = {"BLOCK": BLOCK, "num_warps": 8}, {"ROWS": 512, "num_warps": 4}

        def launch() -> None:
            every, each = (p.count,), (len(p.limits),)
            for number in range(clipping.PASSES):
                first = {"FIRST": number == 0}
                drawing.shifted[every](values, p.table, p.segments, self._relative, known, found, **first, **sums)
                drawing.step[each](p.limits, found, p.costs, self._relative, self._budgets, known, **first, **segments)
            drawing.clip[every](values, to, p.table, p.segments, self._relative, known, **sums)

        self._replay.flush()  # addresses have changed, and this does not wait
        self._replay.run("within budget", launch)
        return out
