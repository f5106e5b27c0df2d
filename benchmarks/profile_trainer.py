"""Where the time goes that Spartan adds to a step of `bench_trainer.py`: on the device by kernel, on the host by function.

    python benchmarks/profile_trainer.py --model llama --precision bf16      # H200
    python benchmarks/profile_trainer.py --tiny                              # on a CPU: shows that it runs

On the device: microseconds a step of every kernel that the plain loop does not have, by torch's profiler. "Floor" is
what they read and write at least (`traffic.py`, with a search of one pass), at the speed of a large copy.
On the host: backward, clipping and the optimizer's step of both loops, with a batch of a few tokens and the device waited
for before each of them, so that a full queue is not taken for work. Medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import Counter
from typing import Any

import torch
from bench_step import copy_speed
from bench_trainer import DTYPES, LONG, RATE, Bench, Clock
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from traffic import floor

import spartan

FIRST, SEEN = 8, 8  # steps before the profiler looks, and while it does


class Profiled(Clock):
    """Tells the profiler of every step."""

    def __init__(self, device: torch.device, steps: int, profiler: Any) -> None:
        super().__init__(device, steps)
        self.profiler = profiler

    def mark(self) -> None:
        """A step begins."""
        self.profiler.step()


def kernels(bench: Bench, sparse: bool) -> Counter[str]:
    """Microseconds of a step by name of the kernel, or of the operation on a CPU."""
    cuda = bench.device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity], schedule=schedule(wait=FIRST, warmup=1, active=SEEN)) as found:
        bench.by_loop(copy.deepcopy(bench.start), Profiled(bench.device, bench.steps, found), sparse)
        if cuda:
            torch.cuda.synchronize()
    each: Counter[str] = Counter()
    for event in found.events() or []:
        each[event.name] += (event.device_time if cuda else event.self_cpu_time_total) / SEEN
    return each


def host(bench: Bench, sparse: bool, steps: int) -> dict[str, float]:
    """Microseconds of the host in each part of a step."""
    model, cuda = copy.deepcopy(bench.start), bench.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0, fused=True)
    if sparse:
        spartan.Sparsifier(model, bench.args.sparsity, LONG, **bench.settings).attach(optimizer)
    fp16 = cuda and bench.precision == "fp16"
    scaler = torch.amp.GradScaler(bench.device.type, enabled=fp16)
    ids = torch.stack([row["input_ids"][:16] for row in bench.rows[:2]]).to(bench.device)
    found: dict[str, list[float]] = {"backward": [], "clip": [], "step": []}

    def timed(what: str, call: Any) -> None:
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        found[what].append(1e6 * (time.perf_counter() - begun))

    for _ in range(steps):
        with torch.autocast(bench.device.type, DTYPES[bench.precision], enabled=cuda or bench.precision == "bf16"):
            loss = model(input_ids=ids, labels=ids).loss
        timed("backward", scaler.scale(loss).backward)
        scaler.unscale_(optimizer)
        timed("clip", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        timed("step", lambda: scaler.step(optimizer))
        scaler.update()
        optimizer.zero_grad()
    return {what: statistics.median(times[steps // 4 :]) for what, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="llama")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--host-steps", type=int, default=60)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with models of 30,000 weights")
    args = parser.parse_args()
    args.warm_up, args.steps = FIRST, SEEN + 2
    if args.tiny:
        args.batch, args.length = 2, 16
    bench = Bench(args.model, args.precision, args)
    dense, sparse = kernels(bench, False), kernels(bench, True)
    more = Counter({name: us for name, us in sparse.items() if name not in dense})
    names = {layer.name for layer in spartan.Sparsifier(copy.deepcopy(bench.start), args.sparsity, LONG).layers()}
    weights = sum(bench.start.get_parameter(name).numel() for name in names)
    each = floor("spartan", 1, 1 - args.sparsity, 1, False)
    least = 1e6 * weights * each / copy_speed(bench.device)
    print(f"{args.model}, {args.precision}, {weights:,} weights; floor {each:.0f} bytes each, {least:.0f} µs")
    print(f"device: {sum(more.values()):.0f} µs that the plain loop does not have; all {sum(sparse.values()):.0f} µs,")
    print(f"of the plain loop {sum(dense.values()):.0f} µs")
    for name, us in more.most_common(24):
        print(f"{us:10.1f}  {name[:100]}")
    for name in sorted(set(dense) & set(sparse), key=lambda n: -abs(sparse[n] - dense[n]))[:10]:
        print(f"{sparse[name] - dense[name]:+10.1f}  {name[:100]} (in both)")
    plain, ours = (host(bench, s, args.host_steps) for s in (False, True))
    print("host: " + ", ".join(f"{what} {plain[what]:.0f} → {ours[what]:.0f} µs" for what in plain))


if __name__ == "__main__":
    main()
