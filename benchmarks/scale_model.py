"""What the sparse step costs from 1 to 1,024 GPUs and from 10⁸ to 10¹² weights, by a small model; docs/scale.md shows it.

    python benchmarks/scale_model.py                 # the tables
    python benchmarks/scale_model.py --measure       # all-reduces of the solver's sizes between processes of this machine

A step costs what its kernels take on a rank's share of n weights, and what its reductions take over W ranks:

    t = launches + n · bytes a weight / speed  +  Σ_reductions (latency(W) + bytes / bandwidth)

MEASURED are numbers from a clock or a counter, ASSUMED ones are not; everything else is computed from them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from dataclasses import dataclass

import torch

# ResNet-50 and ViT-B/16 with Spartan, float32, on one H200, torch 2.11, Triton 3.6, commit b0f951e (step.csv): weights,
# bytes that a step moves for each, and the microseconds that `optimizer.step()` takes longer than the dense one's.
MEASURED_STEPS = ((25_502_912, 52.0, 411.0), (86_292_480, 60.0, 1485.0))
BYTES = 60.0  # the search for threshold and mask in three passes
# Counted: ResNet-50 (54 weights) under FSDP2 on two processes (gloo), Spartan, unstructured, float32, after warm-up; sizes
# in bytes. The gradient's sums, two checks, three rounds of the search for the threshold and what is next to it, two of
# Newton's steps, the kept weights of every layer.
MEASURED_REDUCTIONS = [864, 4, 4, 2048, 824, 8, 20, 16, 16, 432]

# Not measured.
ASSUMED = {
    "intra_us": 15.0,  # a small all-reduce among the GPUs of one machine
    "hop_us": 6.0,  # and for each doubling of the number of machines, there and back
    "per_machine": 8.0,  # GPUs
    "intra_gb_s": 300.0,  # NVLink, of one rank
    "inter_gb_s": 40.0,  # network, of one rank
    "tokens": 8192.0,  # of one rank in a step
    "flops": 0.4 * 989e12,  # that a rank achieves, bfloat16
    "device_gb": 141.0,
}


@dataclass(frozen=True)
class Cost:
    """One step, on one rank: seconds, and bytes kept."""

    weights: float
    kernels: float
    reductions: float
    dense_step: float
    dense_bytes: float
    sparse_bytes: float

    @property
    def total(self) -> float:
        """Seconds that the sparse step adds."""
        return self.kernels + self.reductions


def fit() -> tuple[float, float]:
    """Seconds that a step takes whatever its size, and seconds for each byte: a line through the two that were measured."""
    (n, each, t), (n2, each2, t2) = MEASURED_STEPS
    per_byte = (t2 - t) / (n2 * each2 - n * each)
    return 1e-6 * (t - per_byte * n * each), 1e-6 * per_byte


def latency(ranks: int) -> float:
    """Seconds of a reduction of nothing: within a machine, then a tree over machines. ASSUMED."""
    if ranks == 1:
        return 0.0
    machines = max(1.0, ranks / ASSUMED["per_machine"])
    return 1e-6 * (ASSUMED["intra_us"] + ASSUMED["hop_us"] * math.ceil(math.log2(machines)))


def reduction(size: float, ranks: int) -> float:
    """Seconds to sum so many bytes over the ranks."""
    rate = ASSUMED["intra_gb_s" if ranks <= ASSUMED["per_machine"] else "inter_gb_s"] * 1e9
    return latency(ranks) + 2 * (ranks - 1) / ranks * size / rate


def step(weights: float, ranks: int, sharded: bool) -> Cost:
    """The sparse step of a model: each rank holds all of it (DDP) or its share (FSDP2)."""
    n = weights / ranks if sharded else weights
    launches, per_byte = fit()
    # DDP: every rank has reduced gradients and all weights, so it solves alone and gets what the others get.
    sent = sum(reduction(size, ranks) for size in MEASURED_REDUCTIONS) if sharded else 0.0
    return Cost(
        weights=n,
        kernels=launches + n * BYTES * per_byte,
        reductions=sent,
        dense_step=6 * weights * ASSUMED["tokens"] / ASSUMED["flops"],
        dense_bytes=16 * n,  # float32 weights, gradients and the two moments of Adam
        sparse_bytes=4 * n,  # θ
    )


def in_words(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0"


def table(sharded: bool) -> list[str]:
    """Rows of Markdown, without what does not fit on the device. Under DDP a rank does the same whatever their number."""
    lines = [
        "| weights | GPUs | weights a rank | kernels | reductions | sum | of a dense step | memory a rank, dense + θ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for power in (8, 9, 10, 11, 12):
        for ranks in (1, 8, 64, 1024) if sharded else (1,):
            cost = step(10.0**power, ranks, sharded)
            dense, more = cost.dense_bytes / 1e9, cost.sparse_bytes / 1e9
            if dense + more > ASSUMED["device_gb"]:
                continue
            share = cost.total / cost.dense_step
            cells = [
                f"10{str(power).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}",
                f"{ranks:,}" if sharded else "any",
            ]
            cells += [
                f"{cost.weights / 1e6:,.3g} M" if cost.weights < 1e9 else f"{cost.weights / 1e9:,.3g} G",
                in_words(cost.kernels),
                in_words(cost.reductions),
                in_words(cost.total),
            ]
            cells += [f"{share:.2%}", f"{dense:.2g} + {more:.2g} GB"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


# ---------------------------------------------------------------------- measuring


def _measure(rank: int, ranks: int, port: int, rounds: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for size in (16, 2048, 16384, 65536):
        x, times = torch.zeros(size // 8, dtype=torch.float64), []
        for _ in range(rounds):
            start = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - start)
        if rank == 0:
            quick = sorted(times)[rounds // 10]
            print(f"| {ranks} | {size:,} | {1e6 * statistics.median(times):.0f} | {1e6 * quick:.0f} |")
    dist.destroy_process_group()


def measure(ranks: int, rounds: int = 2000) -> None:
    import socket

    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        port = here.getsockname()[1]
    torch.multiprocessing.spawn(_measure, (ranks, port, rounds), nprocs=ranks)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="time gloo's all-reduce on this machine")
    if parser.parse_args().measure:
        print(f"gloo, CPU, {os.cpu_count()} cores, torch {torch.__version__}")
        print("| processes | bytes | median µs | fastest tenth µs |\n|---|---|---|---|")
        for ranks in (2, 4):
            measure(ranks)
        return
    launches, per_byte = fit()
    sent = sum(MEASURED_REDUCTIONS)
    print(f"{len(MEASURED_REDUCTIONS)} reductions and {sent:,} bytes a step, 24 of them for each layer;")
    print(f"{1e6 * launches:.0f} µs, and {1e-12 / per_byte:.2f} TB/s.\n")
    for name, sharded in (("FSDP2", True), ("DDP", False)):
        print(f"### {name}\n\n" + "\n".join(table(sharded)) + "\n")


if __name__ == "__main__":
    main()
