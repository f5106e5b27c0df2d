"""Chooses the kernel that runs a layer: times a few at the layer's own shape, and keeps the answer on disk."""

import contextlib
import functools
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from spartan.disk import replace_file
from spartan.inference.cpu.library import cache_folder, library, status
from spartan.inference.cpu.ops import stored
from spartan.inference.cpu.walk import MOST_INPUTS, MOST_TOKENS
from spartan.inference.few import WalkLinear
from spartan.inference.runtime import DenseConv2d, DenseLinear, Kernel, SparseConv2d, SparseLinear, name_of

K = TypeVar("K")
WALK: Kernel = ("walk", 16, 1)
ROUNDS, WARM_UP, LEAST_SECONDS, MOST_ROUNDS, SHOWN = 7, 2, 0.1, 40, 4
# Rough rates relative to the best kernel, set by hand after timings on one AVX-512 processor: they only decide which
# three kernels are timed.
_RATE: dict[tuple[str, int], float] = {
    **{("rows", 8): 0.8, ("rows", 16): 1.0, ("rows", 32): 1.0, ("rows", 64): 1.0},
    **{("lanes", 1): 0.35, ("lanes", 2): 0.5, ("lanes", 4): 0.75, ("lanes", 8): 0.85},
}
_RUN_RATE = {8: 1.0, 4: 0.9, 1: 0.75}
DENSE_ABOVE = 0.7  # with this share of the weight left to multiply, no kernel is worth timing
# But this one, for a linear layer of at least so many weights: it reads a whole weight faster than torch's product may do.
WHOLE: Kernel = ("rows", 16, 8)
LARGE = 1 << 18


def candidates(layer: DenseLinear | DenseConv2d, parts: int = 1, tokens: int = 0) -> list[tuple[Kernel, float]]:
    """Kernels that may suit the weight's zeros, the most promising first, each with the share of the weight it stores.

    `parts`: the layer's outputs are also asked for in that many equal parts, which groups of rows must not straddle.
    `tokens`: of the inputs, where that is known; for a few there is a kernel of its own.
    """
    weight = layer.weight.reshape(len(layer.weight), -1) != 0
    outputs = len(weight)
    shapes: list[Kernel] = [("lanes", h, 1) for h in (1, 2, 4, 8)]
    if isinstance(layer, DenseConv2d):
        parts *= layer.conv.groups
    else:
        shapes += [("rows", h, g) for h in (8, 16, 32, 64) for g in (8, 4, 1)]
    found = []
    for kind, h, g in shapes:
        if (h > 1 and h > outputs) or (parts > 1 and (outputs // parts) % h):
            continue
        share = stored(weight, h, g) / weight.numel()
        rate = _RATE[kind, h] * (_RUN_RATE[g] if kind == "rows" else 1.0)
        found.append((share / rate, (kind, h, g), share))
    best = [(kernel, share) for _, kernel, share in sorted(found)[:3]]
    if 0 < tokens <= MOST_TOKENS and isinstance(layer, DenseLinear) and weight.shape[1] <= MOST_INPUTS:
        return [(WALK, float(weight.float().mean())), *best[:2]]
    return best


def choose(
    layer: DenseLinear | DenseConv2d, shape: tuple[int, ...], dtype: torch.dtype, kernels: str, parts: int = 1
) -> tuple[Kernel | None, str]:
    """The kernel for inputs of this shape and type and the reason, in a few words; None is torch's dense product.

    `kernels` is "auto", or "sparse" to leave the dense product out; `parts` is as for `candidates`.
    """
    tokens = 0 if isinstance(layer, DenseConv2d) or library() is None else math.prod(shape[:-1])
    zeros, options = layer.zeros, candidates(layer, parts, tokens)
    if library() is None:
        return None if kernels == "auto" else options[0][0], f"{zeros:.1%} zeros; {status()}"
    if kernels == "auto":
        options = [option for option in options if option[1] <= DENSE_ABOVE]
        if not options and isinstance(layer, DenseLinear) and layer.weight.numel() >= LARGE:
            options = [(WHOLE, 1.0)]
    if not options:
        return None, f"{zeros:.1%} zeros: too few, or too scattered for any kernel"
    what = layer.conv if isinstance(layer, DenseConv2d) else "linear"
    # Shares to two digits: layers that differ by a few weights share a measurement.
    shares = [f"{name_of(kernel)} {share:.2g}" for kernel, share in options]
    case = [machine(), what, tuple(layer.weight.shape), shape, dtype, layer.activation, kernels, *shares]
    named: dict[str, Kernel | None] = {name_of(kernel): kernel for kernel, _ in options}
    named |= {"dense": None} if kernels == "auto" else {}
    return fastest(named, zeros, shape, measured(case, lambda: _measure(layer, shape, dtype, named), named))


def fastest(
    named: Mapping[str, K | None], zeros: float, shape: tuple[int, ...], times: Mapping[str, float]
) -> tuple[K | None, str]:
    """The kernel of the least time, and why: the times that were measured, those of a few where there are many.

    Example:
        >>> fastest({"dense": None, "rows 16×8": ("rows", 16, 8)}, 0.9, (8, 64), {"dense": 0.002, "rows 16×8": 0.001})
        (('rows', 16, 8), '90.0% zeros, input 8×64: rows 16×8 1 ms, dense 2 ms')
    """
    ranked = sorted((name for name in times if times[name] < math.inf), key=lambda name: times[name])
    failed = len(times) - len(ranked)
    note = f"; {failed} of {len(times)} kernels failed" if failed else ""
    if not ranked:
        return None, f"{zeros:.1%} zeros{note}"
    shown = [name for name in ranked if name in ranked[:SHOWN] or name == "dense"]
    rest = ", ".join(f"{name} {1e3 * times[name]:.3g} ms" for name in shown)
    return named[ranked[0]], f"{zeros:.1%} zeros, input {'×'.join(map(str, shape))}: {rest}{note}"


def sparse_layer(layer: DenseLinear | DenseConv2d, kernel: Kernel) -> SparseLinear | SparseConv2d | WalkLinear:
    """The layer on a sparse kernel."""
    if kernel == WALK:
        return WalkLinear(layer.weight, layer.bias, layer.activation)
    if isinstance(layer, DenseConv2d):
        return SparseConv2d(layer.weight, layer.bias, layer.conv, kernel, layer.activation)
    return SparseLinear(layer.weight, layer.bias, kernel, layer.activation)


@torch.inference_mode()
def _measure(
    layer: DenseLinear | DenseConv2d, shape: tuple[int, ...], dtype: torch.dtype, kernels: Mapping[str, Kernel | None]
) -> dict[str, float]:
    """Seconds by kernel: the least of several rounds, kernels taking turns so that a busy moment hits them all."""
    x = torch.rand(shape, dtype=torch.float32).to(dtype)
    runs = {name: layer if kernel is None else sparse_layer(layer, kernel) for name, kernel in kernels.items()}
    times = dict.fromkeys(runs, math.inf)
    begin = time.perf_counter()
    for turn in range(WARM_UP + MOST_ROUNDS):
        if turn >= WARM_UP + ROUNDS and time.perf_counter() - begin > LEAST_SECONDS:
            break
        for name, run in runs.items():
            start = time.perf_counter()
            run(x)
            if turn >= WARM_UP:
                times[name] = min(times[name], time.perf_counter() - start)
    return times


@functools.cache
def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """What times depend on: the processor, the threads, the instruction set, torch and the kernels' version."""
    kernels = library()
    isa = "none" if kernels is None else f"{kernels.spartan_isa().decode()} {kernels.spartan_version()}"
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{_processor()}, {threads}, {isa}, torch {torch.__version__}"


def measured(
    case: Sequence[object], measure: Callable[[], dict[str, float]], kernels: Iterable[str]
) -> dict[str, float]:
    """Seconds by kernel for a case, from the cache on disk or measured now; what is damaged there is told and replaced.

    Times of kernels other than `kernels` are of an older version and do not count.
    """
    path, key = cache_folder() / "choices.json", "; ".join(map(str, case))
    kept, damaged = _cached(path)
    times = kept.get(key)
    if damaged:
        warnings.warn(f"{path} is damaged: kernels whose times it lost are timed again", UserWarning, stacklevel=2)
    if times is None or damaged or not set(times) <= set(kernels):
        times = times if times is not None and set(times) <= set(kernels) else measure()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(_cached(path)[0] | {key: times}, indent=1).encode())
    return times


def _cached(path: Path) -> tuple[dict[str, dict[str, float]], bool]:
    """The times that are on disk, by case, and whether any could not be read."""
    try:
        read = json.loads(path.read_text("utf-8"))
    except OSError:
        return {}, False
    except (ValueError, RecursionError):
        return {}, True
    if not isinstance(read, dict):
        return {}, True
    kept = {case: times for case, times in read.items() if isinstance(times, dict) and times and _are_times(times)}
    return kept, len(kept) < len(read)


def _are_times(times: Mapping[str, object]) -> bool:
    """Whether these are seconds; infinity is the time of a kernel that failed."""
    return all(isinstance(t, (int, float)) and not isinstance(t, bool) and t >= 0 for t in times.values())
