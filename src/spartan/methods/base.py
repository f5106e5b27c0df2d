"""What a method is: a rule that chooses masks between steps, and declarations of what becomes of θ and of gradients.

The run calls, for all segments at once:

    setup     when it begins: make what the method keeps                          (no gradient)
    choose    after each optimizer step: look at θ, decide what is kept now       (no gradient)
    form      what w is, and what becomes of gradients, as declarations (`solvers.forms`) or as an autograd expression
    observe   after each backward: look at the gradient for w, dense, not masked  (no gradient)
    resample  before each further pass over a batch: masks of its own             (no gradient)
    freeze    when finetuning begins: the mask that stays

A method object holds settings only. What it knows about a run lies with the solver it is given: the masks chosen last,
and `solver.state` (masks, scores, learned parameters), which is saved with the run. The solver sees one part of the
model; most models have one. Vectors over units, such as `solver.scores()`, have an entry for every unit of it.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment, Schedule, linear
from spartan.problem.targets import Target
from spartan.solvers.base import Grads
from spartan.solvers.forms import Form
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import masked


class Method(ABC):
    """Base class of the methods; subclass, fill in, decorate with `@register`."""

    name: ClassVar[str]
    year: ClassVar[int]
    mask_rule: ClassVar[str]
    gradient_rule: ClassVar[str]
    needs: ClassVar[str] = "nothing"
    reference: ClassVar[str]

    # From when the model is truly sparse: "start" (at its final sparsity from the first step), "warmup" (at the
    # scheduled one at every step), "finetune", or "never".
    sparse_from: str = "warmup"
    # What applies when the user does not say.
    budget: ClassVar[str] = "global"
    warmup: ClassVar[float] = 0.2
    finetune: ClassVar[float] = 0.2
    # How the sparsity grows over the warm-up, as a fraction of the final one.
    ramp: Schedule = linear(0.0, 1.0)
    # Why the method cannot keep n of every m weights (the pattern NM); "" where it can: its masks come from `solve` and
    # `top` alone, and stand for any budget k.
    refuses_nm: str = "its masks are not defined for a budget of every m weights"
    # Whether units come back at zero: until a gradient reaches it, such a weight is kept and zero.
    grows_from_zero: ClassVar[bool] = False
    # Whether it sets dense weights to zero.
    restarts: ClassVar[bool] = False
    # Whether it changes dense weights in other ways, by itself.
    rewrites: bool = False
    # Whether it draws masks at random.
    random: ClassVar[bool] = False
    # Whether the zeros that a model has when the run begins stay zeros.
    keeps_zeros: ClassVar[bool] = False
    # Whether w = θ always, so that nothing needs to be kept or written.
    identity: ClassVar[bool] = False
    # α, where the method works on ψ = sign(θ)·|θ|^α in the place of θ.
    power: float = 1.0
    # Options of the optimizer's parameter group for what is learned, such as {"weight_decay": 0.0}; None is the weights'.
    learned_options: ClassVar[dict[str, Any]] = {}
    # Whether it gets sparse by the weight decay of what is learned.
    sparse_by_decay: bool = False
    # The norm that an optimizer's gradients, and the one that the method holds of its own, are clipped to together.
    clip: float | None = None
    # Whether `observe` is shown the gradients of each backward by themselves, not their sum over the step.
    apart: ClassVar[bool] = False

    def setup(self, solver: TorchSolver, at: Moment) -> None:  # noqa: B027
        """Make what the method keeps: masks, scores, learned parameters."""

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """Decide what is kept at this moment, for the budgets `solver.k`: by default the units of largest magnitude.

        It may be called more than once at one step (several optimizers, `dense_weights`).
        """
        solver.solve(solver.k)

    def resample(self, solver: TorchSolver, at: Moment, number: int) -> None:  # noqa: B027
        """Choose masks for a further pass of the same step, the second being number 1."""

    def passes(self, at: Moment) -> int:
        """How many passes over a batch, each with masks of its own, the step of this moment is meant to average."""
        return 1

    def replaces(self, at: Moment) -> bool:
        """Whether masks are updated in the place of this moment's step: then no optimizer moves anything."""
        return False

    def forgets(self, at: Moment) -> bool:
        """Whether optimizers lose all their momentum before this moment's step."""
        return False

    def begun(self, problem: Problem) -> float:
        """How far the sparsity has grown when the run begins, as a fraction of the final one."""
        return 0.0

    def scale(self, target: Target) -> float:
        """What the magnitudes of a target are multiplied by where units compete."""
        return 1.0

    @abstractmethod
    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """What w is, for what `choose` decided, and what becomes of gradients."""

    def observes(self, at: Moment) -> bool:
        """Whether the method wants to look at gradients at this moment: they are then kept until the step."""
        return False

    def observe(self, solver: TorchSolver, grads: Grads, at: Moment) -> None:  # noqa: B027
        """Look at the dense gradients for w: one per target, None where the loss did not reach.

        It is called at the end of every backward, each time with the sum since the last step; with `apart`, only with
        what this backward has given, and `solver.further` tells whether others of the step came before.
        """

    def held(self, solver: TorchSolver) -> Tensor | None:
        """A gradient that the method has of its own and is clipped together with the optimizer's, in place."""
        return None

    def keep(self, solver: TorchSolver, at: Moment) -> Tensor:
        """Bool per unit: what is kept now."""
        return solver.kept(self.form(solver, at))

    def freeze(self, solver: TorchSolver, at: Moment) -> tuple[Tensor, Tensor]:
        """What finetuning keeps, and the mask per unit that it keeps there: w = θ · mask does not jump."""
        form, kept = self.form(solver, at), self.keep(solver, at)
        mask = solver.mask(form, kept) if form.project else None
        return kept, kept.to(solver.dtype) if mask is None else masked(mask, kept)

    def sparse_at(self, at: Moment) -> int:
        """The step from which on the model is as sparse as it is to be."""
        return {"never": 0, "finetune": at.freeze_step}.get(self.sparse_from, at.warmup_steps)

    def beta_at(self, problem: Problem, at: Moment) -> list[float] | None:
        """The sharpness in use of every segment, for methods that have one."""
        return None

    def check(self, problem: Problem) -> None:  # noqa: B027
        """ValueError with the reason where the method's settings do not fit the problem."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def scaled_beta(beta: Schedule, scale: bool, problem: Problem, at: Moment) -> list[float]:
    """β of every segment; with `scale` its end grows by √n for units of n entries: their mean varies √n times less."""
    if not scale or problem.pattern.single:
        return [beta.at(at.progress)] * len(problem.segments)
    sizes = [problem.unit_size(s) for s in range(len(problem.segments))]
    each = {
        size: (beta if size is None or size == 1 else beta.scaled(size**0.5)).at(at.progress) for size in set(sizes)
    }
    return [each[size] for size in sizes]
