"""Finds, or compiles on first use, and loads the CPU kernels.

In this order: the library that came with the package; the one compiled earlier for these sources, in the user's cache
(`$SPARTAN_CACHE`, else `$XDG_CACHE_HOME/spartan`, else `~/.cache/spartan`); one compiled now, into that cache. Where
none of it works, and where `SPARTAN_NO_KERNELS=1` says so, layers run in plain torch and `status()` says why.
"""

import contextlib
import ctypes
import functools
import os
from pathlib import Path

from spartan.inference.cpu import build

PACKAGED = Path(__file__).parent / "_kernels.so"
VERSION = 5  # spartan_version() in dispatch.cpp
_P, _I = ctypes.c_void_p, ctypes.c_int64


def cache_folder() -> Path:
    """Where compiled kernels and measured choices are kept."""
    given = os.environ.get("SPARTAN_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spartan"


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("SPARTAN_NO_KERNELS") == "1":
        return None, "SPARTAN_NO_KERNELS=1"
    if PACKAGED.exists():
        # It may be of another machine or an older version; the cache may have a better one.
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            return _open(PACKAGED), "the package's own library"
    try:
        compiled = cache_folder() / f"kernels-{build.fingerprint()}.so"
        if not compiled.exists():
            build.compile_library(compiled)
        return _open(compiled), f"compiled on first use: {compiled}"
    except (OSError, AttributeError, RuntimeError) as error:
        return None, str(error)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.spartan_version.restype = _I
    if library.spartan_version() != VERSION:
        raise RuntimeError(f"{path} is of version {library.spartan_version()}, not {VERSION}")
    library.spartan_isa.restype = ctypes.c_char_p
    library.spartan_use_isa.argtypes, library.spartan_use_isa.restype = [_I], _I
    library.spartan_use_openmp.argtypes = [_P, _P]
    library.spartan_lane_pitch.argtypes, library.spartan_lane_pitch.restype = [_I], _I
    library.spartan_linear.argtypes, library.spartan_linear.restype = [_P] * 6 + [_I] * 10, _I
    library.spartan_walk.argtypes, library.spartan_walk.restype = [_P] * 8 + [_I] * 7, _I
    slots = library.spartan_walk_slots
    slots.argtypes, slots.restype = [_P] * 3 + [_I] + [_P] * 4, _I
    library.spartan_conv.argtypes, library.spartan_conv.restype = [_P] * 8 + [_I] * 5, _I
    library.spartan_attend.argtypes, library.spartan_attend.restype = [_P] * 5 + [_I] * 3, _I
    library.spartan_pool.argtypes, library.spartan_pool.restype = [_P] * 3 + [_I] * 3, _I
    # Torch's own pool of threads: a second one would fight with it for the cores. Where there is no OpenMP with that
    # entry in this process, the library starts threads by itself.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        here = ctypes.CDLL(None)
        library.spartan_use_openmp(ctypes.cast(here.GOMP_parallel, _P), ctypes.cast(here.omp_get_thread_num, _P))
    return library


def library() -> ctypes.CDLL | None:
    """The kernels, or None where there are none."""
    return _load()[0]


def status() -> str:
    """One line: which kernels run here, or why none do.

    Example:
        >>> status().startswith(("kernels", "plain torch"))
        True
    """
    found, how = _load()
    if found is None:
        return f"plain torch: {how}"
    return f"kernels for {found.spartan_isa().decode()} ({how})"
