"""Where the time of a sparse optimizer step goes, kernel by kernel, without a forward pass: gradients are random.

    python benchmarks/profile_step.py --model resnet50                       # H200: put, take, project, search, …
    python benchmarks/profile_step.py --model vit_b_16 --block 16 --method imp
    python benchmarks/profile_step.py --model resnet50 --finetune            # with the mask fixed
    python benchmarks/profile_step.py --device cpu --model wrn22             # torch's operations instead of kernels

Microseconds a step by torch's profiler, of kernels that a dense step does not have. "copy" is how long it takes to read
and write every target weight once, at the speed of a large copy.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from bench_step import build_method, build_model, copy_speed
from torch import nn
from torch.profiler import ProfilerActivity, profile

from spartan import Block, Sparsifier


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps with gradients that have nothing to do with the loss."""
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p).mul_(1e-3)
        optimizer.step()


def times(args: argparse.Namespace, sparse: bool) -> tuple[Counter[str], int]:
    """Microseconds of a step by name of the kernel or operation, and the number of target weights."""
    model = build_model(args.model).to(args.device)
    if args.model != "vit_b_16" and args.device == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    weights = 0
    if sparse:
        method = build_method(args.method, None)
        assert method is not None
        pattern = None if args.block == 1 else Block(args.block, args.block)
        fixed = 0.9999 if args.finetune else 0.0
        left_out = ["heads.head.weight"] if args.block > 1 else None  # its 1,000 rows do not divide into blocks
        sparsifier = Sparsifier(
            model, 0.9, 10_000, method, pattern=pattern, exclude=left_out, warmup=0.0, finetune=fixed
        )
        sparsifier.attach(optimizer)
        weights = sum(layer.parameters for layer in sparsifier.layers())
    train(model, optimizer, 6)  # compiled, recorded
    on_gpu = args.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        train(model, optimizer, args.steps)
        if on_gpu:
            torch.cuda.synchronize()
    each: Counter[str] = Counter()
    for event in found.events() or []:
        each[event.name] += event.device_time if on_gpu else event.self_cpu_time_total
    return Counter({name: us / args.steps for name, us in each.items()}), weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet50", "vit_b_16", "wrn22"], default="resnet50")
    parser.add_argument("--method", choices=["spartan", "topkast", "imp"], default="spartan")
    parser.add_argument("--block", type=int, default=1, help="side of square blocks (default: single weights)")
    parser.add_argument("--finetune", action="store_true", help="with the mask fixed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    dense, _ = times(args, sparse=False)
    sparse, weights = times(args, sparse=True)
    more = Counter({name: us for name, us in sparse.items() if name not in dense})
    copy = 8e6 * weights / copy_speed(torch.device(args.device))
    print(f"{args.model}, {args.method}, {weights:,} weights: copy {copy:.1f} µs, all {sum(more.values()):.1f} µs")
    for name, us in more.most_common(20):
        if us >= 0.5:
            print(f"{us:10.1f}  {us / copy:6.2f} × copy  {name[:80]}")


if __name__ == "__main__":
    main()
