"""Movement pruning: learned scores decide what is kept."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spartan.methods.registry import register
from spartan.methods.scored import ScoredMasks
from spartan.problem.schedules import Moment, Schedule, cubic, delayed
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class Movement(ScoredMasks):
    """Movement pruning: keep the units of largest learned score; a weight that moves away from zero gains score.

        w = θ ⊙ M,  M = [S among the k largest]     one score S per unit
        θ ← θ − η · M ⊙ ∇L(w)
        S ← S − η_S · Σ ∇L(w) ⊙ θ                   straight through the top-k, summed over each unit, kept or not

    The defaults are the paper's and its code's: scores start at zero, have no weight decay and a learning rate of their
    own, and compete within each layer. Of a run the first tenth stays dense, the sparsity grows by a cubic until eight
    tenths, and scores go on learning to the end; `finetune=0.2` would fix the mask there. Soft movement, a threshold on
    the scores with a penalty, meets no budget and is left out.

    With equal scores, which only a run without a warm-up (`warmup=0`) notices, the units that come first are kept.

    Args:
        score_lr: learning rate of the scores; None is the optimizer's own. As they start at zero and only their order
            counts, SGD and Adam choose the same masks at any rate above 0.
        ramp: how the sparsity grows over the warm-up, from 0 to 1 of the final one.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=Movement()).attach(optimizer)
        >>> for _ in range(10):
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> int((model.weight != 0).sum())
        16
    """

    score_lr: float | None = 1e-2
    ramp: Schedule = delayed(cubic(0.0, 1.0), 0.125)  # of the warm-up: a tenth of the run

    name = "movement"
    learned = "S"
    year = 2020
    mask_rule = "top-k of learned scores, every step"
    gradient_rule = "g where kept, else 0; for the scores Σ g·θ over each unit"
    needs = "one learned score per unit"
    reference = "Sanh, Wolf & Rush, Movement pruning: Adaptive sparsity by fine-tuning, NeurIPS 2020"
    budget = "uniform"
    refuses_nm = ""
    warmup = 0.8
    finetune = 0.0

    def __post_init__(self) -> None:
        if self.score_lr is not None and not self.score_lr > 0:
            raise ValueError(f"Movement: score_lr={self.score_lr!r} is not a learning rate; it must be above 0")

    @property
    def learned_options(self) -> dict[str, Any]:  # type: ignore[override]
        """The scores' own learning rate, and no weight decay: it would pull them back to where all are equal."""
        return {"weight_decay": 0.0} | ({} if self.score_lr is None else {"lr": self.score_lr})

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """S = 0."""
        solver.state.learned["S"] = nn.Parameter(torch.zeros(solver.count, dtype=solver.dtype, device=solver.device))
