"""A new method in one file: gradual magnitude pruning that never lets a pruned weight come back.

    python examples/new_method.py

Put the class into `src/spartan/methods/`, or anywhere in your own code: `@register` makes it known to `method="..."`,
to recipes, to the help and, in the package, to the contract tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spartan import NM, Block, Flops, Sparsifier
from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.problem.schedules import Moment
from spartan.solvers.forms import KEPT, Form, Stored
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class OneWay(Method):
    """One-way pruning: the largest of what is still there stay, and what is gone stays gone.

    M ← M ⊙ [|θ| among the k largest of M]      after every step, while the budget k falls
    θ ← θ − η · M ⊙ ∇L(M ⊙ θ)
    """

    name = "one-way"
    year = 2026
    mask_rule = "top-k of |θ| among what is still kept"
    gradient_rule = "g where kept, else 0"
    reference = "this example"
    refuses_nm = ""

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """Everything is kept at first: one bool per unit, saved with the run."""
        solver.state.per_unit["mask"] = torch.ones(solver.count, dtype=torch.bool, device=solver.device)

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """Exact for any pattern, cost and budget; the device is not waited for."""
        kept = solver.state.per_unit["mask"]
        solver.state.per_unit["mask"] = solver.top(solver.k, solver.scores(), among=kept)

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """w = M ⊙ θ, and M ⊙ g."""
        return Form(Stored("mask"), KEPT)


def main() -> None:
    """Trains a small net with it, in several ways, and counts."""
    ways: dict[str, dict[str, Any]] = {
        "one budget": {"min_density": 0.02},
        "ERK": {"budget": "erk"},
        "4×4 blocks": {"pattern": Block(4, 4), "min_density": 0.02},
        "2:4": {"pattern": NM(2, 4)},
        "FLOPs": {"cost": Flops(torch.zeros(1, 32)), "min_density": 0.02},
    }
    for way, options in ways.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sparsifier = Sparsifier(model, 0.5 if way == "2:4" else 0.9, 50, "one-way", **options).attach(optimizer)
        before = sparsifier.masks()
        for _ in range(50):
            x = torch.randn(64, 32)
            nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = sparsifier.masks()
            assert all(not (after[name] & ~before[name]).any() for name in after), "nothing comes back"
            before = after
        sparsifier.finalize()
        print(f"{way}: {sparsifier.stats.cost:.0f} kept of {sparsifier.stats.target_cost:.1f} asked")


if __name__ == "__main__":
    main()
