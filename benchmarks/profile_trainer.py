"""Where the time goes that Spartan adds to a step of `bench_trainer.py`: on the device by kernel, on the host by function.

    python benchmarks/profile_trainer.py --model llama --precision bf16      # H200
    python benchmarks/profile_trainer.py --tiny                              # on a CPU: shows that it runs

Both with a batch of a few tokens: what Spartan does depends on the weights alone.
On the device: microseconds a step of every kernel that the plain loop does not have, by torch's profiler. "Floor" is
what they read and write at least (`traffic.py`, with a search of one pass), at the speed of a large copy.
On the host: backward, clipping and the optimizer's step of both loops, the device waited for before each of them, so that
a full queue is not taken for work. Medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_step import copy_speed
from bench_trainer import DTYPES, LONG, RATE, Bench
from torch import nn
from torch.profiler import ProfilerActivity, profile
from traffic import floor

import spartan

WARM_UP = 8  # steps in which kernels are compiled and recorded
Part = tuple[str, Callable[[], Any]]


def parts(bench: Bench, sparse: bool, steps: int) -> Iterator[Part]:
    """Training step by step, each in parts: who asks for the next one has run this one."""
    model, cuda, dtype = copy.deepcopy(bench.start), bench.device.type == "cuda", DTYPES[bench.precision]
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0, fused=True)
    if sparse:
        spartan.Sparsifier(model, bench.args.sparsity, LONG, **bench.settings).attach(optimizer)
    scaler = torch.amp.GradScaler(bench.device.type, enabled=cuda and bench.precision == "fp16")
    ids = torch.stack([row["input_ids"] for row in bench.rows[: bench.args.batch]]).to(bench.device)
    for _ in range(steps):
        with torch.autocast(bench.device.type, dtype, enabled=cuda or dtype is torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        yield "backward", scaler.scale(loss).backward
        scaler.unscale_(optimizer)
        yield "clip", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield "step", lambda: scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def measure(bench: Bench, sparse: bool) -> tuple[Counter[str], dict[str, float]]:
    """Microseconds of a step on the device, by kernel (of a CPU, by operation), and on the host, by part."""
    steps, cuda = bench.args.steps, bench.device.type == "cuda"
    every, on_host = parts(bench, sparse, WARM_UP + 2 * steps), dict[str, list[float]]()

    def run(n: int) -> None:
        for _ in range(3 * n):
            what, call = next(every)
            if cuda:
                torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            on_host.setdefault(what, []).append(1e6 * (time.perf_counter() - begun))

    run(WARM_UP)
    on_host.clear()
    run(steps)
    host = {what: statistics.median(times) for what, times in on_host.items()}
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        run(steps)
        if cuda:
            torch.cuda.synchronize()
    device: Counter[str] = Counter()
    for event in found.events() or []:
        device[event.name] += (event.device_time if cuda else event.self_cpu_time_total) / steps
    return device, host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="llama")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with models of 30,000 weights")
    args = parser.parse_args()
    args.batch, args.length, args.warm_up, args.method = 2, 16, WARM_UP, "spartan"  # whose traffic is known
    bench = Bench(args.model, args.precision, args)
    (dense, plain), (sparse, ours) = measure(bench, False), measure(bench, True)
    more = Counter({name: us for name, us in sparse.items() if name not in dense})
    targets = spartan.Sparsifier(copy.deepcopy(bench.start), args.sparsity, LONG).layers()
    weights, each = sum(layer.parameters for layer in targets), floor("spartan", 1, 1 - args.sparsity, 1, False)
    least = 1e6 * weights * each / copy_speed(bench.device)
    print(f"{args.model}, {args.precision}, {weights:,} weights; floor {each:.0f} bytes each, {least:.0f} µs")
    print(f"device: {sum(more.values()):.0f} µs of kernels that the plain loop does not have")
    for name, us in more.most_common(24):
        print(f"{us:10.1f}  {name[:100]}")
    print("and where both have them, the largest differences:")
    for name in sorted(set(dense) & set(sparse), key=lambda n: -abs(sparse[n] - dense[n]))[:8]:
        print(f"{sparse[name] - dense[name]:+10.1f}  {name[:100]}")
    print("host: " + ", ".join(f"{what} {plain[what]:.0f} → {ours[what]:.0f} µs" for what in plain))


if __name__ == "__main__":
    main()
