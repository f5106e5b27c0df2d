"""Paced: what is pruned goes on learning, as fast as a set share of what is kept is exchanged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.schedules import Moment, Schedule, cubic
from spartan.solvers.base import Grads
from spartan.solvers.forms import STRAIGHT, Along, Form, Mask, Shrunk, Where
from spartan.solvers.masks import sums_of_outputs
from spartan.solvers.torch import TorchSolver

WINDOW = 5  # looks, of which there are a hundred in a run, over which an exchange is counted
SLOWEST, FASTEST = 0.02, 4.0
NORMED = 0.01  # of Σ ⟨g, w⟩² over Σ (g·w)²: far above where batch norm follows (under 1e-3), far below where not (0.05)


@register
@dataclass(frozen=True)
class Paced(Method):
    """Paced: top-k of magnitudes, whose pruned weights learn as fast as a set share of the kept ones is exchanged.

        A = top_k |θ|                                  w = θ · max(1 − (τ/u)ᵖ, 0)^(1/p) on A, as in Feather
        g ← g·min(1, s) outside A                      s: ‖w‖/‖θ‖ of the unit's outputs over that of the layer;
                                                       in layers that batch norm follows
        θ ← θ + Δ on A,  θ + f·Δ elsewhere             Δ: the optimizer's update, by the gradient for w straight through
        f ← f · (e/ê)^(1/5)                            a hundred times in a run
        θ ← (1 − l) · θ where pruned                   likewise

    ê is the share of A that came in over the last twentieth of the run, e what it should be: `exchange` times the
    sparsity of the moment, and from the end of the warm-up on falling to 0 with the time that is left; from then on f
    only falls. So the same setting explores as much whatever the optimizer, the learning rate, the size of weights and
    the length of the run are; a factor on gradients would not, as Adam takes it out again. The leak l makes pruned
    weights forget what they learned long ago: without an update they would lose `leak` e-folds in the run, most at first.

    Batch norm divides what an output gives by its size, and multiplies its gradients by as much: a few hundred times where
    an output has gone to zero, whose weights would then take the places of all others. So there gradients of pruned weights
    are about as large as those of outputs of which as much is kept as is usual in their layer. Which layers these are shows
    in the gradients: the loss does not depend on the size of their outputs, so that ⟨g, w⟩ = 0 for each. Of units of several
    weights, pruned ones get the part of their gradient along θ: any other makes them larger by chance.

    Args:
        exchange: what share of the kept weights is exchanged in a twentieth of the run, times the sparsity.
        leak: how many times over the run pruned weights would shrink to 1/e; 0 for none.
        p: how weights are shrunk near the threshold: 1 is soft thresholding, ∞ hard. Units of several weights and N:M
            have hard masks, whatever p: their magnitudes differ so little that almost nothing would be left of them.
        ramp: how the sparsity grows over the warm-up, from 0 to 1 of the final one.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=Paced(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    exchange: float = 0.22
    leak: float = 1.0
    p: float = 3.0
    ramp: Schedule = cubic(0.0, 1.0)

    name = "paced"
    year = 2026
    mask_rule = "top-k of |θ|, every step, shrunk most near the threshold"
    gradient_rule = "g, straight through; where pruned damped before batch norm, of blocks along θ, and updates times f"
    reference = "none: docs/paced.md"
    refuses_nm = ""
    apart = True
    warmup = 0.5
    finetune = 0.0

    def __post_init__(self) -> None:
        for name, most in (("exchange", 1.0), ("leak", math.inf)):
            value = getattr(self, name)
            if not 0 <= value <= most or value == math.inf:
                limit = "a number in [0, 1]" if most == 1.0 else "a finite number ≥ 0"
                raise ValueError(f"Paced: {name}={value!r}; {limit} is needed")
        if not self.p >= 1:
            raise ValueError(f"Paced: p={self.p!r}; a number of at least 1 is needed, inf for a hard threshold")

    @property
    def rewrites(self) -> bool:  # type: ignore[override]
        """Whether what is pruned leaks."""
        return self.leak > 0

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """Every weight is kept, and learns as the optimizer says."""
        state, ones = solver.state, torch.ones(len(solver.problem.targets), dtype=torch.float64)
        state.per_unit["history"] = torch.full((solver.count,), 255, dtype=torch.uint8, device=solver.device)
        begin = {"pace": ones, **{name: torch.zeros_like(ones) for name in ("damp", "sums", "terms")}}
        state.per_target |= {name: x.to(solver.device) for name, x in begin.items()}
        state.numbers |= {"looks": 0, "looked": -1, "damps": -1}

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """The largest; a hundred times in a run what is pruned leaks, and the pace follows the exchange."""
        numbers = solver.state.numbers
        look = at.due and numbers["looked"] != at.step  # masks may be chosen twice at a step
        if look and numbers["looks"]:
            self._leak(solver, at)
        solver.solve(solver.k)
        if look:
            self._look(solver, at)
            solver.state.numbers = {**numbers, "looks": numbers["looks"] + 1, "looked": at.step}

    def _leak(self, solver: TorchSolver, at: Moment) -> None:
        """What was pruned at the last look loses what it is to lose between two looks: 2·leak·(1 − x) a run."""
        every = max(1, at.total_steps // 100)
        lost = min(1.0, 2.0 * self.leak * (1.0 - at.progress) * every / at.total_steps)
        if lost:
            kept = solver.per_target(solver.spread((solver.state.per_unit["history"] & 1) == 1))
            solver.rewrite(lambda i, theta: torch.where(kept[i], theta, theta * (1.0 - lost)))

    def _look(self, solver: TorchSolver, at: Moment) -> None:
        """Count what was exchanged since WINDOW looks ago, and set the pace. The history has a bit for every look."""
        state, problem = solver.state, solver.problem
        history, kept = state.per_unit["history"], solver.kept(Form())
        if state.numbers["looks"] >= WINDOW:
            came = kept & (((history >> (WINDOW - 1)) & 1) == 0)
            counts = solver.sum_by_target(came, kept)
            came_in, left = (solver.segments_of(x) for x in counts)
            units = solver.segments_of(solver.constant([float(n) for n in problem.all_units]))
            falls = at.step >= at.warmup_steps
            remaining = (at.freeze_step - at.step) / max(1, at.freeze_step - at.warmup_steps)
            wanted = self.exchange * (1.0 - left / units) * min(1.0, remaining)
            by = (wanted * left / came_in.clamp(min=0.5)) ** (1.0 / WINDOW)
            by = torch.where(wanted > 0, by.clamp(max=1.0) if falls else by, 1.0)
            each = by[solver.constant(problem.segment_of)]
            state.per_target["pace"] = (state.per_target["pace"] * each).clamp(SLOWEST, FASTEST)
        state.per_unit["history"] = (history << 1) | kept

    def observes(self, at: Moment) -> bool:
        """A hundred times in a run."""
        return at.due

    def observe(self, solver: TorchSolver, grads: Grads, at: Moment) -> None:
        """Find the layers that batch norm follows: there ⟨g, w⟩ of an output is nothing beside its terms g·w."""
        problem, state = solver.problem, solver.state.per_target
        if problem.ranks.alone and all(g is None for g in grads):  # nothing new, at another optimizer's step
            return
        weights = [target.local.to(solver.dtype) for target in problem.targets]
        products = [w * 0.0 if g is None else w * g.to(w.dtype) for g, w in zip(grads, weights, strict=True)]
        sums = [of_outputs[0] for of_outputs in sums_of_outputs(problem, products)]
        found = torch.stack([squares(x) for x in (sums, products, weights, solver.per_target(solver.values()))])
        found = torch.where(found.isfinite().all(0), found, 0.0)  # a loss scaler may have asked for too much
        found = found if problem.ranks.alone else problem.ranks.sum(problem.ranks.counted(found))
        state["sums"], state["terms"] = state["sums"] + found[0], state["terms"] + found[1]
        usual = torch.where(found[2] > 0, found[3] / found[2], 1.0).sqrt()
        state["damp"] = torch.where(state["sums"] < NORMED * state["terms"], usual, 0.0)
        if not problem.ranks.alone:  # where outputs are cut, to damp takes sums over processes at every step
            solver.state.numbers = {**solver.state.numbers, "damps": int(state["damp"].any())}

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """The hard or shrunk mask; g, or for units its part along θ where pruned; damped and paced where pruned."""
        problem, state = solver.problem, solver.state
        shrunk = problem.pattern.single and self.p < math.inf
        whole = problem.pattern.single or problem.pattern.rows is not None
        pace, damp = state.per_target["pace"], state.per_target["damp"]
        damps = problem.pattern.rows is None
        if damps and not problem.ranks.alone:  # a run on one process, which this may go on from, does not know
            damps = bool(damp.any() if state.numbers["damps"] < 0 else state.numbers["damps"])
        return Form(
            Shrunk(self.p) if shrunk else Mask.ONE,
            STRAIGHT if whole else Along.THETA,
            pace=Where(1.0, pace, pace),
            damp=damp if damps else None,
        )


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Σ x² of each, in float64."""
    return torch.stack([x.square().sum(dtype=torch.float64) for x in tensors])
