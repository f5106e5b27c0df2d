"""AC/DC: alternating compressed and decompressed training."""

from dataclasses import dataclass

import torch

from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.schedules import Moment
from spartan.solvers.forms import KEPT, STRAIGHT, Form, Stored
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class ACDC(Method):
    """AC/DC: dense and sparse phases in turn; each sparse phase trains the top-k mask of its first moment.

        dense phase       θ ← θ − η · ∇L(θ)                     what was pruned starts again from zero, momentum too
        sparse phase      θ ← Π_k(θ), M = [θ ≠ 0]               once, when it begins
                          θ ← M ⊙ (θ − η · M ⊙ ∇L(θ))           at every step

    The run begins dense, alternates, and ends with a longer dense phase and a longer sparse one: finetuning. Lengths
    are fractions of the run; the defaults are the paper's for 100 epochs: 10 dense, then 5 sparse, 5 dense, 5 sparse,
    …, 10 dense from epoch 75, and 15 sparse (`finetune`). Its CIFAR runs of 200 epochs have longer ones,
    `ACDC(first_dense=0.05, phase=0.1)`.

    Before the first step of each dense phase the optimizers lose the momentum of all that they train, biases and norms
    too, as its scripts do with SGD (`--reset_momentum_after_recycling`); Adam's second moments stay. During a sparse
    phase the momentum of pruned weights is left to fade, as there.

    Args:
        first_dense: fraction of the run that is dense at the beginning.
        phase: fraction of the run that every alternating phase lasts; at least one step.
        last_dense: fraction of the run that is dense right before the final sparse phase.
        reset_momentum: False lets momentum go on where a dense phase begins.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=20, method=ACDC()).attach(optimizer)
        >>> kept = []
        >>> for _ in range(20):
        ...     kept.append(s.layers()[0].kept)
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> kept
        [64, 64, 16, 64, 16, 64, 16, 64, 16, 64, 16, 64, 16, 64, 16, 64, 64, 16, 16, 16]
    """

    first_dense: float = 0.10
    phase: float = 0.05
    last_dense: float = 0.10
    reset_momentum: bool = True

    name = "acdc"
    year = 2021
    mask_rule = "top-k of |θ| when a sparse phase begins, everything in the dense phases between"
    gradient_rule = "g where kept, else 0"
    reference = (
        "Peste et al., AC/DC: Alternating compressed/decompressed training of deep neural networks, NeurIPS 2021"
    )
    sparse_from = "finetune"
    grows_from_zero = True  # in a dense phase
    restarts = True
    refuses_nm = ""
    warmup = 0.0
    finetune = 0.15

    def __post_init__(self) -> None:
        for name in ("first_dense", "phase", "last_dense"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"ACDC: {name}={value!r} is not a fraction of the run; it must lie in [0, 1]")

    def dense_at(self, at: Moment) -> bool:
        """Whether the next step belongs to a dense phase."""
        first, phase, last = (round(f * at.total_steps) for f in (self.first_dense, self.phase, self.last_dense))
        if at.phase == "finetune":
            return False
        if at.step < first or at.step >= at.freeze_step - last:
            return True
        return (at.step - first) // max(phase, 1) % 2 == 1

    def forgets(self, at: Moment) -> bool:
        """Where a dense phase begins, but for the first."""
        return self.reset_momentum and at.step > 0 and self.dense_at(at) and not self.dense_at(at.before())

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """Everything is kept before the first phase."""
        solver.state.per_unit["keep"] = torch.ones(solver.count, dtype=torch.bool, device=solver.device)
        solver.state.numbers["dense"] = 1

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """A new mask where a phase begins; in between, momentum must not move what is pruned."""
        state = solver.state
        if not state.numbers["dense"]:
            solver.restart(~state.per_unit["keep"])  # the step behind was taken with the mask so far
        if self.dense_at(at):
            if not state.numbers["dense"]:
                self.setup(solver, at)
        elif state.numbers["dense"] or at.phase == "finetune":
            state.numbers["dense"] = 0
            state.per_unit["keep"] = solver.top(solver.k, solver.scores())
            solver.restart(~state.per_unit["keep"])

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """M ⊙ θ and M ⊙ g, with M of this phase."""
        return Form(Stored("keep"), STRAIGHT if solver.state.numbers["dense"] else KEPT)
