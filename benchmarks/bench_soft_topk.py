"""The solve and the exact threshold against sort + Sinkhorn, in one run, with the budget residual of both.

    python benchmarks/bench_soft_topk.py [--d 25500000] [--device cpu] [--repeats 5]

Weights are |N(0, 0.05²)|, the budget 5% of them. "ours" is what a Spartan step does: the exact hard threshold and the
soft mask's dual to a residual of 1e-6. "sort + Sinkhorn" is the paper's: a full sort for the threshold, then Algorithm 4
from it to a tolerance of 0.01. The residual is |Σ sigmoid(βu + μ) − k| / k: how far the dual is from the solution
(Sinkhorn then rescales its mask to the budget). The best of the repeats counts for both. Rows are appended to
benchmarks/results.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spartan.ops.parts import Part
from spartan.ops.select import boundary
from spartan.ops.soft_topk import Dual, residual_at, sinkhorn, solve

RESULTS = Path(__file__).parent / "results.csv"
COLUMNS = [
    *("date", "commit", "device", "torch", "what", "d", "density", "beta"),
    *("ours_s", "ours_residual", "ours_passes"),
    *("sort_sinkhorn_s", "sort_sinkhorn_residual", "sort_sinkhorn_iterations", "ratio"),
]


def best(f: Callable[[], Dual], device: str, repeats: int) -> tuple[float, Dual]:
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        dual = f()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times), dual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=25_500_000, help="number of weights (default: ResNet-50's)")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--betas", type=float, nargs="+", default=[1.0, 10.0, 100.0, 1000.0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    u = torch.randn(args.d, device=args.device).mul_(0.05).abs_()
    k, parts = args.density * args.d, [Part(u)]
    device = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} cores"
    )
    print(f"d = {args.d:,}, density {args.density:g}, {device}, torch {torch.__version__}")
    print(
        f"{'β':>6}  {'ours':>9} {'residual':>9} {'passes':>6}   {'sort+Sinkhorn':>13} {'residual':>9} {'iters':>5}   ratio"
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows = []
    for beta in args.betas:

        def ours(beta: float = beta) -> Dual:
            return solve(parts, k, beta, start=boundary(parts, k))

        def paper(beta: float = beta) -> Dual:
            value = float(torch.sort(u, descending=True).values[int(k) - 1])
            return sinkhorn(parts, k, beta, init=-beta * value, tol=0.01, max_iters=100)

        t1, d1 = best(ours, args.device, args.repeats)
        t2, d2 = best(paper, args.device, args.repeats)
        r1, r2 = residual_at(d1, parts, k), residual_at(d2, parts, k)
        print(
            f"{beta:6g}  {t1:8.4f}s {r1:9.1e} {d1.passes:6d}   {t2:12.4f}s {r2:9.1e} {d2.passes:5d}   {t2 / t1:.1f}x",
            flush=True,
        )
        rows.append(
            [
                datetime.date.today().isoformat(),
                commit,
                device,
                torch.__version__,
                "soft_topk",
                args.d,
                args.density,
                beta,
            ]
        )
        rows[-1] += [f"{t1:.5f}", f"{r1:.2e}", d1.passes, f"{t2:.5f}", f"{r2:.2e}", d2.passes, f"{t2 / t1:.1f}"]
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
