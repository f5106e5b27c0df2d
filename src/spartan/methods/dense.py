"""No sparsity at all: the control of every comparison."""

from dataclasses import dataclass

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.schedules import Moment, constant
from spartan.solvers.forms import STRAIGHT, Form, Mask
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class Dense(Method):
    """Dense training, untouched: w = θ.

    Counts steps and weights like the others, holds no second copy of the weights and changes nothing.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> spartan.Sparsifier(model, sparsity=0.9, total_steps=10, method="dense").stats.density
        1.0
    """

    name = "dense"
    year = 1986
    mask_rule = "everything is kept"
    gradient_rule = "g"
    reference = "Rumelhart, Hinton & Williams, Learning representations by back-propagating errors, 1986"
    sparse_from = "never"
    refuses_nm = ""
    identity = True
    ramp = constant(0.0)

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """Nothing."""

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """w = θ."""
        return Form(Mask.ONE, STRAIGHT, project=False)
