"""ProbMask: a learned probability per unit; the expected cost of what they sample is the budget."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment, Schedule, as_schedule, cubic, delayed, linear
from spartan.solvers.base import Grads
from spartan.solvers.forms import VJP, Form, Stored
from spartan.solvers.torch import TorchSolver

# Adam's, as everywhere.
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@register
@dataclass(frozen=True)
class ProbMask(Method):
    """ProbMask: learn the probability that a unit is kept, train on sampled soft masks, keep the most probable.

        m = sigmoid((logit(s) + ξ)/τ),  ξ ~ Logistic(0, 1)       a new sample every step; Bernoulli(s) as τ → 0
        w = θ ⊙ m
        θ ← θ − η · m ⊙ ∇L(w)
        s ← Π(s − η_s · Adam(∂m/∂s · Σ ∇L(w) ⊙ θ))               summed over each unit
        Π: the nearest point of {0 ≤ s ≤ 1, Σ c·s ≤ k}            s ← min(max(s − v·c, 0), 1) with one shift v

    Every s starts at 1. The budget k stays whole for a while, then falls as a cubic; τ falls until finetuning, when the
    k units of largest s are kept and the others are gone: until then the model is soft-masked, not sparse, and
    `density` counts what would be kept now. Once s is 0 or 1 a unit's mask no longer varies, and its s no longer
    learns.

    The method runs Adam for s itself, whatever optimizer trains the weights, with the learning rate falling to 0 as a
    cosine until finetuning. The paper finetunes the best of ten sampled masks, whose cost is k on average only.

    Args:
        score_lr: η_s at the start. None is the paper's 0.006 for runs of its 58,800 steps or more; shorter ones take as
            much longer strides, up to 0.2, or the probabilities would not get to 0 and 1 in time.
        temperature: τ over training, a schedule or a number.
        hold: fraction of the warm-up before the budget begins to fall.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=20, method=ProbMask()).attach(optimizer)
        >>> for _ in range(20):
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> int((model.weight != 0).sum())
        16
    """

    score_lr: float | None = None
    temperature: Schedule | float = linear(1.0, 0.03)
    hold: float = 4 / 15

    name = "probmask"
    year = 2021
    mask_rule = "sampled by learned probabilities, softly; in the end the most probable"
    gradient_rule = "m·g, m the sampled mask; for the probabilities ∂m/∂s · Σ g·θ over each unit"
    needs = "one probability per unit, with Adam's two moments, and the sampled mask"
    reference = (
        "Zhou, Zhang, Xu & Zhang, Effective sparsification of neural networks with global sparsity constraint, "
        "CVPR 2021"
    )
    sparse_from = "finetune"
    random = True
    # Of 300 epochs, the budget falls from 48 to 180; 20 more at 1% of the learning rate finetune.
    warmup = 0.5625
    finetune = 0.0625

    def __post_init__(self) -> None:
        if self.score_lr is not None and not 0 <= self.score_lr < math.inf:
            raise ValueError(f"ProbMask: score_lr={self.score_lr!r}; None or a learning rate of at least 0 is needed")
        tau = as_schedule(self.temperature)
        if not (tau.start > 0 and tau.end > 0):
            raise ValueError(f"ProbMask: temperature={self.temperature!r}; it must be greater than 0 throughout")
        if not 0 <= self.hold < 1:
            raise ValueError(f"ProbMask: hold={self.hold!r} is not a fraction of the warm-up; it must lie in [0, 1)")

    @property
    def ramp(self) -> Schedule:  # type: ignore[override]
        """Nothing is asked for while it holds, then a cubic."""
        return delayed(cubic(0.0, 1.0), self.hold)

    def beta_at(self, problem: Problem, at: Moment) -> list[float]:
        """1/τ."""
        return [1.0 / as_schedule(self.temperature).at(at.progress)] * len(problem.segments)

    def score_lr_at(self, at: Moment) -> float:
        """η_s."""
        start = self.score_lr
        if start is None:
            start = min(0.2, 6e-3 * max(1.0, 58_800 / max(1, at.freeze_step)))
        return start * (0.5 + 0.5 * math.cos(math.pi * at.progress))

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """s = 1, with no moments yet."""
        one, state = torch.ones(solver.count, dtype=solver.dtype, device=solver.device), solver.state
        state.per_unit |= {"s": one, "mean": torch.zeros_like(one), "square": torch.zeros_like(one)}
        state.numbers["updates"] = 0

    def observes(self, at: Moment) -> bool:
        """Until masks are fixed."""
        return True

    def observe(self, solver: TorchSolver, grads: Grads, at: Moment) -> None:
        """∂L/∂s, kept for `choose`: a step that a loss scaler skips must not count."""
        solver.sample_gradient("s", "m", "grad", self.beta_at(solver.problem, at)[0], grads)

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """Update the probabilities if there is a gradient, project them, and sample a mask."""
        units = solver.state.per_unit
        if "grad" in units:
            self._adam(solver, at)
        units["s"] = solver.within_budget(units["s"])
        solver.sample("s", "m", self.beta_at(solver.problem, at)[0], at)

    def _adam(self, solver: TorchSolver, at: Moment) -> None:
        """s ← s − η_s · Adam(∂L/∂s)."""
        numbers = solver.state.numbers
        numbers["updates"] = numbers["updates"] + 1
        names = "s", "mean", "square", "grad"
        solver.adam(names, self.score_lr_at(at), (BETA1, BETA2), EPS, int(numbers["updates"]))

    def keep(self, solver: TorchSolver, at: Moment) -> Tensor:
        """The units of largest s; where it is 0 the larger weights come first, below every other unit."""
        s = solver.state.per_unit["s"]
        return solver.top(solver.k, torch.where(s > 0, s, -1.0 / (1.0 + solver.scores())))

    def freeze(self, solver: TorchSolver, at: Moment) -> tuple[Tensor, Tensor]:
        """The kept units, whole; nothing else is needed any more."""
        kept = self.keep(solver, at)
        solver.state.per_unit.clear()
        return kept, kept.to(solver.dtype)

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """θ ⊙ m and m ⊙ g, with m the sampled mask."""
        return Form(Stored("m"), VJP.THROUGH, project=False)
