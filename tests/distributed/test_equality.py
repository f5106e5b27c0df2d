"""The same masks and weights on 1, 2 and 4 processes: supports bit for bit, weights to 1e-12, at every one of 20 steps."""

from __future__ import annotations

import pytest

from tests.distributed.cases import METHODS, PATTERNS, Case, differences
from tests.distributed.workers import on

# Soft and hard masks, stored ones, learned scores and thresholds; each pattern; one budget per layer; momentum that is
# forgotten, in part and altogether; several passes with a joint norm.
COVERING = [
    (Case("rigl"), "fsdp"),
    (Case("acdc"), "fsdp"),
    (Case("probmask"), "fsdp"),
    (Case("probmask"), "ddp"),
    (Case("spartan"), "fsdp"),
    (Case("movement", "block", even=True), "fsdp"),
    (Case("set", budget="uniform"), "fsdp"),
    (Case("topkast", budget="balanced"), "fsdp"),
    (Case("str", "thin"), "fsdp"),
    (Case("spartan"), "ddp"),
    (Case("static"), "ddp"),
]
ON_FOUR = [(Case("spartan"), "fsdp")]


@pytest.mark.parametrize(("world", "cases"), [(2, COVERING), (4, ON_FOUR)], ids=["2", "4"])
def test_a_covering_subset(world: int, cases: list[tuple[Case, str]]) -> None:
    for found in on(world, differences, cases):
        assert found == []


def every_case(how: str) -> list[tuple[Case, str]]:
    found = []
    for method in METHODS:
        for pattern in PATTERNS:
            if pattern == "nm" and METHODS[method].refuses_nm:
                continue
            budget = "global" if pattern == "nm" else None
            found.append((Case(method, pattern, budget, even=pattern == "block"), how))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_every_method(world: int, how: str, pattern: str) -> None:
    cases = [(case, h) for case, h in every_case(how) if case.pattern == pattern]
    for found in on(world, differences, cases):
        assert found == []


@pytest.mark.slow
def test_every_method_with_a_budget_per_layer() -> None:
    cases = [(Case(method, budget="uniform"), "fsdp") for method in METHODS]
    for found in on(2, differences, cases):
        assert found == []
