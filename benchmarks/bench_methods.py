"""What a training step of every method costs: time and memory beside the dense step, in one run.

    python benchmarks/bench_methods.py --csv benchmarks/method_steps.csv

WRN-22-2 at the CIFAR-10 recipe's batch of 256, compiled, bf16 autocast, in the middle of a run of the recipe's 40 epochs (no
mask is fixed, no warm-up changes the budget). One model serves all methods, so that only what they add differs; methods are
timed in turn, several rounds, and the median counts. Memory is the peak over the dense step's.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_step import as_in_the_middle
from torch import nn

import spartan
from spartan.app.train.config import load_recipe
from spartan.following import release
from spartan.zoo import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100, help="per round; RigL and SET rewire once in 100")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default="", help="comma-separated; all by default")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    # "fixed" makes no zeros, and the model has none.
    names = args.methods.split(",") if args.methods else [e.name for e in spartan.methods() if e.name != "fixed"]
    names = ["dense", *(n for n in names if n != "dense")]
    recipe = load_recipe("cifar10-wrn22")
    model, total = build_model(recipe.model, 10, (3, 32, 32)).to(device), recipe.epochs * (50_000 // args.batch)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    start = {k: v.clone() for k, v in model.state_dict().items()}
    forward = torch.compile(model, mode="reduce-overhead") if device.type == "cuda" else model
    x = torch.randn(args.batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (args.batch,), device=device)
    found: dict[str, list[float]] = {n: [] for n in names}
    memory: dict[str, float] = {}
    for _ in range(args.rounds):
        for name in names:
            model.load_state_dict(start)
            ms, peak = one(name, model, forward, x, y, args.sparsity, args.steps, total)
            found[name].append(ms)
            memory[name] = peak
    dense = statistics.median(found["dense"])
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows: list[dict[str, Any]] = []
    print(f"{'method':16} {'ms':>8} {'over dense':>11} {'peak MiB':>9} {'over dense':>11}")
    for name in names:
        ms = statistics.median(found[name])
        print(f"{name:16} {ms:8.3f} {ms - dense:+10.3f}  {memory[name]:9.0f} {memory[name] - memory['dense']:+10.0f}")
        rows.append(
            {
                "date": datetime.date.today().isoformat(), "commit": commit, "device": where, "torch": torch.__version__,
                "method": name, "sparsity": args.sparsity, "batch": args.batch, "ms": round(ms, 3),
                "ms_over_dense": round(ms - dense, 3), "peak_mib": round(memory[name], 1),
            }
        )  # fmt: skip
    if args.csv:
        fresh = not args.csv.exists()
        with args.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if fresh:
                writer.writeheader()
            writer.writerows(rows)


def one(
    name: str, model: nn.Module, forward: Any, x: torch.Tensor, y: torch.Tensor, sparsity: float, steps: int, total: int
) -> tuple[float, float]:
    """Milliseconds and peak MiB of a step of one method, with its optimizer and all that the method keeps."""
    gc.collect()  # of the one before
    before = torch.cuda.memory_allocated() if x.device.type == "cuda" else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sparsifier = spartan.Sparsifier(model, sparsity, total, name, count="model").attach(optimizer)
    run = sparsifier._run
    middle = (run.at.warmup_steps + run.at.freeze_step) // 2
    run.at = replace(run.at, step=max(0, min(middle, run.at.freeze_step - 4 * steps)))
    as_in_the_middle(sparsifier)
    run.solve()
    run.write()

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            loss = nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(min(12, steps)):
        step()
    if x.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - begun) / steps
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if x.device.type == "cuda" else 0.0
    sparsifier.detach()
    run.weights.drop()
    release(run.problem.targets)  # the model goes to the next one
    run.gradients.close()
    return ms, peak


if __name__ == "__main__":
    main()
