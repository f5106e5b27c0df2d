"""Without a framework nothing of it is imported, and the error names the extra."""

import subprocess
import sys

GONE = {
    "transformers": ["transformers", "accelerate"],
    "lightning": ["lightning", "pytorch_lightning"],
    "accelerate": ["accelerate"],
}
CODE = f"""
import importlib, sys
for name, gone in {GONE}.items():
    sys.modules.update(dict.fromkeys([*gone, "torchvision"]))  # as if they were not installed
import spartan, spartan.integrations
for name in {list(GONE)}:
    try:
        importlib.import_module(f"spartan.integrations.{{name}}")
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_error_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    for line, (name, gone) in zip(done.stdout.splitlines(), GONE.items(), strict=True):
        assert line.startswith(f"spartan.integrations.{name} needs {' or '.join(gone)}, which is not installed: ")
        assert line.endswith(f"pip install 'spartan-sparsity[{name}]'")
