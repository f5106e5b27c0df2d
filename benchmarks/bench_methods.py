"""What a training step of every method costs: time and memory beside the dense step, in one run.

    python benchmarks/bench_methods.py --csv benchmarks/method_steps.csv

WRN-22-2 at the CIFAR-10 recipe's batch of 256, compiled, bf16 autocast, in the middle of a run of the recipe's 40 epochs (no
mask is fixed, no warm-up changes the budget). One model serves all methods, so that only what they add differs; methods are
timed in turn, several rounds, and the median counts; the least of the rounds tells what other work on the host hides.
Memory is the peak over the dense step's. "none" is the step without a sparsifier, "dense" the method that does nothing.

    python benchmarks/bench_methods.py --device cpu --model resnet50 --in-step --csv benchmarks/method_steps_cpu.csv

On a CPU a whole step is dear and what methods add is small: there the dense step is timed by itself (batch 32 of 224 × 224),
and of the methods only `optimizer.step()`, with the gradients of one backward, which are left for the step to turn. From it
goes the dense optimizer's step. Others may be using the machine, so the least of several steps counts; steps that rewire
masks count by their share. "learned" is what the optimizer's update of a method's own parameters takes, which is in it.
Two threads wait for each other where others keep a core busy; `--one-thread` then counts the processor time of one.
`--pattern` is as in a recipe: `[16,16]`, `channel`, `nm:2:4`; then only the targets' weights count, and a patch embedding
and a classifier, which not every pattern divides, stay dense.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from traffic import as_in_the_middle

import spartan
from spartan import Spartan, TopKAST, Unstructured
from spartan.app.train.config import load_recipe
from spartan.following import release
from spartan.methods.stored import Rewiring
from spartan.problem.patterns import Pattern, read_pattern
from spartan.zoo import build_model, torchvision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--batch", type=int, help="256; with --in-step 32")
    parser.add_argument(
        "--steps", type=int, help="per round, 100: RigL and SET rewire once in as many; with --in-step 8"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", default="", help="comma-separated; all by default")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=("wrn22", "resnet50", "vit16"), default="wrn22")
    parser.add_argument("--pattern", type=pattern_of, help="with --in-step; single weights by default")
    parser.add_argument(
        "--kernels", choices=("auto", "torch"), default="auto", help="with --in-step: torch is plain torch"
    )
    parser.add_argument("--channels-last", action="store_true", help="with --in-step: the order of memory")
    parser.add_argument("--in-step", action="store_true", help="time optimizer.step() alone")
    parser.add_argument("--one-thread", action="store_true", help="with --in-step: processor time of one thread")
    args = parser.parse_args()
    args.batch = args.batch or (32 if args.in_step else 256)
    args.steps = args.steps or (8 if args.in_step else 100)
    if (args.pattern or args.kernels != "auto") and not args.in_step:
        parser.error("--pattern and --kernels go with --in-step")
    if args.one_thread:
        torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    # "fixed" makes no zeros, and the model has none.
    names = args.methods.split(",") if args.methods else [e.name for e in spartan.methods() if e.name != "fixed"]
    names = [n for n in names if n not in ("none", "dense")]
    if args.in_step and not args.methods:
        names += VARIANTS
    rows = in_step(args, names) if args.in_step else whole_steps(args, ["none", "dense", *names])
    if args.csv:
        fresh = not args.csv.exists()
        with args.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if fresh:
                writer.writeheader()
            writer.writerows(rows)


def pattern_of(text: str) -> Pattern:
    """A pattern as a recipe writes it."""
    return read_pattern(json.loads(text) if text.startswith("[") else text)


def facts(device: torch.device) -> dict[str, Any]:
    """What a row begins with."""
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": where,
        "torch": torch.__version__,
    }


def whole_steps(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Rows of whole steps and of memory."""
    device = torch.device(args.device)
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
            print(f"{name} {ms:.3f}", file=sys.stderr, flush=True)
    dense, least_dense = statistics.median(found["dense"]), min(found["dense"])
    rows: list[dict[str, Any]] = []
    print(
        f"{'method':16} {'ms':>8} {'over dense':>11} {'least ms':>9} {'over dense':>11} {'peak MiB':>9} {'over dense':>11}"
    )
    for name in names:
        ms, least = statistics.median(found[name]), min(found[name])
        times = f"{ms:8.3f} {ms - dense:+10.3f}  {least:9.3f} {least - least_dense:+10.3f} "
        print(f"{name:16} {times} {memory[name]:9.0f} {memory[name] - memory['dense']:+10.0f}")
        rows.append(
            {
                **facts(device),
                "method": name, "sparsity": args.sparsity, "batch": args.batch, "ms": round(ms, 3),
                "ms_over_dense": round(ms - dense, 3), "peak_mib": round(memory[name], 1),
                "least_ms": round(least, 3), "least_over_dense": round(least - least_dense, 3),
            }
        )  # fmt: skip
    return rows


def one(
    name: str, model: nn.Module, forward: Any, x: torch.Tensor, y: torch.Tensor, sparsity: float, steps: int, total: int
) -> tuple[float, float]:
    """Milliseconds and peak MiB of a step of one method, with its optimizer and all that the method keeps."""
    gc.collect()  # of the one before
    before = torch.cuda.memory_allocated() if x.device.type == "cuda" else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sparsifier = None if name == "none" else in_the_middle(name, model, optimizer, sparsity, steps, total)

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
    if sparsifier is not None:
        let_go(sparsifier)
    return ms, peak


def in_the_middle(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, sparsity: float, steps: int, total: int
) -> spartan.Sparsifier:
    """A sparsifier in the middle of a run, with as many steps before masks are fixed."""
    sparsifier = spartan.Sparsifier(model, sparsity, total, name, count="model").attach(optimizer)
    run = sparsifier._run
    middle = (run.at.warmup_steps + run.at.freeze_step) // 2
    run.at = replace(run.at, step=max(0, min(middle, run.at.freeze_step - 4 * steps)))
    as_in_the_middle(sparsifier)
    run.solve()
    run.write()
    return sparsifier


def let_go(sparsifier: spartan.Sparsifier) -> None:
    """The model goes to the next one."""
    run = sparsifier._run
    sparsifier.detach()
    run.weights.drop()
    release(run.problem.targets)
    run.gradients.close()


def in_step(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Rows of what methods add to `optimizer.step()`, as a percentage of the dense step."""
    device, size = torch.device(args.device), 32 if args.model == "wrn22" else 224
    torch.manual_seed(0)
    if args.model != "wrn22":
        model = getattr(torchvision().models, {"vit16": "vit_b_16"}.get(args.model, args.model))().to(device)
    else:
        model = build_model(load_recipe("cifar10-wrn22").model, 10, (3, 32, 32)).to(device)
    x, y = torch.randn(args.batch, 3, size, size, device=device), torch.randint(10, (args.batch,), device=device)
    if args.channels_last:
        model, x = (of.to(memory_format=torch.channels_last) for of in (model, x))
    optimizer, whole, inside = sgd(model), [], []
    for _ in range(args.rounds):
        optimizer.zero_grad()
        passes = clocked(lambda: nn.functional.cross_entropy(model(x), y).backward())
        inside.append(clocked(optimizer.step))
        whole.append(passes + inside[-1])
    grads, start = gradients(model), {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(8):
        inside += timed(model, optimizer, grads)
    dense, update, rows = min(whole), min(inside), []
    print(
        f"{args.model}, batch {args.batch}: a dense step takes {dense:.0f} ms, {update:.1f} of them in optimizer.step()"
    )
    print(f"{'method':16} {'added ms':>9} {'percent':>8} {'learned':>8} {'rewiring':>9}")
    for name in names:
        model.load_state_dict(start)
        plain, rewiring, learned = in_step_of(name, model, grads, args)
        added = plain - update + rewiring
        print(f"{name:16} {added:9.1f} {100 * added / dense:8.2f} {learned:8.1f} {rewiring:9.2f}", flush=True)
        rows.append(
            {
                **facts(device), "threads": torch.get_num_threads(), "model": args.model,
                "method": name, "sparsity": args.sparsity,
                "pattern": repr(args.pattern or Unstructured()), "kernels": args.kernels,
                "memory": "channels_last" if args.channels_last else "contiguous", "batch": args.batch,
                "dense_ms": round(dense, 1), "update_ms": round(update, 2), "added_ms": round(added, 2),
                "percent": round(100 * added / dense, 3), "learned_ms": round(learned, 2), "rewiring_ms": round(rewiring, 2),
            }
        )  # fmt: skip
    return rows


EDGES = {
    "vit16": ("conv_proj.*", "heads.*"),
    "resnet50": ("conv1.*", "fc.*"),
    "wrn22": None,
}  # stay dense under a pattern

# Settings that do other work than the defaults.
VARIANTS: dict[str, Any] = {
    "topkast-b": TopKAST(backward_sparsity=0.8, exploration=1e-4),
    "spartan-soft": Spartan(project=False),
}


def in_step_of(name: str, model: nn.Module, grads: Any, args: argparse.Namespace) -> tuple[float, float, float]:
    """Milliseconds of `optimizer.step()`; more of them where masks are rewired, by step; those of learned parameters."""
    optimizer, total = sgd(model), 10_000
    what: dict[str, Any] = (
        {"pattern": args.pattern, "exclude": EDGES[args.model]} if args.pattern else {"count": "model"}
    )
    what["kernels"] = args.kernels
    sparsifier = spartan.Sparsifier(model, args.sparsity, total, VARIANTS.get(name, name), **what).attach(optimizer)
    run = sparsifier._run
    run.gradients.paused = True  # the step turns them then, in its own time
    middle = (run.at.warmup_steps + run.at.freeze_step) // 200 * 100  # no warm-up changes the budget
    middle = min(middle, (run.at.freeze_step - 1000) // 100 * 100)
    run.at = replace(run.at, step=middle + 10)
    as_in_the_middle(sparsifier)
    for part in run.weights.solving:  # scores that start from zero have moved by then
        for x in (*part.state.learned.values(), part.state.per_unit.get("S")):
            if x is not None and not x.any():
                x.data.normal_()
    run.solve()
    run.write()
    plain = [timed(model, optimizer, grads)[0] for _ in range(4 + args.steps)][2:]
    rewiring = 0.0
    if isinstance(run.method, Rewiring):
        period, some = run.method.period(run.at), []
        steps = (replace(run.at, step=step) for step in range(middle + 20, run.at.freeze_step))
        for at in list(filter(run.method.updates_at, steps))[:3]:
            run.at = at
            some += timed(model, optimizer, grads)
        rewiring = max(0.0, min(some) - min(plain)) / period
    learned, own = run.weights.learned(), [0.0]
    if learned:
        groups = [g for g in optimizer.param_groups if any(p is learned[0] for p in g["params"])]
        alone = torch.optim.SGD(learned, **{k: groups[0][k] for k in ("lr", "momentum", "nesterov", "weight_decay")})
        for p in learned:
            p.grad = torch.zeros_like(p)
        own = [clocked(alone.step) for _ in range(6)]
    let_go(sparsifier)
    return min(plain), rewiring, min(own)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def timed(model: nn.Module, optimizer: Any, grads: Any) -> list[float]:
    """Milliseconds of a step with these gradients."""
    optimizer.zero_grad()
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = None if g is None else g.clone()
    return [clocked(optimizer.step)]


def clocked(work: Any) -> float:
    """Milliseconds of some work."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    work()
    return 1e3 * (clock() - begun)


if __name__ == "__main__":
    main()
