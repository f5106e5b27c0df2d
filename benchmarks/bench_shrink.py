"""Models with dead channels and heads, before and after `spartan.shrink`: parameters, FLOPs, outputs, time in plain torch.

    pip install 'spartan-sparsity[vision]'
    python benchmarks/bench_shrink.py [--cases resnet18-50 …] [--batches 1 8] [--threads 1] [--rounds 30] [--append]
    python benchmarks/bench_shrink.py --device cuda --batches 64

Every case is a model of torchvision or timm with random weights, and with random biases and statistics in its norms, so
that dead channels give constants that are not zero. Of every layer, the channels, heads or columns of smallest magnitude
are zero.
Both models run in eager torch, float32, as they are; they take turns, and the least time of all rounds counts: with one
thread on a CPU the processor's time, which other programs disturb less, and else that on the wall. Outputs are compared
on other inputs than those that `shrink` was given, and at another size where the model takes one.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import spartan
from spartan import Channel, Heads
from spartan.zoo import timm, torchvision

RESULTS = Path(__file__).parent / "shrink.csv"
COLUMNS = ["date", "commit", "device", "torch", "case", "batch", "parameters", "shrunk_parameters", "gflops"]
COLUMNS += ["shrunk_gflops", "difference", "least_s", "shrunk_least_s", "ratio"]


@dataclass(frozen=True)
class Case:
    """A model, and which of its units are dead."""

    library: str
    model: str
    channels: float
    heads: tuple[int, float] | None = None
    include: str | None = None
    exclude: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """The model, in eval mode."""
        torch.manual_seed(0)
        made = torchvision().models.get_model if self.library == "torchvision" else timm().create_model
        model: nn.Module = made(self.model)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                    module.weight.uniform_(0.5, 1.0)
                    module.bias.normal_(0, 0.2)
                if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                    module.running_mean.normal_(0, 0.2)
                if isinstance(
                    gamma := getattr(module, "gamma", None), nn.Parameter
                ):  # ConvNeXt's, which begin near zero
                    gamma.uniform_(0.5, 1.0)
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0, module.in_features**-0.5)
                    module.bias.normal_(0, 0.1)
        options = {"budget": "uniform", "include": self.include, "exclude": self.exclude or None}
        spartan.prune(model, self.channels, pattern=Channel(), **options)  # type: ignore[call-overload]
        if self.heads:
            count, share = self.heads
            spartan.prune(model, share, pattern=Heads(count), budget="uniform", include="*.qkv.weight")
        return model.eval()


_ENDS = ("conv1.weight", "fc.weight")
CASES = {
    **{f"resnet18-{n}": Case("torchvision", "resnet18", n / 100, exclude=_ENDS) for n in (50, 70, 80)},
    "resnet50-70": Case("torchvision", "resnet50", 0.7, exclude=_ENDS),
    "mobilenet_v2-50": Case("torchvision", "mobilenet_v2", 0.5, exclude=("classifier*",)),
    "vit_small-heads-50": Case("timm", "vit_small_patch16_224", 0.5, (6, 0.5), include="*.fc1.weight"),
    "vit_small-heads-67": Case("timm", "vit_small_patch16_224", 0.75, (6, 2 / 3), include="*.fc1.weight"),
    "convnext_atto-70": Case("timm", "convnext_atto", 0.7, include="*.fc1.weight"),
}


@torch.inference_mode()
def least_times(runs: list[Callable[[], Tensor]], rounds: int, device: torch.device) -> list[float]:
    """The least time of each, taking turns."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    least = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            run()
            wait()
            start = clock()
            run()
            wait()
            least[i] = min(least[i], clock() - start)
    return least


def git_commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"


def measure(name: str, batches: list[int], rounds: int, device: torch.device, where: str) -> list[list[object]]:
    model = CASES[name].build().to(device)
    started = time.perf_counter()
    smaller, report = spartan.shrink(model, torch.randn(1, 3, 224, 224), report=True)
    took = time.perf_counter() - started
    if report.refused:
        raise RuntimeError(f"{name}: {report.refused[0]}")
    others = [torch.randn(2, 3, 224, 224, device=device)]
    others += [torch.randn(1, 3, 160, 192, device=device)] if "vit" not in name else []
    with torch.inference_mode():
        pairs = [(model(x), smaller(x)) for x in others]
    difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    gflops = [spartan.flops(m, torch.randn(1, 3, 224, 224)).dense / 1e9 for m in (model, smaller)]
    print(
        f"{name}: {report.before:,} → {report.after:,} parameters, {gflops[0]:.2f} → {gflops[1]:.2f} GFLOPs, ", end=""
    )
    print(f"outputs within {difference:.1e} of the largest; shrink took {took:.1f} s")
    rows: list[list[object]] = []
    for batch in batches:
        x = torch.randn(batch, 3, 224, 224, device=device)
        before, after = least_times([lambda x=x: model(x), lambda x=x: smaller(x)], rounds, device)  # type: ignore[misc]
        print(
            f"  batch {batch}: {1e3 * before:.2f} → {1e3 * after:.2f} ms, {before / after:.2f} times as fast",
            flush=True,
        )
        rows.append(
            [
                datetime.date.today().isoformat(), git_commit(), where, torch.__version__, name, batch, report.before,
                report.after, f"{gflops[0]:.3f}", f"{gflops[1]:.3f}", f"{difference:.1e}", f"{before:.6f}", f"{after:.6f}",
                f"{before / after:.2f}",
            ]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--append", action="store_true", help=f"add the results to {RESULTS.name}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    cpu = f"{platform.machine()}, {args.threads} thread{'s' * (args.threads > 1)}"
    where = torch.cuda.get_device_name() if device.type == "cuda" else cpu
    print(f"{where}, torch {torch.__version__}, commit {git_commit()}")
    rows = [row for name in args.cases for row in measure(name, args.batches, args.rounds, device, where)]
    if args.append:
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows] if new else rows)


if __name__ == "__main__":
    main()
