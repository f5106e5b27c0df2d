"""Thousands of forged files, their checksums good, read in a process of their own: see `tests.files.reading`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 200), *(pytest.param(i, i + 600, marks=pytest.mark.slow) for i in range(200, 5000, 600))],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks of memory are Linux's")
def test_forged_files_do_no_harm(first: int, last: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.files.reading", str(first), str(last)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-2000:]
    assert lines[:-1] == []
    counts = lines[-1]["counts"]
    assert lines[-1]["files"] == sum(counts.values()) == last - first
    # The files are neither all refused for a reason nor all harmless.
    for kind in ("refused", "inspected", "read", "read and fitted", "built and fitted"):
        assert counts[kind] > 0.01 * (last - first), counts
