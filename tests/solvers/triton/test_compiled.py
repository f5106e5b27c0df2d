from __future__ import annotations

import os
import subprocess
import sys


def test_kernels_compile_for_a_gpu() -> None:
    """In a process of its own, where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.solvers.triton.compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
