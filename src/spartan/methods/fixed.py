"""Training with the zeros that a model begins with."""

from dataclasses import dataclass

from spartan.methods.registry import register
from spartan.methods.stored import StoredMasks
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment
from spartan.problem.zeros import UnitCount, too_full
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class Fixed(StoredMasks):
    """The zeros that the model begins with stay, exactly, whatever the optimizer does; the other weights are trained.

        M = [θ ≠ 0]                                            once, when the run begins
        θ ← θ − η · M ⊙ ∇L(M ⊙ θ)

    For a model that is sparse already: a pruned one, or a checkpoint of a sparse run that is to be tuned further.
    `Sparsifier.from_sparse(model)` is the short way to it. With a `sparsity` the model must have at least that many zeros,
    of the cost and in each budget; none are added, and none taken away. With a pattern they must come in whole units.

    Example:
        >>> model = spartan.prune(torch.nn.Linear(8, 8), sparsity=0.75)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=Fixed())
        >>> int((model.weight != 0).sum())
        16
    """

    name = "fixed"
    year = 2015
    mask_rule = "what is not zero when the run begins"
    gradient_rule = "g where kept, else 0"
    needs = "a sparse model to begin with"
    reference = "Han et al., Learning both weights and connections for efficient neural networks, NeurIPS 2015"
    refuses_nm = ""
    random = False
    keeps_zeros = True
    budget = "global"
    finetune = 1.0  # the mask is fixed from the first step, so that θ of the zeros need not be kept

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """What is not zero."""
        solver.state.per_unit["mask"] = solver.reduce([(x != 0).to(solver.dtype) for x in solver.theta.slabs]) > 0

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """Nothing: the mask stays."""

    def check(self, problem: Problem) -> None:
        """The model must have as many zeros as are asked for, and in units that are zero altogether."""
        count = UnitCount.of(problem)
        for target, n in zip(problem.targets, count.in_part, strict=True):
            if n:
                raise ValueError(
                    f"pattern={problem.pattern!r} with method='fixed': {target.name} has {n} units that are zero in part. "
                    "Leave the pattern out: each zero stays by itself then"
                )
        if found := too_full(problem, count):
            raise ValueError(
                f"sparsity: method='fixed' keeps the zeros that are there and makes none, and they are {found[0]}. "
                "Ask for no more than that, or for sparsity=0 if any number will do"
            )
