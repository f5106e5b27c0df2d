"""The most memory in use while a ViT-B/16 or a decoder is pruned with calibration data, block after block.

    pip install 'spartan-sparsity[app,vision]'
    python benchmarks/bench_prune_memory.py --models vit-b16
    python benchmarks/bench_prune_memory.py --device cuda --cap 1.5 [--append]

Weights are random: what is measured is memory and time. With a CUDA device the models lie in main memory and blocks move
there one at a time; `--cap 1.5` gives torch so little memory there that a model has one and a half times as much. On a
CPU the peak is that of the whole process, with the model, the data and a copy of what is pruned so far.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartan
from spartan.gpt import GPT
from spartan.zoo import torchvision

RESULTS = Path(__file__).parent / "prune_memory.csv"
COLUMNS = ["date", "commit", "device", "torch", "model", "model_mib", "cap_mib", "criterion", "samples", "blocks"]
COLUMNS += ["seconds", "peak_mib"]


def build(name: str, samples: int) -> tuple[nn.Module, list[Tensor], str]:
    """A model, its calibration data, and what stays dense of it."""
    torch.manual_seed(0)
    if name == "vit-b16":
        model = torchvision().models.vit_b_16()
        return model, list(torch.randn(samples, 3, 224, 224).split(8)), "heads.*"
    layers, width = {"decoder-small": (4, 512), "decoder": (24, 2048)}[name]
    model = GPT(context=512, layers=layers, width=width, heads=width // 64)
    return model, list(torch.randint(256, (samples, 512)).split(8)), "head.*"


def git_commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=["vit-b16", "decoder-small", "decoder"], default=["vit-b16", "decoder"]
    )
    parser.add_argument("--criteria", nargs="+", choices=["wanda", "sparsegpt"], default=["wanda", "sparsegpt"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--device")
    parser.add_argument("--cap", type=float, help="the model's size over the memory that torch may have on the device")
    parser.add_argument("--append", action="store_true", help=f"add the results to {RESULTS.name}")
    args = parser.parse_args()
    cuda = torch.device(args.device or "cpu").type == "cuda"
    if args.cap and not cuda:
        parser.error("--cap is for CUDA devices: there torch can be given less memory than there is")
    where = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, commit {git_commit()}")
    rows: list[list[Any]] = []
    for name in args.models:
        for criterion in args.criteria:
            model, batches, dense = build(name, args.samples)
            size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
            cap = size / args.cap if args.cap else None
            if cap is not None:
                total = torch.cuda.get_device_properties(args.device).total_memory / 2**20
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
            _, report = spartan.prune(
                model, 0.5, criterion=criterion, calibration=batches, device=args.device, exclude=dense, report=True
            )
            spartan.verify(model, 0.5, budget="uniform", exclude=dense)
            peak = None if report.peak_bytes is None else report.peak_bytes / 2**20
            given = "" if cap is None else f" of {cap:,.0f} given"
            print(
                f"{name} ({size:,.0f} MiB), {criterion}: {len(report.blocks)} blocks, {report.seconds:.1f} s, "
                f"at most {peak or 0:,.0f} MiB{given} ({report.device})",
                flush=True,
            )
            row = [datetime.date.today().isoformat(), git_commit(), where, torch.__version__, name, f"{size:.0f}"]
            row += ["" if cap is None else f"{cap:.0f}", criterion, args.samples, len(report.blocks)]
            rows.append([*row, f"{report.seconds:.1f}", "" if peak is None else f"{peak:.0f}"])
    if args.append:
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows] if new else rows)


if __name__ == "__main__":
    main()
