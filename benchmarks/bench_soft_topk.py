"""The solve and the exact threshold against sort + Sinkhorn, in one run, with the budget residual of both.

    python benchmarks/bench_soft_topk.py [--d 25500000] [--device cpu] [--repeats 5]

Weights are |N(0, 0.05²)|, the budget 5% of them. "ours" is what a Spartan step does: the exact hard threshold and the
soft mask's dual to a residual of 1e-6. "sort + Sinkhorn" is the paper's: a full sort for the threshold, then Algorithm 4
from it to a tolerance of 0.01. The residual is |Σ sigmoid(βu + μ) − k| / k: how far the dual is from the solution
(Sinkhorn then rescales its mask to the budget). The best of the repeats counts for both. With --append
rows go to benchmarks/results.csv.

    python benchmarks/bench_soft_topk.py --kernels --device cuda [--sizes 1000000 10000000 100000000 1000000000]

The Triton kernels alone, over sizes: from nothing, and from the solution for values that differ by 0.1%, as after a
training step. The time is the device's, between two events, with the work queued well ahead, as it is in training.
"× reading" compares with reading the values as often as the passes did, at copy speed. With --append rows go to
benchmarks/soft_topk.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from spartan.distributed import Ranks
from spartan.ops.newton import Dual
from spartan.ops.parts import Part
from spartan.ops.select import boundary
from spartan.ops.soft_topk import residual_at, sinkhorn, solve

RESULTS = Path(__file__).parent / "results.csv"
BY_KERNELS = Path(__file__).parent / "soft_topk.csv"
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


def by_kernels(args: argparse.Namespace) -> None:
    """The kernels over sizes: time per weight, passes, and the distance to reading the values that often."""
    from spartan.solvers.triton.state import PASSES, TIES
    from spartan.solvers.triton.topk import TopK

    device, rows = torch.device(args.device), []
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"density {args.density:g}, {name}, torch {torch.__version__}")
    print(
        f"{'d':>13} {'β':>6} {'start':>5} {'ms':>9} {'ns/weight':>10} {'passes':>6} {'reading':>10} {'×':>9} residual"
    )
    for d in args.sizes:
        torch.manual_seed(0)
        values = [torch.randn(d, device=device).mul_(0.05).abs_()]
        values.append(values[0] * (1.0 + 1e-3 * torch.randn(d, device=device)))
        k, speed = args.density * d, copy_speed(values[0])
        for beta in args.betas:
            # One for each list of values, since addresses stay where they are in training; what is known goes from one
            # to the other.
            topks = [TopK([d], [1.0], [1.0], device) for _ in values]
            states = topks[1].states = topks[0].states
            for start in ("cold", "warm"):
                times = []
                for turn in range(2 * args.repeats + 4):  # the first ones compile and record
                    u, topk = values[turn % 2], topks[turn % 2]
                    topk.cold = start == "cold"
                    solve_it = partial(topk.solve, [u], [k], [beta])
                    times.append(timed(solve_it, device))
                # The values are read once more where some, not all, of those equal to the threshold fit.
                best_ms, passes = min(times[4:]), int(states.ints[0, PASSES.value] + states.ints[0, TIES.value])
                residual = residual_at(states.duals([beta]).each()[0], [Part(u)], k)
                read_ms = 1e3 * passes * 4 * d / speed
                cells = [d, beta, start, f"{best_ms:.4f}", f"{1e6 * best_ms / d:.4f}", passes, f"{read_ms:.4f}"]
                cells += [f"{best_ms / read_ms:.2f}", f"{residual:.1e}"]
                widths = (13, 6, 5, 9, 10, 6, 10, 9, 8)
                print(" ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)), flush=True)
                rows.append([datetime.date.today().isoformat(), commit, name, torch.__version__, args.density, *cells])
        del values, u, topks, topk, solve_it
    if args.append:
        head = "date commit device torch density d beta start ms ns_per_weight passes reading_ms times_reading residual"
        append(BY_KERNELS, head.split(), rows)


def timed(f: Callable[[], None], device: torch.device) -> float:
    """Milliseconds on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        f()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000)  # long enough for the host to have queued all of it
    start_event.record()
    f()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event)


def copy_speed(like: torch.Tensor) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.ones(1 << 26 if like.device.type == "cuda" else 1 << 20, device=like.device)
    target, times = torch.empty_like(source), []
    for _ in range(8):
        if like.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if like.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2.0 * source.numel() * source.element_size() / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=25_500_000, help="number of weights (default: ResNet-50's)")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--betas", type=float, nargs="+", default=[1.0, 10.0, 100.0, 1000.0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", action="store_true", help="the Triton kernels alone, over sizes")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**7, 10**8, 10**9])
    parser.add_argument("--append", action="store_true", help="append the figures to the .csv beside this file")
    args = parser.parse_args()
    if args.kernels:
        by_kernels(args)
        return
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
            return sinkhorn([parts], [k], [beta], [-beta * value], Ranks([], []))[0]

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
    if args.append:
        append(RESULTS, COLUMNS, rows)


def append(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([columns, *rows] if new else rows)


if __name__ == "__main__":
    main()
