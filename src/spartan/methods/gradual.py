"""Gradual magnitude pruning of a trained model."""

import math
from dataclasses import dataclass

from spartan.methods.imp import IMP
from spartan.methods.registry import register
from spartan.problem.problem import Problem
from spartan.problem.schedules import Schedule, cubic
from spartan.problem.zeros import UnitCount


@register
@dataclass(frozen=True)
class Gradual(IMP):
    """Iterative magnitude pruning that begins with a trained model, and with the zeros that it has.

        s_t = s + (s₀ − s) · (1 − t/W)³           from the sparsity s₀ of the model to the final s, in W steps
        θ̃ = Π_k(θ),  θ ← θ − η · [kept] ⊙ ∇L(θ̃)   with k = 1 − s_t of the cost

    A model that was pruned already does not go back to density 1: its zeros stay zero, and others are added. With
    several budgets all start together, from the fraction of their final sparsity that every one of them has. The
    sparsity grows fast at first, over half the run; in the last three tenths the mask is fixed.

    Args:
        ramp: how the sparsity grows, from 0 (what the model came with) to 1 (the final one).

    Example:
        >>> model = spartan.prune(torch.nn.Linear(8, 8), sparsity=0.5)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=8, method=Gradual()).attach(optimizer)
        >>> kept = []
        >>> for _ in range(8):
        ...     kept.append(s.layers()[0].kept)
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> kept
        [32, 22, 18, 16, 16, 16, 16, 16]
    """

    ramp: Schedule = cubic(0.0, 1.0)

    name = "gradual"
    year = 2018
    mask_rule = "top-k of |θ|, every step, from the model's own sparsity on"
    gradient_rule = "g where kept, else 0"
    needs = "a trained model to begin with"
    reference = "Zhu & Gupta, To prune, or not to prune, ICLR workshop 2018"
    keeps_zeros = True
    warmup = 0.5
    finetune = 0.3

    def begun(self, problem: Problem) -> float:
        """The fraction of its final sparsity that every budget has already."""
        count, m = UnitCount.of(problem), problem.pattern.rows
        found = [1.0]
        for segment in problem.segments:
            cost = math.fsum(count.kept[i] * problem.unit_costs[i] for i in segment.targets)
            gone = 1.0 - cost / segment.whole
            if m is not None:
                gone = 1.0 - max(count.fullest[i] for i in segment.targets) / m
            found += [gone / segment.sparsity] if segment.sparsity else []
        return max(0.0, min(found))
