"""Static sparse training: a random mask that never changes."""

from dataclasses import dataclass, replace

from spartan.methods.registry import register
from spartan.methods.stored import StoredMasks
from spartan.problem.schedules import Moment
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class Static(StoredMasks):
    """Static sparse training: a random mask, drawn once, that never changes.

        M ~ uniform over the masks of k units, in each layer (Erdős–Rényi kernel densities by default)
        θ ← θ − η · M ⊙ ∇L(M ⊙ θ)

    The mask is drawn with the run's seed, which comes from torch's. With a warm-up it shrinks to that mask, each one
    a part of the one before.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=Static())
        >>> int((model.weight != 0).sum())
        16
    """

    name = "static"
    year = 2018
    mask_rule = "random, fixed from the start"
    gradient_rule = "g where kept, else 0"
    reference = (
        "Mocanu et al., Scalable training of artificial neural networks, Nature Communications 2018 (as FixProb)"
    )
    refuses_nm = ""

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """The first units, in the random order of this run, that fit the budget; nothing once that is constant."""
        if 0 < at.step <= at.warmup_steps:
            solver.state.per_unit["mask"] = solver.top(solver.k, solver.random(replace(at, step=0)))
