"""The most memory in use while a ViT-B/16 or a decoder is pruned with calibration data, block after block.

    pip install 'spartan-sparsity[app,vision]'
    python benchmarks/bench_prune_memory.py --models vit-b16
    python benchmarks/bench_prune_memory.py --device cuda --cap 1.5 [--csv benchmarks/prune_memory.csv]

Weights are random: what is measured is memory and time. With a CUDA device the models lie in main memory and blocks move
there one at a time; `--cap 1.5` gives torch so little memory there that a model has one and a half times as much. On a
CPU the peak is that of the whole process, with the model, the data and a copy of what is pruned so far. The ViT is
torchvision's, or if that is not installed timm's or transformers'; the decoders are of `bytes-gpt`'s kind, `decoder` as
large as GPT-2 medium.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import gc
import platform
import subprocess
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spartan
from spartan import zoo
from spartan.gpt import GPT

COLUMNS = ["date", "commit", "device", "torch", "model", "model_mib", "cap_mib", "criterion", "samples", "blocks"]
COLUMNS += ["seconds", "peak_mib"]
DECODERS = {"decoder-small": (4, 512), "decoder": (24, 1024), "decoder-large": (24, 2048)}
MIB = 2**20


def vit_b16() -> tuple[nn.Module, str, str]:
    """A ViT-B/16, whose it is, and its head."""
    try:
        return zoo.torchvision().models.vit_b_16(), "torchvision", "heads.*"
    except (ValueError, ImportError):
        pass
    try:
        return zoo.timm().create_model("vit_base_patch16_224"), "timm", "head.*"
    except (ValueError, ImportError):
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(ViTConfig()), "transformers", "classifier.*"


def build(name: str, samples: int) -> tuple[nn.Module, list[Tensor], str, str]:
    """A model, its calibration data, its name in full, and what stays dense of it."""
    torch.manual_seed(0)
    if name == "vit-b16":
        model, whose, head = vit_b16()
        return model, list(torch.randn(samples, 3, 224, 224).split(4)), f"{name} ({whose})", head
    layers, width = DECODERS[name]
    model = GPT(context=512, layers=layers, width=width, heads=width // 64)
    return model, list(torch.randint(256, (samples, 512)).split(4)), name, "head.*"


def give(device: str, size: float) -> None:
    """Have torch take no more than so many MiB of the device."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory / MIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), torch.empty(0, device=device).device)


def fits(device: str, size: float) -> bool:
    """Whether torch gets so many MiB on the device."""
    try:
        torch.empty(int(size * MIB), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True


def git_commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"


def measure(model: nn.Module, criterion: str, batches: list[Tensor], dense: str, device: str | None) -> Any:
    """The report of pruning half of a copy of the model."""
    pruned, report = spartan.prune(
        copy.deepcopy(model), 0.5, criterion=criterion, calibration=batches, device=device, exclude=dense, report=True
    )
    spartan.verify(pruned, 0.5, budget="uniform", exclude=dense)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["vit-b16", *DECODERS], default=["vit-b16", "decoder"])
    parser.add_argument("--criteria", nargs="+", choices=["wanda", "sparsegpt"], default=["wanda", "sparsegpt"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--device")
    parser.add_argument("--cap", type=float, help="the model's size over the memory that torch may have on the device")
    parser.add_argument("--csv", type=Path, help="add the results to this file, each as it comes")
    args = parser.parse_args()
    cuda = torch.device(args.device or "cpu").type == "cuda"
    if args.cap and not cuda:
        parser.error("--cap is for CUDA devices: there torch can be given less memory than there is")
    where = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    commit, failed = git_commit(), 0
    print(f"{where}, torch {torch.__version__}, commit {commit}", flush=True)
    for asked in args.models:
        model, batches, name, dense = build(asked, args.samples)
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / MIB
        for criterion in args.criteria:
            try:
                cap = size / args.cap if args.cap else None
                if cap is not None:
                    give(args.device, cap)
                    print(f"{name}: all of it on the device at once: {fits(args.device, size)}", flush=True)
                report = measure(model, criterion, batches, dense, args.device)
            except Exception:  # of one; the others are still measured
                failed += 1
                print(f"{name}, {criterion} failed:\n{traceback.format_exc()}", flush=True)
                continue
            peak = None if report.peak_bytes is None else report.peak_bytes / MIB
            given = "" if cap is None else f" of {cap:,.0f} given"
            print(
                f"{name} ({size:,.0f} MiB), {criterion}: {len(report.blocks)} blocks, {report.seconds:.1f} s, "
                f"at most {peak or 0:,.0f} MiB{given} ({report.device})",
                flush=True,
            )
            row: list[Any] = [datetime.date.today().isoformat(), commit, where, torch.__version__, name, f"{size:.0f}"]
            row += ["" if cap is None else f"{cap:.0f}", criterion, args.samples, len(report.blocks)]
            row += [f"{report.seconds:.1f}", "" if peak is None else f"{peak:.0f}"]
            if args.csv is not None:
                new = not args.csv.exists() or not args.csv.stat().st_size
                with args.csv.open("a", newline="") as file:
                    csv.writer(file).writerows([COLUMNS, row] if new else [row])
    if failed:
        raise SystemExit(f"{failed} of the measurements failed")


if __name__ == "__main__":
    main()
