"""Golden losses: a refactor must train exactly as before.

After a change that is meant to alter training, write them anew and say why in the commit:

    python -m tests.golden.test_golden
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.cases import METHODS, STEPS, Case, backward

FILE = Path(__file__).with_name("losses.json")
CASES = [
    *(Case(method, "unstructured", "global", "params") for method in METHODS),
    *(Case(method, "block", "erk", "flops") for method in METHODS),
]


def losses(case: Case) -> list[float]:
    model, optimizer, sparsifier = case.build()
    found = []
    for step in range(STEPS):
        found.append(backward(model, step).item())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, sparsifier.stats.cost]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_are_golden(case: Case) -> None:
    golden = json.loads(FILE.read_text())
    assert losses(case) == pytest.approx(golden[str(case)], rel=1e-9)


if __name__ == "__main__":
    FILE.write_text(json.dumps({str(case): losses(case) for case in CASES}, indent=1) + "\n")
    print(f"wrote {FILE}")
