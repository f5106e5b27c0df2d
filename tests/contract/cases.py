"""The product of methods, patterns, budgets and costs that every contract test runs over.

Every registered method is here by itself; a new one needs no new test.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan import NM, Block, Channel, Flops, Sparsifier, Spartan, TopKAST, Unstructured
from spartan.methods import SET, ST3, STR, Method, RigL  # type: ignore[attr-defined]
from tests.contract.kinds import Hurried, LearnedScores, Regrowing, Sampled

METHODS: dict[str, Method] = {entry.name: entry.cls() for entry in spartan.methods()} | {
    "spartan-soft": Spartan(project=False),
    "spartan-hard": Spartan(beta=float("inf")),
    "spartan-sinkhorn": Spartan(solver="sinkhorn", init="threshold"),
    "spartan-cached": Spartan(solver="sinkhorn", init="cached"),
    "topkast-sparse-backward": TopKAST(backward_sparsity=0.25),
    # A rewiring in every other step of the contract's short runs.
    "rigl-often": RigL(every=2, fraction=0.5),
    "set-often": SET(every=2, fraction=0.5),
    "paced-hurried": Hurried(),
    "learned": LearnedScores(),
    "regrowing": Regrowing(),
    "sampled": Sampled(),
    "st3-sigma": ST3(sigma=True),
    "str-published": STR(exact=False, decay=1e-3),
}
PATTERNS = {
    "unstructured": Unstructured(),
    "block": Block(2, 2),
    "rows": Block(1, -1),
    "channel-in": Channel("in"),
    "nm": NM(1, 2),
}
BUDGETS: dict[str, Any] = {"global": "global", "uniform": "uniform", "erk": "erk", "by-name": {"conv.*": 0.5}}
COSTS = {"params": None, "flops": Flops(torch.zeros(1, 2, 6, 6, dtype=torch.float64))}
SPARSITY, STEPS = 0.7, 12
M = TypeVar("M", bound=nn.Module)


class Net(nn.Module):
    """A convolution, a norm and two Linears: small, with every shape divisible by two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, stride=2), nn.BatchNorm2d(4)
        self.hidden, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(torch.tanh(self.hidden(x)))


def sparsity_of(pattern: str) -> float:
    """N:M has one only."""
    found = PATTERNS[pattern]
    return found.sparsity if isinstance(found, NM) else SPARSITY


def begin(model: M, method: Method, sparsity: float, **asked: Any) -> M:
    """The model as the method takes it: some need zeros to begin with."""
    return spartan.prune(model, sparsity, **asked) if method.needs.startswith("a sparse model") else model


@dataclass(frozen=True)
class Case:
    method: str
    pattern: str
    budget: str
    cost: str

    def build(self, seed: int = 0, **kwargs: Any) -> tuple[nn.Module, torch.optim.Optimizer, Sparsifier]:
        """A float64 net with its optimizer (momentum, weight decay) and sparsifier."""
        torch.manual_seed(seed)
        model = Net().double()
        sparsity, method = sparsity_of(self.pattern), METHODS[self.method]
        asked = {"pattern": PATTERNS[self.pattern], "cost": COSTS[self.cost], "budget": BUDGETS[self.budget]}
        sparsifier = Sparsifier(begin(model, method, sparsity, **asked), sparsity, STEPS, method, **asked, **kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=1e-3)
        sparsifier.attach(optimizer)
        return model, optimizer, sparsifier


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """The data of a step, the same in every run."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(size, 2, 6, 6, dtype=torch.float64, generator=g)
    return x, torch.randint(4, (size,), generator=g)


def backward(model: nn.Module, step: int) -> Tensor:
    """Loss and gradients for w."""
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def all_cases() -> list[Any]:
    """The full product; what the covering subset leaves out is marked slow."""
    found = []
    for (m, method), (p, pattern), (b, budget), (c, cost) in itertools.product(
        enumerate(METHODS), enumerate(PATTERNS), enumerate(BUDGETS), enumerate(COSTS)
    ):
        # Every m weights have a budget of their own; what does not go with that is refused (tests/test_nm.py).
        if isinstance(PATTERNS[pattern], NM) and (METHODS[method].refuses_nm or budget in ("erk", "by-name")):
            continue
        # Each method meets every pattern and every budget; patterns and budgets meet each other across methods.
        covering = ((m + p) % len(BUDGETS) == b and (m + b) % len(COSTS) == c) or (p == 0 and b == 3 and c == 0)
        covering |= pattern == "nm" and budget == "global" and cost == "params"
        marks = [] if covering else [pytest.mark.slow]
        found.append(
            pytest.param(Case(method, pattern, budget, cost), marks=marks, id=f"{method}-{pattern}-{budget}-{cost}")
        )
    return found
