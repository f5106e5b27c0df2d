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
    """OptG: keep the units of largest accumulated −g·θ, chosen once an epoch; scores and sparsity start late.

        w = θ ⊙ M                                         one score S per unit
        θ ← θ − η · M ⊙ ∇L(w)                             at every step
        S ← S − η · σ_e · Σ ∇L(w) ⊙ θ                     straight through the top-k, summed over each unit, kept or not
        M ← [S among the k largest of all layers]         when epoch e of E begins; fixed in between
        1 − k/d = sparsity · σ_e,  σ_e = sigmoid(b · (e − E/2))

    An epoch is a part of the warm-up, which by default is the whole run, and σ is stretched to run from 0 to 1. While
    the weights move fast nothing is pruned and scores barely move, so that what they add up is the gradient of a network
    much like the one to be pruned: a criterion that looks at weights one by one is wrong where many change at once (the
    paper's independence paradox).

    So do the authors' configurations: their class `MySparseConv` fixes masks for an epoch, by rates per layer that
    `set_model` takes from one threshold over all of them. (`SparseConv`, which no configuration uses, lets masks move
    within a layer at every step.) S follows the optimizer of the weights, at its learning rate and with its momentum,
    without weight decay. Scores start at zero; a run without a warm-up (`warmup=0`) at first keeps the units that come
    first.

    Args:
        epochs: E, parts of the warm-up; a step each where there are fewer of these. Their ResNet-50 has 100 epochs on
            ImageNet, and 160 on CIFAR-10.
        steepness: b, per epoch.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=20, method=OptG(epochs=10)).attach(optimizer)
        >>> kept = []
        >>> for _ in range(20):
        ...     kept.append(s.layers()[0].kept)
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> kept[:12], int((model.weight != 0).sum())
        ([64, 64, 63, 63, 62, 62, 58, 58, 51, 51, 40, 40], 16)
    """

    epochs: int = 100
    steepness: float = 1.0

    name = "optg"
    learned = "step"
    year = 2022
    mask_rule = "top-k of learned scores, once an epoch"
    gradient_rule = "g where kept, else 0; for the scores σ(t) · Σ g·θ over each unit"
    needs = "one learned score per unit"
    reference = "Zhang, Lin, Chen, Chao & Ji, OptG: Optimizing gradient-driven criteria in network sparsity, 2022"
    warmup = 1.0
    finetune = 0.0
    learned_options = {"weight_decay": 0.0}  # noqa: RUF012

    def __post_init__(self) -> None:
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise ValueError(f"OptG: epochs={self.epochs!r} is not a number of epochs; an int ≥ 1 is needed")
        if not 0 < self.steepness < math.inf:
            raise ValueError(f"OptG: steepness={self.steepness!r}; a finite number greater than 0 is needed")

    @property
    def ramp(self) -> Schedule:  # type: ignore[override]
        """σ over the warm-up, constant within an epoch."""
        return Sigmoid(0.0, 1.0, steepness=self.steepness, epochs=self.epochs)

    def epoch(self, at: Moment) -> int:
        """e; past the warm-up epochs go on, until the run ends. Without one they are parts of the run."""
        return min(at.step, at.total_steps - 1) * self.epochs // (at.warmup_steps or at.total_steps)

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """S = 0, beside a parameter that is zero at every step: where the optimizer moves it is the step of S."""
        nothing = torch.zeros(solver.count, dtype=solver.dtype, device=solver.device)
        solver.state.per_unit["S"], solver.state.learned["step"] = nothing, nn.Parameter(nothing.clone())
        solver.state.numbers |= {"epoch": -1, "budget": 0.0, "segments": 0}

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """S moves by σ of the optimizer's step: a learning rate of its own that any schedule leaves in place.

        Masks are chosen anew with an epoch, and where the budgets have changed.
        """
        state = solver.state
        rate, step = self.ramp.at(at.before().warmed), state.learned["step"]
        solver.update(["S"], lambda s, moved, out: torch.add(s, moved, alpha=rate, out=out[0]), ["S", "step"])
        step.zero_()
        now = {"epoch": self.epoch(at), "budget": math.fsum(solver.k), "segments": len(solver.k)}
        if any(state.numbers[name] != value for name, value in now.items()):
            state.numbers |= now
            super().choose(solver, at)

    def score(self, solver: TorchSolver) -> Tensor:
        """S."""
        return solver.state.per_unit["S"]


@dataclass(frozen=True, repr=False)
class Sigmoid(Schedule):
    """From start to end in so many equal steps, as a sigmoid around the middle, stretched to begin and end there exactly."""

    steepness: float = 1.0  # per step
    epochs: int = 1

    def at(self, progress: float) -> float:
        """The value at a progress between 0 and 1."""
        # sigmoid(x) = ½ + ½·tanh(x/2); whole steps, where a progress in float64 may fall a little short of one
        done = math.floor(self.epochs * min(max(progress, 0.0), 1.0) + 1e-9) / self.epochs
        x = 0.25 * self.steepness * self.epochs
        y = math.tanh(x * (2.0 * done - 1.0)) / math.tanh(x)
        return self.start + (self.end - self.start) * (0.5 + 0.5 * y)
