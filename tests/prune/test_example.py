"""The example that goes from training to generating runs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "prune_gpt.py"


def test_the_example(tmp_path: Path) -> None:
    command: list[Any] = [
        sys.executable,
        "-W",
        "error",
        EXAMPLE,
        "--steps",
        "6",
        "--finetune-steps",
        "4",
        "--out",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" loss ") == 12
    assert "10.00% of the weights left" in done.stdout
    assert (tmp_path / "sparse.safetensors").stat().st_size < 0.4 * (tmp_path / "dense.safetensors").stat().st_size
