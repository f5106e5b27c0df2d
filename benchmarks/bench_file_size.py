"""The size of packed files beside the information bound and other ways to store the same model, in one run.

    python benchmarks/bench_file_size.py [--models resnet50 vit_b_16] [--threads 2] [--repeats 3]

torchvision's architectures at their initialisation, pruned by magnitude to 80–99%, unstructured (every weight of linear
layers, convolutions and attention) and in 16×16 blocks (without the layers that 16 does not divide: the stem and the
classifier of ResNet-50, the classifier of ViT-B/16), saved in float32 and bfloat16. Tensors that begin constant (norms,
biases, running statistics, torchvision's ViT classifier) get random values, so that nothing is small for being untrained.

- bound: for pruned weights kept·bits + units·H(kept/units), a unit being an entry or a block; other tensors their size.
- CSR: values, columns and row starts, with 32- and 64-bit indices (torch's are 64); other tensors dense.
- torch.save and zstd (level 3) of the dense tensors.

Times are the best of the repeats, wall clock. Every file is read back and compared bit for bit. With --append rows go
to benchmarks/file_sizes.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import io
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartan
from spartan import Block, Unstructured, zoo
from spartan.files import codes, read, save
from spartan.problem.patterns import Pattern
from spartan.problem.targets import find_targets

# Where it is not installed its column stays empty.
zstandard: Any = importlib.import_module("zstandard") if importlib.util.find_spec("zstandard") else None
RESULTS = Path(__file__).parent / "file_sizes.csv"
SPARSITIES = (0.8, 0.9, 0.95, 0.99)
PATTERNS: dict[str, Pattern] = {"unstructured": Unstructured(), "16×16": Block(16, 16)}
EXCLUDED = {"resnet50": ("conv1.*", "fc.*"), "vit_b_16": ("heads.*",)}
COLUMNS = [
    *("date", "commit", "device", "threads", "python", "torch", "model", "pattern", "sparsity", "dtype"),
    *("bound", "packed", "over_bound", "dense", "csr32", "csr64", "torch_save", "zstd", "save_s", "read_s"),
]


def make(name: str, pattern: Pattern, sparsity: float) -> tuple[nn.Module, set[str]]:
    """A pruned model, and the names of its pruned weights."""
    torch.manual_seed(0)
    model: nn.Module = zoo.torchvision().models.get_model(name)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and float(tensor.max()) == float(tensor.min()):
            tensor.normal_(std=0.02)
    excluded = EXCLUDED[name] if isinstance(pattern, Block) else ()
    spartan.prune(model, sparsity, pattern=pattern, exclude=excluded)
    return model, {target.name for target in find_targets(model, exclude=excluded)}


def bound(x: Tensor, pattern: Pattern) -> float:
    """The information bound of a pruned weight, in bytes."""
    kept = pattern.reduce((x != 0).float()) > 0
    unit = pattern.unit_size(x.shape)
    return codes.bound(kept.numel(), int(kept.sum()), unit * 8 * x.dtype.itemsize) / 8


def csr(x: Tensor, index: int) -> int:
    return int(torch.count_nonzero(x)) * (x.dtype.itemsize + index) + (x.shape[0] + 1) * index


def best(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def raw(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def measure(name: str, kind: str, sparsity: float, dtype: torch.dtype, repeats: int, folder: Path) -> dict[str, object]:
    pattern = PATTERNS[kind]
    model, pruned = make(name, pattern, sparsity)
    state = {key: t.to(dtype) if t.is_floating_point() else t for key, t in model.state_dict().items()}
    path = folder / "model.safetensors"
    save_s = best(lambda: save(model, path, dtype), repeats)
    read_s = best(lambda: read(path), repeats)
    back = read(path)
    if not all(torch.equal(raw(back[key]), raw(tensor)) for key, tensor in state.items()):
        raise RuntimeError(f"{name} {kind} {sparsity}: what was read is not what was saved")
    rest = sum(t.nbytes for key, t in state.items() if key not in pruned)
    least = rest + sum(bound(state[key], pattern) for key in pruned)
    everything, pickled = torch.cat([raw(t) for t in state.values()]), io.BytesIO()
    torch.save(state, pickled)
    squeezed = len(zstandard.ZstdCompressor(level=3).compress(everything.numpy())) if zstandard else None
    size = path.stat().st_size
    return {
        **{"model": name, "pattern": kind, "sparsity": sparsity, "dtype": str(dtype).removeprefix("torch.")},
        **{"bound": round(least), "packed": size, "over_bound": f"{size / least - 1:.4f}", "dense": everything.numel()},
        **{f"csr{8 * n}": rest + sum(csr(state[key], n) for key in pruned) for n in (4, 8)},
        **{"torch_save": pickled.tell(), "zstd": squeezed, "save_s": f"{save_s:.3f}", "read_s": f"{read_s:.3f}"},
    }


def line(row: dict[str, object]) -> str:
    """A row of the table, in megabytes."""

    def megabytes(key: str) -> str:
        return f"{row[key] / 1e6:.2f}" if isinstance(row[key], int) else "–"  # type: ignore[operator]

    sizes = [megabytes(key) for key in ("bound", "packed")]
    others = [megabytes(key) for key in ("dense", "csr32", "csr64", "torch_save", "zstd")]
    over = f"{float(str(row['over_bound'])):+.1%}"
    what = [str(row["model"]), str(row["pattern"]), f"{float(str(row['sparsity'])):.0%}", str(row["dtype"])]
    return "| " + " | ".join([*what, *sizes, over, *others, str(row["save_s"]), str(row["read_s"])]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(EXCLUDED), default=sorted(EXCLUDED))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--append", action="store_true", help=f"append the figures to {RESULTS.name}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if zstandard is None:
        print("the zstd column is empty: pip install zstandard")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    run = {
        **{"date": datetime.date.today().isoformat(), "commit": commit, "device": f"{platform.machine()} CPU"},
        **{"threads": args.threads, "python": platform.python_version(), "torch": torch.__version__},
    }
    print("sizes in MB (10⁶ bytes), times in s")
    names = "model pattern zeros dtype bound packed over dense CSR-32 CSR-64 torch.save zstd save read"
    print("| " + " | ".join(names.split()) + " |")
    print("|---|---|---:|---|" + "---:|" * 10)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            for kind in PATTERNS:
                for sparsity in SPARSITIES:
                    for dtype in (torch.float32, torch.bfloat16):
                        row = measure(name, kind, sparsity, dtype, args.repeats, Path(folder))
                        rows.append(run | row)
                        print(line(row), flush=True)
    if args.append:
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
