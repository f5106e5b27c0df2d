"""Reads forged files in a process of its own, and tells what went wrong: `python -m tests.files.reading FIRST LAST`.

For every file `inspect`, `read` and `load` (with the model and without, with dense layers and the kernels of this
machine) must stay within the documented memory and ten seconds, raise nothing but ValueError, say nothing that could
steer a terminal, and give what `tests.files.plain` reads. A line of JSON for every fault, and one at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spartan.files import format, inspect, load, read
from spartan.files.load import ALWAYS, RATIO
from spartan.inference.cpu.library import cache_folder
from tests.files import plain
from tests.files.forgeries import Base, bases, forgery

SECONDS = 10.0
ADDRESSES = (
    6 << 30
)  # more than what is allowed to any file here; what asks for more is a MemoryError, not a dead machine
BESIDE = 32 << 20  # what Python, torch and the allocator take besides
FACTOR = 8  # with kernels: the copy of the model, and what timing its layers takes


class Fault(Exception):
    """A file did what it may not."""


def peak() -> int:
    """The most memory that was resident since the last `forget_peak`, or ever."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> int:
    """Begin to look for a peak anew, where the system can; what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def attempt(what: str, run: Callable[[], Any], allowed: int) -> Any:
    """What a call gives, or the ValueError that it raised; a Fault for anything else."""
    before, start = forget_peak(), time.process_time()
    try:
        result = run()
    except ValueError as error:
        result = error
        if not str(error).isprintable():
            raise Fault(f"{what}: the error is {str(error)!r}") from None
    except BaseException as error:
        raise Fault(f"{what}: {type(error).__name__}: {error!s:.300}") from error
    seconds, grown = time.process_time() - start, peak() - before
    if seconds > SECONDS:
        raise Fault(f"{what} took {seconds:.1f} s")
    if grown > allowed + BESIDE:
        raise Fault(f"{what} took {grown:,} bytes, and {allowed:,} are allowed")
    return result


def same(found: Tensor, expected: plain.Tensor) -> bool:
    """Whether a tensor has every bit that the plain reader found."""
    if format.NAMES[found.dtype] != expected.dtype or tuple(found.shape) != expected.shape:
        return False
    bits = format.as_bits(found.contiguous()).reshape(-1)
    places = bits.nonzero().squeeze(1)
    width = (1 << 8 * found.dtype.itemsize) - 1
    entries = {i: x & width for i, x in zip(places.tolist(), bits[places].tolist(), strict=True)}
    return entries == expected.entries


def read_plainly(file: bytes) -> tuple[plain.File | None, dict[str, plain.Tensor] | None, str]:
    """What the plain reader makes of the header and of the tensors; None where it refuses."""
    header = None
    try:
        header = plain.File(file)
        if header.nbytes > max(RATIO * len(file), ALWAYS):
            return header, None, "more than is allowed"
        return header, header.tensors(), ""
    except plain.Refused as error:
        return header, None, f"{error} {error.__traceback__.tb_next and error.__traceback__.tb_next.tb_lineno}"  # type: ignore[union-attr]


def check(path: Path, base: Base, file: bytes, models: dict[int, nn.Module]) -> str:
    """What became of a file: how far it came; a Fault if that is wrong."""
    path.write_bytes(file)
    allowed = max(RATIO * len(file), ALWAYS)
    page = attempt("inspect", lambda: inspect(path), 0 + ALWAYS)
    tensors = attempt("read", lambda: read(path), allowed)
    header, expected, why = read_plainly(file)
    if isinstance(page, str) != (header is not None):
        raise Fault(f"inspect and the plain reader differ: {page!s:.200}; {why}")
    if isinstance(page, str) and not all(line.isprintable() for line in page.split("\n")):
        raise Fault("inspect prints what steers a terminal")
    if isinstance(tensors, dict) != (expected is not None):
        raise Fault(f"read and the plain reader differ: {tensors!s:.200}; {why}")
    if expected is not None and (
        tensors.keys() != expected.keys() or not all(same(x, expected[name]) for name, x in tensors.items())
    ):
        raise Fault("read gives other tensors than the plain reader")
    came_to = "read" if expected is not None else "inspected" if header is not None else "refused"
    named = attempt("load", lambda: load(path, kernels="dense"), allowed)
    if isinstance(named, nn.Module):
        if expected is None:
            raise Fault("load gives what read does not")
        if not all(same(x.detach(), expected[name]) for name, x in named.state_dict().items()):
            raise Fault("load gives other weights than the file has")
        fast = attempt("load with kernels", lambda: load(path), FACTOR * allowed)
        if not isinstance(fast, nn.Module):
            raise Fault(f"load with kernels refuses what it loads without: {fast}")
        compare(named, fast)
        came_to = "built"
    if id(base) not in models:
        models[id(base)] = base.model()
    fitted = into_model(path, models[id(base)], expected, kernels=came_to != "built")
    return came_to + (" and fitted" if fitted else "")


def into_model(path: Path, model: nn.Module, expected: dict[str, plain.Tensor] | None, kernels: bool) -> bool:
    """Load into a model: all of the file's weights, or none; with kernels too."""
    size = sum(x.nbytes for x in model.state_dict().values())
    allowed = ALWAYS + 40 * size
    before = {name: x.clone() for name, x in model.state_dict().items()}
    loaded = attempt("load into a model", lambda: load(path, model, kernels="dense"), allowed)
    if not isinstance(loaded, nn.Module):
        after = model.state_dict()
        if not all(torch.equal(format.as_bits(before[name]), format.as_bits(x)) for name, x in after.items()):
            raise Fault("a refused file has changed the model")
        return False
    tensors = read(path, max_bytes=1 << 40)
    for name, x in model.state_dict().items():
        if not torch.equal(format.as_bits(x), format.as_bits(tensors[name].to(x.dtype))):
            raise Fault(f"{name} of the model is not the file's")
    if expected is None:
        raise Fault("a model takes what read refuses")
    if not kernels:
        return True
    fast = attempt("load into a model with kernels", lambda: load(path, model), FACTOR * allowed)
    if not isinstance(fast, nn.Module):
        raise Fault(f"load with kernels refuses what it loads without: {fast}")
    return True


@torch.no_grad()
def compare(dense: nn.Module, fast: nn.Module) -> None:
    """The same outputs, where the weights are numbers of usual sizes and the model takes digits."""
    first = next(dense.parameters(), None)
    tame = all(
        x.isfinite().all() and x.abs().max() < 100
        for x in dense.state_dict().values()
        if x.dtype == torch.float32 and x.numel()
    )
    if (
        first is None
        or first.shape != (32, 1, 3, 3)
        or not tame
        or {p.dtype for p in dense.parameters()} != {torch.float32}
    ):
        return
    if any((x < 0).any() for name, x in dense.named_buffers() if name.endswith("var")):
        return
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    a, b = dense(x), fast(x)
    if not torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max())):
        raise Fault("the kernels give other outputs than the dense layers")


def forget_choices(folder: Path) -> None:
    """Kernels are timed here, and not looked up from an earlier run; they are not compiled anew."""
    known = cache_folder()
    if known.is_dir():
        shutil.copytree(known, folder, ignore=shutil.ignore_patterns("choices.json"))
    os.environ["SPARTAN_CACHE"] = str(folder)


def main(first: int, last: int) -> None:
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        forget_choices(Path(folder) / "cache")
        path = Path(folder) / "file"
        found, models = bases(Path(folder)), dict[int, nn.Module]()
        for base in found:  # imports, and what is kept for later
            check(path, base, base.file, models)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + ADDRESSES, hard))
        for seed in range(first, last):
            base, file = forgery(found, seed)
            try:
                came_to = check(path, base, file, models)
            except Fault as fault:
                came_to = "fault"
                print(json.dumps({"seed": seed, "fault": str(fault)}), flush=True)
            counts[came_to] = counts.get(came_to, 0) + 1
    print(json.dumps({"files": last - first, "counts": counts, "seconds": time.process_time()}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
