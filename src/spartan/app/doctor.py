"""`spartan doctor`: what is installed, what would run a model here and why not something faster, and where caches are.

It prints plain lines and needs no extra. Nothing is guessed: solvers are asked by building a sparsifier, kernels by
loading them (which compiles them, where that was not done yet).
"""

import contextlib
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import spartan
from spartan.app.extras import NAME, extras, is_installed
from spartan.wording import first_line
from spartan_sparsity import conflict

VARIABLES = ("SPARTAN_CACHE", "SPARTAN_NO_KERNELS", "SPARTAN_NO_COMPILE", "SPARTAN_TIMEOUT", "SPARTAN_TRACEBACK")
LEAST_TORCH = (2, 11)
SIDE = 512  # of the layer that is asked about: as many weights as make chunks and kernels worth their while


def doctor() -> int:
    """Print everything; 0, or 1 where something is wrong that the lines beginning with "problem" name."""
    problems = []
    if other := conflict():
        problems.append(other)
    _section("versions", _versions())
    try:
        import torch
    except ImportError as error:
        problems.append(f"torch cannot be imported ({first_line(error)}): see https://pytorch.org/get-started")
        return _conclude(problems)
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        problems.append(f"torch {torch.__version__} is too old: pip install --upgrade 'torch>={least}'")
    _section("extras", _extras())
    _section("devices", _devices())
    _section("training: what chooses masks and writes weights", _solvers(problems))
    _section("inference: what runs sparse layers", _kernels())
    _section("caches", _caches())
    _section("settings", (f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ))
    return _conclude(problems)


def _section(title: str, lines: Iterable[str]) -> None:
    print(title)
    shown = False
    for line in lines:
        shown = True
        print(f"  {line}", flush=True)
    if not shown:
        print("  none")


def _conclude(problems: list[str]) -> int:
    for problem in problems:
        print(f"problem: {problem}")
    print("no problem found" if not problems else f"{len(problems)} found")
    return int(bool(problems))


def _versions() -> Iterator[str]:
    yield f"spartan {spartan.__version__}, {Path(spartan.__file__).parent}"
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.version(NAME)
        if installed != spartan.__version__:
            yield f"{NAME} {installed} is what pip installed: the files above are of another version"
    yield f"python {platform.python_version()}, {sys.executable}"
    yield f"{platform.system()} {platform.release()}, {platform.machine()}"
    for name in ("torch", "triton", "numpy"):
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name} is not installed"


def _extras() -> Iterator[str]:
    known = extras()
    if not known:
        yield f"unknown: {NAME} is not installed, its files are only on Python's path"
    for extra, packages in known.items():
        missing = [package for package in packages if not is_installed(package)]
        how = f"without {', '.join(missing)}: pip install '{NAME}[{extra}]'" if missing else "all there"
        yield f"{extra}: {how}"


def _devices() -> Iterator[str]:
    import torch

    yield f"cpu: {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}: {about.name}, {about.total_memory / 2**30:.0f} GiB, capability {about.major}.{about.minor}"
    if not torch.cuda.device_count():
        built = torch.version.cuda or torch.version.hip
        yield f"no GPU: {'none is visible' if built else 'this torch is built without CUDA'}"
    if torch.backends.mps.is_available():
        yield "mps: Apple's GPU"


def _solvers(problems: list[str]) -> Iterator[str]:
    import torch

    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for pattern in (None, spartan.Block(16, 16), spartan.Channel(), spartan.NM(2, 4)):
            name = "single weights" if pattern is None else str(pattern)
            try:
                layer = torch.nn.Linear(SIDE, SIDE, bias=False, device=device)
                with warnings.catch_warnings(action="ignore"):
                    told = repr(spartan.Sparsifier(layer, 0.5, total_steps=10, pattern=pattern, warmup=0.0))
            except Exception as error:  # whatever is broken on this machine is what the user wants to know
                problems.append(f"{name} on {device}: {type(error).__name__}: {first_line(error)}")
                yield f"{device}, {name}: fails, see below"
                continue
            by = [line.strip().removeprefix("by ") for line in told.splitlines() if line.startswith("  by ")]
            yield f"{device}, {name}: {by[0]}"


def _kernels() -> Iterator[str]:
    import torch

    from spartan.inference.cpu.library import status

    yield f"cpu: {status()}"
    if not torch.cuda.is_available():
        yield "gpu: none"
    elif not is_installed("triton"):
        yield "gpu: dense layers, since Triton is not installed: pip install triton"
    else:
        yield "gpu: Triton's block kernels and torch's 2:4, whichever is measured to be faster"


def _caches() -> Iterator[str]:
    from spartan.inference.cpu.library import cache_folder

    folder = cache_folder()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    locked = "" if os.access(existing, os.W_OK) else "; it cannot be written to: set SPARTAN_CACHE to a folder that can"
    yield f"kernels and their times: {folder}, {len(files)} files, {size:,} bytes{locked}"
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torch's default")
    triton = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    yield f"compiled by torch: {inductor}; by Triton: {triton}"
