"""The package's own part of the build: compile the CPU kernels into the wheel, where there is a compiler.

Everything else is in pyproject.toml. Without a compiler, or with SPARTAN_NO_COMPILE=1, the wheel is a pure one; with
SPARTAN_REQUIRE_KERNELS=1, as in releases, kernels that do not compile are an error, and no pure wheel is made.
Editable installs compile nothing here: the kernels are compiled on first use, into the user's cache
(inference/cpu/library.py).
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = "spartan/inference/cpu"


class BuildWithKernels(build_py):
    """Copies the Python files, then compiles the kernels beside them."""

    def run(self) -> None:
        """All of it, or a warning; in a release an error."""
        super().run()
        required = os.environ.get("SPARTAN_REQUIRE_KERNELS") == "1"
        left_out = os.environ.get("SPARTAN_NO_COMPILE") == "1"
        if required and left_out:
            raise RuntimeError(
                "SPARTAN_REQUIRE_KERNELS=1 and SPARTAN_NO_COMPILE=1 contradict each other: unset one of them"
            )
        if self.editable_mode or left_out:
            return
        spec = importlib.util.spec_from_file_location(
            "build_kernels", Path(__file__).parent / "src" / FOLDER / "build.py"
        )
        assert spec is not None and spec.loader is not None  # noqa: PT018
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            build.compile_library(Path(self.build_lib) / FOLDER / "_kernels.so")
        except Exception as error:  # the package is whole without them
            if required:
                raise RuntimeError(f"SPARTAN_REQUIRE_KERNELS=1, but the CPU kernels do not compile: {error}") from error
            self.warn(f"the CPU kernels are left out, inference of sparse models will be slower: {error}")


class WheelForEveryPython(bdist_wheel):
    """One wheel for every Python: the kernels know nothing of it, only of the machine."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python; this machine only where there is a library in the wheel."""
        compiled = any(Path(self.bdist_dir).rglob("_kernels.so")) if self.bdist_dir else False
        return ("py3", "none", super().get_tag()[2] if compiled else "any")


class WithKernels(Distribution):
    """Says that there is compiled code, so that the wheel is tagged for the machine."""

    def has_ext_modules(self) -> bool:
        """Unless the user said no."""
        return os.environ.get("SPARTAN_NO_COMPILE") != "1"


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForEveryPython})
