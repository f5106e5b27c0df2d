"""Train a small convolutional net on handwritten digits, dense and sparse, and print what each method reaches.

    make demo                                   the whole comparison, about a minute and a half on two cores
    .venv/bin/python examples/digits.py --help  what can be changed

For a seed, every method gets the same initial weights, the same data order and the same recipe. The accuracy is that of
the last epoch, on images that are used for nothing else.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import NamedTuple

import torch
from torch import Tensor, nn

import spartan

try:
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    sys.exit(f"This example needs {error.name}. `make demo` installs it, and so does: pip install -e '.[app]'")

BATCH, LEARNING_RATE, LR_WARMUP, MOMENTUM, WEIGHT_DECAY, CLIP = 64, 0.2, 0.1, 0.9, 5e-4, 1.0


class Job(NamedTuple):
    """What to train."""

    method: str
    sparsity: float
    seed: int
    epochs: int


@dataclass(frozen=True)
class Result:
    """Test accuracy in percent after the last epoch, and the zeros among the weights that were to become sparse."""

    accuracy: float
    zeros: int
    weights: int
    step_ms: float


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The 1,797 images of 8 × 8 pixels that come with scikit-learn: half to train on, half to test on."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16.0, labels, test_size=0.5, stratify=labels, random_state=0)
    train_x, test_x = (torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) for x in split[:2])
    train_y, test_y = (torch.tensor(y) for y in split[2:])
    mean, std = train_x.mean(), train_x.std()
    return (train_x - mean) / std, train_y, (test_x - mean) / std, test_y


def make_net() -> nn.Sequential:
    """Three convolutions with batch norm and a linear classifier: 56,224 weights."""

    def conv(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")  # as in torchvision's ResNets
        return [layer, nn.BatchNorm2d(outputs), nn.ReLU()]

    body = [*conv(1, 32, 1), *conv(32, 64, 2), *conv(64, 64, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def warmup_cosine(progress: float) -> float:
    """Learning rate as a fraction of its peak: up in a straight line, then down half a cosine."""
    if progress < LR_WARMUP:
        return progress / LR_WARMUP
    return 0.5 + 0.5 * math.cos(math.pi * (progress - LR_WARMUP) / (1 - LR_WARMUP))


def train(job: Job) -> Result:
    """One run: an ordinary training loop. Only the lines that name the sparsifier are about sparsity."""
    torch.set_num_threads(1)  # two runs at a time on two cores are faster than one run on both
    torch.manual_seed(job.seed)
    train_x, train_y, test_x, test_y = load_data()
    net, order = make_net(), torch.Generator().manual_seed(job.seed)
    steps = job.epochs * math.ceil(len(train_y) / BATCH)
    weights = [p for p in net.parameters() if p.ndim >= 2]
    others = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)
    sparsifier = spartan.Sparsifier(net, job.sparsity, total_steps=steps, method=job.method).attach(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step / steps))

    began = time.perf_counter()
    for _ in range(job.epochs):
        for batch in torch.randperm(len(train_y), generator=order).split(BATCH):
            nn.functional.cross_entropy(net(train_x[batch]), train_y[batch]).backward()
            sparsifier.backward()  # gradients for the dense weights, so that those are clipped
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    step_ms = 1e3 * (time.perf_counter() - began) / steps
    sparsifier.finalize()

    net.eval()
    with torch.no_grad():
        accuracy = 100 * (net(test_x).argmax(1) == test_y).double().mean().item()
    zeros = sum(int((p == 0).sum()) for p in weights)
    return Result(accuracy, zeros, sum(p.numel() for p in weights), step_ms)


def run(jobs: list[Job], console: Console, workers: int) -> dict[Job, Result]:
    """Every job, `workers` at a time, with a progress bar on a terminal and a line per run elsewhere."""
    results: dict[Job, Result] = {}
    quiet = not console.is_terminal or bool(os.environ.get("CI"))
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        Progress(*columns, console=console, disable=quiet) as progress,
    ):
        bar = progress.add_task("training", total=len(jobs))
        waiting = {pool.submit(train, job): job for job in jobs}
        try:
            for done in as_completed(waiting):
                job = waiting[done]
                results[job] = done.result()
                name = f"{job.method} {100 * job.sparsity:g}%, seed {job.seed}"
                progress.update(bar, advance=1, description=name)
                if quiet:
                    print(f"[{len(results)}/{len(jobs)}] {name}: {results[job].accuracy:.2f}%", flush=True)
        except BaseException:
            for worker in active_children():  # Ctrl-C, or a run that failed: do not wait for the others
                worker.terminate()
            raise
    return results


def summarize(results: dict[Job, Result], jobs: Iterable[Job]) -> Table:
    """One row per method and sparsity: mean and sample standard deviation over the seeds, and every seed."""
    table = Table(
        title="Sparsity, weights left, and last-epoch test accuracy in %", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for column in ("method", "asked", "achieved", "nonzero", "mean ± std", "each seed", "ms/step"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for method, sparsity in dict.fromkeys((job.method, job.sparsity) for job in jobs):
        found = [results[job] for job in jobs if (job.method, job.sparsity) == (method, sparsity)]
        scores = [result.accuracy for result in found]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        table.add_row(
            method,
            "-" if method == "dense" else f"{100 * sparsity:g}%",
            _same(f"{result.zeros / result.weights:.3%}" for result in found),
            _same(f"{result.weights - result.zeros:,}" for result in found),
            f"{statistics.mean(scores):.2f}{spread}",
            " ".join(f"{score:.2f}" for score in scores),
            f"{statistics.median(result.step_ms for result in found):.1f}",
        )
    return table


def _same(texts: Iterable[str]) -> str:
    """What all seeds have in common, or all that they have."""
    return " / ".join(dict.fromkeys(texts))


def fraction(text: str) -> float:
    """A sparsity from the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a sparsity; write 0.95 for 95% of the weights gone")
    return value


def positive(text: str) -> int:
    """A count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def parse() -> argparse.Namespace:
    """The command line."""
    known = {entry.name: entry for entry in spartan.methods()}
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="methods:\n"
        + "\n".join(f"  {entry.name:<9} {entry.summary} ({entry.year})" for entry in known.values())
        + "\n\nexample: one quick look at a single method\n  digits.py --methods spartan --sparsity 0.9 --seeds 0",
    )
    add = parser.add_argument
    four = ["dense", "imp", "topkast", "spartan"]
    add(
        "--methods",
        nargs="+",
        choices=known,
        default=four,
        metavar="NAME",
        help="any of those below (default: dense imp topkast spartan)",
    )
    add(
        "--sparsity",
        nargs="+",
        type=fraction,
        default=[0.95, 0.98],
        metavar="S",
        help="fraction that goes (default: 0.95 0.98)",
    )
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="weights and data order (default: 0 1 2)")
    add("--epochs", type=positive, default=40, metavar="N", help="schedules stretch with it (default: 40)")
    add("--workers", type=positive, default=2, metavar="N", help="runs at a time, one core each (default: 2)")
    return parser.parse_args()


def jobs_of(args: argparse.Namespace) -> Iterator[Job]:
    """Every run asked for; dense training has no sparsity, so it runs once per seed."""
    for sparsity in dict.fromkeys(args.sparsity):
        for method in dict.fromkeys(args.methods):
            for seed in dict.fromkeys(args.seeds):
                yield Job(method, 0.0 if method == "dense" else sparsity, seed, args.epochs)


def main() -> None:
    """Train, tell, point onward."""
    args, console = parse(), Console()
    jobs = list(dict.fromkeys(jobs_of(args)))
    began = time.perf_counter()
    results = run(jobs, console, args.workers)
    console.print(summarize(results, jobs))
    console.print(
        f"{len(jobs)} runs of {args.epochs} epochs in {time.perf_counter() - began:.0f} s, torch {torch.__version__}."
    )
    console.print(
        "Each sparse row is the same net with as many weights left as its budget allows, counted in the trained model. "
        "What the methods do, and how to put one around your own loop: docs/concepts.md"
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
