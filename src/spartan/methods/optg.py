"""OptG: gradient-driven scores, accumulated while the weights train, faster as the sparsity grows."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spartan.methods.registry import register
from spartan.methods.scored import ScoredMasks
from spartan.problem.schedules import Moment, Schedule
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class OptG(ScoredMasks):
    """OptG: keep the units of largest accumulated −g·θ; scores and sparsity start late, by one sigmoid.

        w = θ ⊙ M,  M = [S among the k largest]           one score S per unit
        θ ← θ − η · M ⊙ ∇L(w)
        S ← S − η · σ(t) · Σ ∇L(w) ⊙ θ                    straight through the top-k, summed over each unit, kept or not
        1 − k/d = sparsity · σ(t),  σ(t) = sigmoid(b · (t/W − ½))

    with W the warm-up, by default the whole run, and σ stretched to run from 0 to 1. While the weights move fast
    nothing is pruned and scores barely move, so that what they add up is the gradient of a network much like the one to
    be pruned: a criterion that looks at weights one by one is wrong where many change at once (the paper's independence
    paradox).

    S follows the optimizer of the weights, at its learning rate and with its momentum, without weight decay. Scores
    start at zero; a run without a warm-up (`warmup=0`) at first keeps the units that come first.

    Args:
        steepness: b. The paper has 1 per epoch, which makes 100 on ImageNet and 160 on CIFAR-10.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=OptG(steepness=10)).attach(optimizer)
        >>> kept = []
        >>> for _ in range(10):
        ...     kept.append(s.layers()[0].kept)
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> kept, int((model.weight != 0).sum())
        ([64, 63, 62, 58, 51, 40, 28, 21, 17, 16], 16)
    """

    steepness: float = 100.0

    name = "optg"
    learned = "step"
    year = 2022
    mask_rule = "top-k of learned scores, every step"
    gradient_rule = "g where kept, else 0; for the scores σ(t) · Σ g·θ over each unit"
    needs = "one learned score per unit"
    reference = "Zhang, Lin, Chen, Chao & Ji, OptG: Optimizing gradient-driven criteria in network sparsity, 2022"
    warmup = 1.0
    finetune = 0.0
    learned_options = {"weight_decay": 0.0}  # noqa: RUF012

    def __post_init__(self) -> None:
        if not 0 < self.steepness < math.inf:
            raise ValueError(f"OptG: steepness={self.steepness!r}; a finite number greater than 0 is needed")

    @property
    def ramp(self) -> Schedule:  # type: ignore[override]
        """σ over the warm-up."""
        return Sigmoid(0.0, 1.0, steepness=self.steepness)

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """S = 0, beside a parameter that is zero at every step: where the optimizer moves it is the step of S."""
        nothing = torch.zeros(solver.count, dtype=solver.dtype, device=solver.device)
        solver.state.per_unit["S"], solver.state.learned["step"] = nothing, nn.Parameter(nothing.clone())

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """S moves by σ(t) of the optimizer's step: a learning rate of its own that any schedule leaves in place."""
        state = solver.state
        ramp, step = self.ramp.at(at.warmed), state.learned["step"]
        solver.update(["S"], lambda s, moved: [s + ramp * moved], ["S", "step"])
        step.zero_()
        super().choose(solver, at)

    def score(self, solver: TorchSolver) -> Tensor:
        """S."""
        return solver.state.per_unit["S"]


@dataclass(frozen=True, repr=False)
class Sigmoid(Schedule):
    """From start to end as a sigmoid around the middle, stretched to begin and end there exactly."""

    steepness: float = 1.0

    def at(self, progress: float) -> float:
        """The value at a progress between 0 and 1."""
        # sigmoid(x) = ½ + ½·tanh(x/2)
        x = 0.25 * self.steepness
        y = math.tanh(x * (2.0 * min(max(progress, 0.0), 1.0) - 1.0)) / math.tanh(x)
        return self.start + (self.end - self.start) * (0.5 + 0.5 * y)
