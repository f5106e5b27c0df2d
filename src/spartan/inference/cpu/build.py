"""Compiles the CPU kernels: plain C++ with a C interface, so that one library serves every torch and every Python.

Run by the package's build (`setup.py`, which loads this file by its path: nothing of torch or spartan is imported here)
and, where no compiled library came with the package (editable installs, source checkouts), on first use.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("job.h", "vectors.h", "attend.h", "walk.h", "kernels.cpp", "dispatch.cpp")
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall"),
    # Multiply and add may be one rounding; NaN and infinity keep their meaning (no -ffast-math).
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
# One object of kernels.cpp each; the best the processor has is picked at run time.
VARIANTS = {
    "portable": ("-Wno-psabi",),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"),
}


def fingerprint() -> str:
    """What the library depends on: the sources, the flags, the kind of machine.

    Example:
        >>> len(fingerprint())
        16
    """
    digest = hashlib.sha256(f"{FLAGS}{VARIANTS}{platform.machine()}{sys.platform}".encode())
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, arguments and all, else c++, g++ or clang++; None where there is none."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in (*([given] if given else []), ["c++"], ["g++"], ["clang++"]):
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    return None


def machine() -> str:
    """The kind of processor that is compiled for: this one, or where a package is built for another, that one."""
    other = os.environ.get("_PYTHON_HOST_PLATFORM")  # what tools that build for another machine tell Python's own build
    return sysconfig.get_platform().rpartition("-")[2] if other else platform.machine().lower()


def compile_library(target: Path) -> None:
    """Compile to `target`; RuntimeError with the compiler's words where that fails."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler found: install g++ or clang++, or name one in CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for isa, flags in VARIANTS.items():
            if isa != "portable" and machine() not in ("x86_64", "amd64"):
                continue  # elsewhere, what the compiler takes by default
            objects.append(f"{folder}/{isa}.o")
            _call([*cxx, *FLAGS, *flags, f"-DSPARTAN_ISA={isa}", "-c", str(HERE / "kernels.cpp"), "-o", objects[-1]])
        objects.append(f"{folder}/dispatch.o")
        _call([*cxx, *FLAGS, "-c", str(HERE / "dispatch.cpp"), "-o", objects[-1]])
        made = f"{folder}/library"
        _call([*cxx, "-shared", "-pthread", *objects, "-o", made])
        # In one step, so that a second process never sees half a library.
        os.replace(made, target)


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
