"""What a sparse training step costs over a dense one: models side by side in one run, in interleaved rounds.

    python benchmarks/bench_step.py --model resnet50                    # H200: batch 256, bf16, channels_last, compiled
    python benchmarks/bench_step.py --model resnet50 --runs all         # every method
    python benchmarks/bench_step.py --model vit_b_16 --block 16
    python benchmarks/bench_step.py --model resnet50 --budget erk       # a budget for every layer
    python benchmarks/bench_step.py --model resnet50 --finetune         # with the mask fixed
    python benchmarks/bench_step.py --model resnet50 --fsdp2            # weights as FSDP2 has them, on one process
    python benchmarks/bench_step.py --model resnet50 --sinkhorn         # the paper's overhead figure, and its plot
    python benchmarks/bench_step.py --device cpu --model resnet50 --batch 32 --runs dense-eager spartan

A step is forward, backward, `optimizer.step()` (where all the sparse work happens) and `zero_grad`, on one fixed batch.
Every figure is the median of the rounds; on a CPU, which others may be using, the smallest. "in step" is the time
`optimizer.step()` takes longer than the dense one's, the whole of the sparse work (gradients, which are turned when a
backward ends, are left for the step here): a model full of zeros also draws less power, and a GPU that is at its limit
runs it faster. "dense-zeros" shows how much: a dense model with as many zeros, which a learning rate of 0 keeps. "peak"
is the memory at the fullest moment of a step over that of the dense compiled model, in bytes per target weight. The
floor is what the passes over the weights must read and write at least (`traffic.py`, in bytes per weight) at this
device's copy speed; "× floor" is the time in the step divided by it. With --append rows go to
benchmarks/step.csv.

With `--fsdp2` the dense model too is FSDP2's: every block compiled and sharded by itself, bf16 by its policy, weights
in row-major order, which is all that it takes. `--ranks 2` has two processes share the device, over gloo: a test of
what several processes exchange, not a measure of it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import gc
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsdp2
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from traffic import TRAFFIC, as_in_the_middle, floor, passes_of

from spartan import Block, Sparsifier, Spartan, constant, linear, prune
from spartan.methods.base import Method
from spartan.methods.registry import as_method
from spartan.zoo import WideResNet, torchvision

HERE = Path(__file__).parent
RESULTS = HERE / "step.csv"
COLUMNS = [
    *("date", "commit", "device", "torch", "model", "batch", "dtype", "pattern", "phase", "run", "compiled", "kernels"),
    *("step_ms", "ratio", "over_ms", "peak_bytes_per_weight", "passes", "floor_bytes", "floor_ms", "times_floor"),
    "in_step_ms",
]
# The columns that are printed.
HEADS = ("step", "ratio", "over", "in step", "peak", "passes", "floor", "floor", "in step")
UNITS = ("ms", "", "ms", "ms", "B/weight", "", "B/w", "ms", "× floor")
WIDTHS = (9, 7, 8, 8, 9, 6, 7, 8, 8)
RUNS = ["dense-eager", "dense", "dense-zeros", "spartan", "topkast", "imp"]  # by default
BATCH = {"resnet50": 256, "vit_b_16": 256, "wrn22": 256}
# The bar that is held up: at most this much over the dense compiled step, and this many bytes per weight.
MOST_OVER, MOST_OVER_FSDP2, MOST_BYTES = 0.015, 0.02, 5.0


def build_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "wrn22":
        return WideResNet(22, 2, 10)
    return torchvision().models.get_model(name)


def build_method(name: str, beta: float | None) -> Method | None:
    if name.startswith("dense"):
        return None
    return Spartan(beta=constant(beta)) if name == "spartan" and beta is not None else as_method(name)


class Run:
    """One model with its optimizer, and the sparsifier if it has one."""

    def __init__(self, name: str, method: Method | None, args: argparse.Namespace, forward: Any) -> None:
        self.name, self.device, self.forward = name, torch.device(args.device), forward
        before = allocated(self.device)
        model = build_model(args.model).to(self.device)
        if args.fsdp2:
            model = fsdp2.sharded(model, args.device, args.dtype == "bf16", args.compile and name != "dense-eager")
        elif args.model != "vit_b_16" and args.device == "cuda":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model, self.autocast = model, args.dtype == "bf16" and not args.fsdp2
        # torch has no fused SGD for weights in shards.
        fused = args.device == "cuda" and (args.model == "vit_b_16" or not args.fsdp2)
        kinds: dict[str, Any] = {"fused": True} if fused else {}
        if args.model == "vit_b_16":
            self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, **kinds)
        else:
            self.optimizer = torch.optim.SGD(
                model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=1e-4, **kinds
            )
        self.sparsifier = None
        pattern = None if args.block == 1 else Block(args.block, args.block)
        if name == "dense-zeros":
            prune(model, args.sparsity, pattern=pattern, exclude=args.exclude, budget=args.budget)
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
        if method is not None:
            self.sparsifier = Sparsifier(
                model,
                args.sparsity,
                10_000,
                method,
                pattern=pattern,
                budget=args.budget,
                exclude=args.exclude,
                warmup=0.0,
                finetune=0.9999 if args.finetune else 0.0,  # from the first step on
                kernels=args.kernels,
            ).attach(self.optimizer)
            self.sparsifier._run.gradients.paused = True  # the step turns them then, in its own time
            as_in_the_middle(self.sparsifier)
        self.times: list[float] = []
        self.inside: list[float] = []  # of which in optimizer.step(), where the sparse work is
        self.events: list[tuple[Any, Any]] = []
        # What it holds between steps: all of this, and what the first steps add.
        self.peak, self.mine = 0, allocated(self.device) - before

    def step(self, x: Tensor, y: Tensor) -> None:
        """One training step."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            loss = self.forward(self.model, x, y)
        loss.backward()
        if self.device.type == "cuda":
            self.events.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[arg-type]
            self.events[-1][0].record()
        start = time.perf_counter()
        self.optimizer.step()
        if self.device.type == "cuda":
            self.events[-1][1].record()
        else:
            self.inside.append((time.perf_counter() - start) * 1e3)
        self.optimizer.zero_grad()

    def warm_up(self, x: Tensor, y: Tensor, steps: int) -> None:
        """Steps that do not count: compilers and caches get ready."""
        before = allocated(self.device)
        for _ in range(steps):
            self.step(x, y)
        self.mine += allocated(self.device) - before

    def time(self, x: Tensor, y: Tensor, steps: int) -> None:
        """Milliseconds a step, and the fullest moment without what the others hold."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        others = allocated(self.device) - self.mine
        self.events.clear()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(x, y)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)
            self.inside += [begin.elapsed_time(end) for begin, end in self.events]
        self.times.append((time.perf_counter() - start) / steps * 1e3)

    @property
    def ms(self) -> float:
        """Milliseconds a step."""
        return statistics.median(self.times) if self.device.type == "cuda" else min(self.times)

    @property
    def inside_ms(self) -> float:
        """Of these, milliseconds in `optimizer.step()`."""
        return statistics.median(self.inside) if self.device.type == "cuda" else min(self.inside)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.ones((1 << 28) if device.type == "cuda" else (1 << 25), device=device)
    target, times = torch.empty_like(source), []
    for _ in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2.0 * source.numel() * source.element_size() / min(times)


def measure(runs: list[Run], x: Tensor, y: Tensor, args: argparse.Namespace) -> None:
    for run in runs:
        start = time.perf_counter()
        run.warm_up(x, y, args.warmup)
        print(f"  {run.name}: {args.warmup} steps to warm up, {time.perf_counter() - start:.1f} s", flush=True)
    for turn in range(args.rounds):
        for run in runs if turn % 2 == 0 else runs[::-1]:
            run.time(x, y, args.steps)


def compare(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    x, y = batch(args)
    compiled = torch.compile(loss_of) if args.compile and not args.fsdp2 else loss_of  # blocks are, then
    runs = []
    for name in args.runs:
        forward = loss_of if name == "dense-eager" else compiled
        runs.append(Run(name, build_method(name, args.beta), args, forward))
    measure(runs, x, y, args)
    dense = next((r for r in runs if r.name == "dense"), next(r for r in runs if r.name.startswith("dense")))
    speed = copy_speed(device)
    print(f"\n{title(args)}; copies run at {speed / 1e9:.0f} GB/s; ratios to {dense.name}")
    heads = zip(HEADS, UNITS, WIDTHS, strict=True)
    lines = zip(*((f"{head:>{width}}", f"{unit:>{width}}") for head, unit, width in heads), strict=True)
    print("\n".join(f"{'':12} {' '.join(line)}" for line in lines))
    rows = []
    for run in runs:
        over, row = run.ms - dense.ms, ["", "", "", "", "", ""]
        line = f"{run.name:12} {run.ms:9.3f} {run.ms / dense.ms:7.4f} {over:8.3f}"
        if run.sparsifier is not None:
            stats, weights = run.sparsifier.stats, sum(layer.parameters for layer in run.sparsifier.layers())
            peak = (run.peak - dense.peak) / weights if device.type == "cuda" else math.nan
            passes = passes_of(run.sparsifier, run.name)
            bytes_each = floor(run.name, passes, stats.density, args.block**2, args.finetune)
            least = bytes_each * weights / speed * 1e3
            more = run.inside_ms - dense.inside_ms
            line += f" {more:8.3f} {peak:9.2f} {passes:6d} {bytes_each:7.1f} {least:8.3f} {more / least:8.2f}"
            row = [
                f"{peak:.2f}",
                str(passes),
                f"{bytes_each:.1f}",
                f"{least:.4f}",
                f"{more / least:.2f}",
                f"{more:.3f}",
            ]
            if device.type == "cuda":
                most = MOST_OVER_FSDP2 if args.fsdp2 else MOST_OVER
                good = over <= most * dense.ms and more <= 2 * least and peak <= MOST_BYTES
                line += "" if good else f"   (the bar: {most:.1%} over dense, 2 × floor, {MOST_BYTES:g} B/weight)"
            else:
                line += f"   in step: {more / dense.ms:.2%} of dense"
        print(line)
        rows.append([*settings(args, run), f"{run.ms:.3f}", f"{run.ms / dense.ms:.4f}", f"{over:.3f}", *row])
    for run in runs:
        if run.sparsifier is not None:
            print("\n".join(["", *repr(run.sparsifier).splitlines()[:3]]))
            break
    if args.append:
        append(rows)


def overhead_figure(args: argparse.Namespace) -> None:
    """The paper's Figure on overhead: Sinkhorn from its three starts, and Newton, over β."""
    x, y = batch(args)
    forward = torch.compile(loss_of) if args.compile else loss_of
    dense = Run("dense", None, args, forward)
    measure([dense], x, y, args)
    starts = {
        "Sinkhorn, cold": "cold",
        "Sinkhorn, dual caching": "cached",
        "Sinkhorn, sorting": "threshold",
        "ours": None,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    rows = []
    print(f"{title(args)}: dense {dense.ms:.3f} ms")
    for beta in args.betas:
        runs = [dense]
        for name, init in starts.items():
            solver: dict[str, Any] = {} if init is None else {"solver": "sinkhorn", "init": init}
            # β grows a little, as it does in training: the last dual is close, not exact.
            runs.append(Run(name, Spartan(beta=linear(beta, 1.1 * beta), **solver), args, forward))
        measure(runs[1:], x, y, args)
        dense.time(x, y, args.steps)  # beside the others, in case the machine has changed its mind
        for run in runs[1:]:
            assert run.sparsifier is not None
            over, passes = run.ms / dense.ms - 1.0, run.sparsifier.stats.passes
            found[run.name].append((beta, over))
            print(f"  β = {beta:6g}  {run.name:24} {run.ms:9.3f} ms  +{over:7.2%}  {passes} passes", flush=True)
            rows.append([*settings(args, run), f"{run.ms:.3f}", f"{run.ms / dense.ms:.4f}", f"{run.ms - dense.ms:.3f}"])
            rows[-1][COLUMNS.index("run")] = f"{run.name}, β = {beta:g}"
            rows[-1] += ["", str(passes), "", "", "", f"{run.inside_ms - dense.inside_ms:.3f}"]
        del run, runs  # the next β has models of its own
        gc.collect()
    if args.append:
        append(rows)
        plot(found, args)


def plot(found: dict[str, list[tuple[float, float]]], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, points in found.items():
        axes.plot([b for b, _ in points], [100 * over for _, over in points], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="β", ylabel="training step over dense, %", title=title(args))
    axes.set_ylim(0.2, 200)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left")
    path = HERE / f"sinkhorn_{args.model}_{args.device}.png"
    figure.savefig(path, dpi=150)
    print(f"{path.name} written")


def batch(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(args.batch, 3, args.size, args.size, generator=rng).to(args.device)
    y = torch.randint(10, (args.batch,), generator=rng).to(args.device)
    return (x.contiguous(memory_format=torch.channels_last) if args.device == "cuda" else x), y


def device_name(args: argparse.Namespace) -> str:
    if args.device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def title(args: argparse.Namespace) -> str:
    blocks = "" if args.block == 1 else f", {args.block}×{args.block} blocks"
    phase = ", finetuning" if args.finetune else ""
    budget = "" if args.budget == "global" else f", {args.budget} budgets"
    how = "" if not args.fsdp2 else f", FSDP2 on {args.ranks} process{'es' if args.ranks > 1 else ''}"
    return f"{args.model}, batch {args.batch}, {args.dtype}{blocks}{budget}{phase}{how}, {device_name(args)}"


def settings(args: argparse.Namespace, run: Run) -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    pattern = "1x1" if args.block == 1 else f"{args.block}x{args.block}"
    pattern += "" if args.budget == "global" else f" {args.budget}"
    by_triton = run.sparsifier is not None and "triton" in repr(run.sparsifier)
    model = args.model + (f" fsdp2 {args.ranks}" if args.fsdp2 else "")
    return [
        *(datetime.date.today().isoformat(), commit, device_name(args), torch.__version__, model, str(args.batch)),
        *(args.dtype, pattern, "finetune" if args.finetune else "soft", run.name),
        str(args.compile and run.name != "dense-eager"),
        "" if run.sparsifier is None else "triton" if by_triton else "torch",
    ]


def append(rows: list[list[str]]) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return  # the first process tells
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(BATCH), default="resnet50")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--runs", nargs="+", choices=[*RUNS[:3], *TRAFFIC, "all"],
        help="which, or all; a dense one is always among them",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, help="default 256")
    parser.add_argument("--size", type=int, help="pixels a side; default 224, or 32 for wrn22")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="of autocast; default bf16 on cuda, fp32 on cpu")
    parser.add_argument("--block", type=int, default=1, help="a block's side; 1 is single weights")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--budget", choices=["global", "erk", "uniform"], default="global", help="or one a layer")
    parser.add_argument("--beta", type=float, help="a fixed β; default: 1 to 10 over training")
    parser.add_argument("--finetune", action="store_true", help="the phase with the mask fixed")
    parser.add_argument("--kernels", choices=["auto", "triton", "torch"], default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="a round; default 10 on cuda, 1 on cpu")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the first round; at least 3 record graphs")
    parser.add_argument("--fsdp2", action="store_true", help="weights in shards, of one process")
    parser.add_argument("--ranks", type=int, default=1, help="with --fsdp2: processes that share the device")
    parser.add_argument("--sinkhorn", action="store_true", help="the paper's overhead figure instead")
    parser.add_argument(
        "--append", action="store_true", help=f"append the figures to {RESULTS.name}, write the plot here"
    )
    parser.add_argument("--betas", type=float, nargs="+", default=[1.0, 3.0, 10.0, 30.0, 100.0])
    args = parser.parse_args()
    if args.ranks > 1 and not args.fsdp2:
        parser.error("--ranks goes with --fsdp2")
    args.runs = args.runs or (["dense", "spartan", "topkast", "imp"] if args.fsdp2 else RUNS)
    cuda = args.device == "cuda"
    args.batch = args.batch or BATCH[args.model]
    args.size = args.size or (32 if args.model == "wrn22" else 224)
    args.dtype = args.dtype or ("bf16" if cuda else "fp32")
    args.steps = args.steps or (10 if cuda else 1)
    args.compile = cuda if args.compile is None else args.compile
    # Blocks that do not divide them, as in the paper: the first layer and the head.
    args.exclude = None
    if args.block > 1:
        args.exclude = {
            "resnet50": ["conv1.*", "fc.*"],
            "vit_b_16": ["conv_proj.*", "heads.*"],
            "wrn22": ["conv.*", "head.*"],
        }[args.model]
    if "all" in args.runs:
        args.runs = ["dense", *TRAFFIC]
    if not any(name.startswith("dense") for name in args.runs):
        args.runs = ["dense", *args.runs]
    return args


def main(rank: int, args: argparse.Namespace, meeting: str | None) -> None:
    if args.fsdp2:
        fsdp2.start(args.device, rank, args.ranks, meeting)
        fsdp2.let_blocks_differ()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing if rank else sys.stdout):
        overhead_figure(args) if args.sinkhorn else compare(args)


if __name__ == "__main__":
    chosen = arguments()
    if chosen.ranks > 1:
        place = fsdp2.meeting_place()
        spawn(main, (chosen, place), nprocs=chosen.ranks)
    else:
        main(0, chosen, None)
