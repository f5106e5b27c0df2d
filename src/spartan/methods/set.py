"""Sparse evolutionary training."""

from dataclasses import dataclass

from torch import Tensor

from spartan.methods.registry import register
from spartan.methods.stored import Rewiring
from spartan.problem.schedules import Moment
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class SET(Rewiring):
    """Sparse evolutionary training: drop the smallest weights now and then, grow as many at random.

        θ ← θ − η · M ⊙ ∇L(M ⊙ θ)                             at every step
        M ← M minus the ⌊f_t·|M|⌋ units smallest in |θ|        after steps 1, n + 1, 2n + 1, … ≤ T_end, in each layer
        M ← M plus as many units at random of the others, from θ = 0 and without momentum
        f_t = f/2 · (1 + cos(πt/T_end))                        T_end: when finetuning begins, at 77% by default

    As in the code of Evci et al. (2020), which compares RigL with it: updates by steps, each after a gradient step,
    smallest by magnitude, zeros; with a cosine, as in their paper. The original rewires once an epoch by a constant
    fraction, of each sign by itself, and draws new weights at random. A unit that is dropped and drawn again at once
    keeps its value and its momentum. Layers share a budget with `budget="global"`.

    Args:
        every: optimizer steps between two updates of the mask.
        fraction: f, of the kept units, what the first updates replace.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=1000, method=SET(every=50))
        >>> int((model.weight != 0).sum())
        16
    """

    every: int = 100
    fraction: float = 0.3

    name = "set"
    year = 2018
    mask_rule = "random; every n steps the smallest of |θ| give way to random others"
    gradient_rule = "g where kept, else 0"
    reference = "Mocanu et al., Scalable training of artificial neural networks, Nature Communications 2018"

    def growth(self, solver: TorchSolver, at: Moment) -> Tensor:
        """Random."""
        return solver.random(at)
