"""Top-K always sparse training, or dual averaging (the paper's Algorithm 2)."""

import math
from dataclasses import dataclass

import torch

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.budgets import check_sparsity
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment
from spartan.solvers.forms import STRAIGHT, Form, Mask, Stored, Where
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class TopKAST(Method):
    """Top-K always sparse training: hard top-k forward, dense gradient straight through.

        θ̃ = Π_k(θ)                                   A: the k units of largest magnitude
        θ ← θ − η · [B] ⊙ (∇L(θ̃) + λ · r ⊙ θ)        B ⊇ A: the units that get a gradient, by magnitude
        r = 1 on A, 1/D on B∖A                       D: the density of the forward pass at this moment

    λ is the paper's exploration loss (Sec. 2.3): units that are used are held back a little, units at the door a lot,
    the rest not at all. The paper calls it L2 regularisation and prints |θ| and |θ|/D; it is taken here as
    λ/2 · Σ r·θ², on the scale of SGD's `weight_decay`, whose place it takes. Weight decay of the optimizer comes on
    top, on all units; set it to 0 for the targets to leave those outside B alone. The penalty ends where finetuning
    begins.

    It is added in the optimizer's step, once, after gradients are accumulated, unscaled and clipped.

    Args:
        backward_sparsity: fraction that gets no gradient; 0, the best setting of the paper, updates everything. It
            must not exceed the sparsity.
        exploration: λ; 0 leaves the penalty out, as Spartan's paper does. 1e-4 is ResNet-50's usual weight decay.
        every: optimizer steps between two choices of A and B; in between they are fixed. While the budget still
            changes, in the warm-up, they are chosen at every step. What is in B but not in A moves unseen for that
            long, which a short run does not bear.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=TopKAST(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    backward_sparsity: float = 0.0
    exploration: float = 0.0
    every: int = 1

    name = "topkast"
    year = 2020
    mask_rule = "top-k of |θ|, every step"
    gradient_rule = "g, straight through (for B ⊇ A)"
    reference = "Jayakumar et al., Top-KAST: Top-K always sparse training, NeurIPS 2020"
    refuses_nm = ""

    def __post_init__(self) -> None:
        check_sparsity(self.backward_sparsity, "TopKAST: backward_sparsity")
        if not 0 <= self.exploration < math.inf:
            raise ValueError(
                f"TopKAST: exploration={self.exploration!r} is not the weight of a penalty; a finite number ≥ 0 is "
                "needed, such as 1e-4"
            )
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"TopKAST: every={self.every!r} is not a number of optimizer steps; an int ≥ 1 is needed")

    def check(self, problem: Problem) -> None:
        """Units that are used must get a gradient."""
        for segment in problem.segments:
            if self.backward_sparsity > segment.sparsity:
                raise ValueError(
                    f"TopKAST: backward_sparsity={self.backward_sparsity} exceeds the sparsity {segment.sparsity:.6g} of "
                    f"{problem.targets[segment.targets[0]].name}; units that are used must get a gradient"
                )

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """A for the forward pass, B for the gradient."""
        if at.step % self.every and at.step > at.warmup_steps:
            return
        solver.solve(solver.k)
        if self.backward_sparsity:
            segments = zip(solver.k, solver.problem.segments, strict=True)
            more = [max(k, (1.0 - self.backward_sparsity) * s.total) for k, s in segments]
            solver.solve_more(more)
        if self.every > 1:  # θ moves on, so that thresholds would no longer tell what was chosen
            a, b = solver.kept(Form()), solver.trained(Form())
            solver.state.per_unit["A"] = a
            solver.state.per_unit["B"] = torch.ones_like(a) if b is None else b

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """Π_A(θ), with the gradient on B, and the exploration penalty."""
        back = Where(1.0, 1.0, 0.0) if self.backward_sparsity else STRAIGHT
        decay = None
        if self.exploration:
            segments = zip(solver.k, solver.problem.segments, strict=True)
            decay = Where(self.exploration, tuple(self.exploration * s.total / k for k, s in segments), 0.0)
        if self.every > 1:
            return Form(Stored("A"), back, decay, more="B")
        return Form(Mask.ONE, back, decay)
