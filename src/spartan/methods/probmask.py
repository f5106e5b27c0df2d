"""ProbMask: a learned probability per unit; the expected cost of what they sample is the budget."""

import math
from dataclasses import dataclass, replace

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

        m = sigmoid((logit(s) + ξ)/τ),  ξ ~ Logistic(0, 1)       K samples a step; Bernoulli(s) as τ → 0
        w = θ ⊙ m
        g_θ = mean over K of m ⊙ ∇L(w)                           the two clipped to a joint norm of 3
        g_s = mean over K of ∂m/∂s · Σ ∇L(w) ⊙ θ                 summed over each unit
        θ ← θ − η · g_θ,  s ← Π(s − η_s · Adam(g_s))
        Π: the nearest point of {0 ≤ s ≤ 1, Σ c·s ≤ k}            s ← min(max(s − v·c, 0), 1) with one shift v

    Every s starts at 1. The budget k stays whole for a while, then falls as a cubic; τ falls until finetuning, when the
    k units of largest s are kept and the others are gone: until then the model is soft-masked, not sparse, and
    `density` counts what would be kept now. Once s is 0 or 1 a unit's mask no longer varies, and its s no longer
    learns.

    K samples are K passes over a batch, and who trains makes them: `spartan train` does, and your loop by

        for share in spartan.passes(sparsifier):                 K times a share of 1/K; once, from finetuning on
            (share * loss_fn(model(x), y)).backward()
        optimizer.step()

    With one backward a step there is one sample, and with micro-batches one for all of them.

    The gradients of all parameters of an optimizer are clipped with that for s, in its step, after your own clipping;
    with several optimizers, those of each by themselves, and s with the first. The method runs Adam for s itself, whatever
    optimizer trains the weights, with the learning rate falling to 0 as a cosine until finetuning. The authors finetune
    the best of ten sampled masks, whose cost is k on average only, at a constant 1% of the learning rate.

    Args:
        samples: K; it doubles, or more, what a step takes.
        clip: the joint norm; None clips nothing.
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

    samples: int = 2
    clip: float | None = 3.0
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
    apart = True
    # Of 300 epochs, the budget falls from 48 to 180; 20 more at 1% of the learning rate finetune.
    warmup = 0.5625
    finetune = 0.0625

    def __post_init__(self) -> None:
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"ProbMask: samples={self.samples!r} is not a number of passes; an int ≥ 1 is needed")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"ProbMask: clip={self.clip!r} is not a norm; None or a finite number above 0 is needed")
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
        state.numbers |= {"updates": 0, "seen": 0}

    def observes(self, at: Moment) -> bool:
        """Until masks are fixed."""
        return True

    def observe(self, solver: TorchSolver, grads: Grads, at: Moment) -> None:
        """∂L/∂s, added up for `choose`: a step that a loss scaler skips must not count."""
        beta, units = self.beta_at(solver.problem, at)[0], solver.state.per_unit
        solver.state.numbers["seen"] = at.step
        if not (solver.further and "grad" in units):
            solver.sample_gradient("s", "m", "grad", beta, grads)
            return
        solver.sample_gradient("s", "m", "more", beta, grads)
        solver.update(["grad"], lambda before, more, out: torch.add(before, more, out=out[0]), ["grad", "more"])
        del units["more"]

    def held(self, solver: TorchSolver) -> Tensor | None:
        """∂L/∂s."""
        return solver.state.per_unit.get("grad")

    def passes(self, at: Moment) -> int:
        """K, until masks are fixed."""
        return 1 if at.phase == "finetune" else self.samples

    def resample(self, solver: TorchSolver, at: Moment, number: int) -> None:
        """Another sample, with random numbers of its own."""
        other = replace(at, seed=hash((at.seed, number)) % (1 << 31))
        solver.sample("s", "m", self.beta_at(solver.problem, at)[0], other)

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """Update the probabilities if a step has been taken with their gradient, project them, and sample a mask."""
        units = solver.state.per_unit
        if "grad" in units and solver.state.numbers["seen"] < at.step:
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
