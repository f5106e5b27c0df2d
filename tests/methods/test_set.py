"""SET follows its algorithm (Mocanu et al. 2018, in the form that Evci et al. 2020 compare with).

What it shares with RigL (budgets, resuming, choosing twice) is tested there, for both.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from spartan import Block, Sparsifier, Unstructured
from spartan.methods import SET  # type: ignore[attr-defined]
from spartan.ops.drawing import key_of, uniform
from tests.contract.cases import Net
from tests.methods.rewiring import END, NAMES, Rule, T, compare, cosine_down


def at_random(seed: int) -> Any:
    sizes = [Net().get_parameter(name).numel() for name in NAMES]

    def rank(layer: int, step: int, gradient: Tensor) -> Tensor:
        before = sum(sizes[:layer]) * gradient.numel() // sizes[layer]  # units of the layers before
        index = torch.arange(before, before + gradient.numel(), dtype=torch.int32)
        return uniform(index, key_of(seed, step).joined(key_of(0)))

    return rank


@pytest.mark.parametrize("budget", ["erk", "uniform"])
@pytest.mark.parametrize("side", [1, 2])
def test_forty_steps(budget: str, side: int) -> None:
    pattern = Unstructured() if side == 1 else Block(2, 2)
    method = SET(every=4, fraction=0.5)
    seen = compare(
        lambda model: Sparsifier(model, 0.7, T, method, pattern=pattern, budget=budget),
        Rule(lambda t: t % 4 == 0 and t < END, lambda t, kept: cosine_down(0.5, t + 1, kept)),
        at_random,
        side,
    )
    changed = [any(not torch.equal(a[n] != 0, b[n] != 0) for n in NAMES) for a, b in pairwise(seen)]
    assert changed[0]
    assert not any(changed[END:])


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="SET: every=0"):
        SET(every=0)
    with pytest.raises(ValueError, match="SET: fraction=nan"):
        SET(fraction=float("nan"))
