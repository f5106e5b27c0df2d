"""Golden losses: a refactor must train exactly as before.

python -m tests.golden.test_golden          adds the losses of new methods
python -m tests.golden.test_golden --all    writes all anew, after a change that is meant to alter training
"""

from __future__ import annotations

import json
import sys
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
    if str(case) not in golden:
        pytest.skip(f"{case} is new; `python -m tests.golden.test_golden` adds its losses")
    assert losses(case) == pytest.approx(golden[str(case)], rel=1e-9)


if __name__ == "__main__":
    known = {} if "--all" in sys.argv else json.loads(FILE.read_text())
    golden = {str(case): known.get(str(case)) or losses(case) for case in CASES}
    FILE.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"wrote {FILE.name}: {len(set(golden) - set(known))} of {len(golden)} are new")
