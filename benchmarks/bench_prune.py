"""A decoder on bytes, trained dense, pruned by three criteria and finetuned, or trained sparse from the start: test losses.

    pip install 'spartan-sparsity[app]'
    python benchmarks/bench_prune.py --size tiny --seeds 3 [--append]            minutes on two CPU cores
    python benchmarks/bench_prune.py --size full --seeds 3 --device cuda --append

The model is that of the recipe `bytes-gpt`, the text the sources of Python's standard library, of which one file in ten
is for testing; the head stays dense. For every seed:

    dense       trained for --steps steps
    pruned      that model at 50, 70 and 80% and with 2 of every 4, by magnitude, Wanda and SparseGPT, all of them with
                the same sparsity in every layer; calibrated on --calibration sequences of the training text
    fixed       the model that SparseGPT pruned, trained on for --finetune-steps with its zeros
    gradual     the dense model, pruned over as many steps by the method `gradual`
    distilled   the same, with half of the loss the distance to the dense model's scores
    scratch     a new model, trained sparse for all of these steps together by the method `spartan`
    longer      a new model, trained dense for all of these steps together

Every run has AdamW with a cosine, 1e-3 or when finetuning 3e-4 (--finetune-lr) at its height, and gradients clipped to 1.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import math
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import spartan
from spartan import NM, Sparsifier
from spartan.app.train.config import load_recipe
from spartan.app.train.text import read_corpus
from spartan.gpt import GPT

RESULTS = Path(__file__).parent / "prune.csv"
COLUMNS = [
    "date",
    "commit",
    "device",
    "torch",
    "size",
    "seed",
    "steps",
    "finetune_steps",
    "sparsity",
    "pattern",
    "stage",
]
COLUMNS += ["method", "density", "loss", "bits_per_byte", "seconds", "peak_mib"]
EXCLUDE = "head.*"
TEST_WINDOWS = 500


@dataclass(frozen=True)
class Size:
    """The model, and how it is trained."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    finetune_steps: int


SIZES = {
    "tiny": Size(2, 96, 3, 64, 16, 1500, 500),
    "small": Size(4, 192, 6, 128, 32, 2000, 600),
    "full": Size(6, 384, 6, 256, 64, 4000, 1000),
}


class Bench:
    """Text and a device; what is asked of every model."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        corpus = read_corpus(load_recipe("bytes-gpt"))
        self._train, self._test = (
            torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()).to(device)
            for text in (corpus.train, corpus.test)
        )
        self._along = torch.arange(size.context + 1, device=device)

    def sequences(self, count: int, generator: torch.Generator) -> Tensor:
        """So many sequences of the training text, with the byte after each."""
        starts = torch.randint(len(self._train) - len(self._along), (count,), generator=generator)
        return self._train[starts.to(self.device)[:, None] + self._along].long()

    def model(self, seed: int) -> GPT:
        """Untrained."""
        torch.manual_seed(seed)
        s = self.size
        return GPT(context=s.context, layers=s.layers, width=s.width, heads=s.heads).to(self.device)

    def autocast(self) -> Any:
        """bfloat16 on a GPU."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Per byte, over evenly spread windows of the test text."""
        model.eval()
        context = self.size.context
        windows = (len(self._test) - 1) // context
        starts = torch.tensor([i * windows // TEST_WINDOWS * context for i in range(min(TEST_WINDOWS, windows))])
        total = 0.0
        for some in starts.to(self.device).split(50):
            both = self._test[some[:, None] + self._along].long()
            with self.autocast():
                scores = model(both[:, :-1]).flatten(0, 1).float()
            total += float(cross_entropy(scores, both[:, 1:].flatten(), reduction="sum"))
        return total / (len(starts) * context)

    def train(
        self, model: nn.Module, steps: int, lr: float, seed: int,
        sparsify: Callable[[], Sparsifier] | None = None, teacher: nn.Module | None = None,
    ) -> nn.Module:  # fmt: skip
        """Train in place, with a sparsifier if there is one."""
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
        sparsifier = None if sparsify is None else sparsify().attach(optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: min(1.0, (t + 1) / 50) * 0.5 * (1 + math.cos(math.pi * min(1.0, t / steps)))
        )
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            both = self.sequences(self.size.batch, generator)
            with self.autocast():
                scores = model(both[:, :-1]).flatten(0, 1)
                loss = cross_entropy(scores, both[:, 1:].flatten())
                if teacher is not None:
                    with torch.no_grad():
                        its = teacher(both[:, :-1]).flatten(0, 1)
                    loss = 0.5 * loss + 0.5 * spartan.distillation_loss(scores, its)
            loss.backward()
            if sparsifier is not None:
                sparsifier.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if sparsifier is not None:
            sparsifier.finalize()
        return model


def git_commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"


def run_seed(bench: Bench, args: argparse.Namespace, seed: int, write: Callable[..., None]) -> None:
    steps, more = args.steps or bench.size.steps, args.finetune_steps or bench.size.finetune_steps
    dense = bench.train(bench.model(seed), steps, 1e-3, seed)
    write(seed, 0.0, "", "dense", "dense", dense)
    batches = list(bench.sequences(args.calibration, torch.Generator().manual_seed(1000 + seed))[:, :-1].split(16))
    settings: list[tuple[float, NM | None]] = [(sparsity, None) for sparsity in args.sparsities] + [(0.5, NM(2, 4))]
    if not args.no_scratch:
        write(seed, 0.0, "", "longer", "dense", bench.train(bench.model(seed), steps + more, 1e-3, seed))
    for sparsity, pattern in settings:
        name = "2:4" if pattern else "unstructured"
        asked: dict[str, Any] = {"pattern": pattern, "exclude": EXCLUDE, "budget": "uniform"}
        by_sparsegpt = dense
        for criterion in ("magnitude", "wanda", "sparsegpt"):
            data: dict[str, Any] = {} if criterion == "magnitude" else {"calibration": batches, "progress": False}
            started = time.monotonic()
            model, report = spartan.prune(
                copy.deepcopy(dense), sparsity, criterion=criterion, report=True, **asked, **data
            )
            write(seed, sparsity, name, "pruned", criterion, model, time.monotonic() - started, report.peak_bytes)
            by_sparsegpt = model
        if args.no_finetune:
            continue
        fixed = copy.deepcopy(by_sparsegpt)
        bench.train(fixed, more, args.finetune_lr, seed + 1, partial(Sparsifier.from_sparse, fixed, exclude=EXCLUDE))
        write(seed, sparsity, name, "fixed", "sparsegpt", fixed)
        for stage, teacher in (("gradual", None), ("distilled", dense)):
            model = copy.deepcopy(dense)
            bench.train(
                model, more, args.finetune_lr, seed + 1,
                partial(Sparsifier, model, sparsity, more, "gradual", **asked), teacher,
            )  # fmt: skip
            write(seed, sparsity, name, stage, "gradual", model)
        if not args.no_scratch:
            model = bench.model(seed)
            bench.train(
                model, steps + more, 1e-3, seed,
                partial(Sparsifier, model, sparsity, steps + more, "spartan", **asked),
            )  # fmt: skip
            write(seed, sparsity, name, "scratch", "spartan", model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="of dense training; by default the size's")
    parser.add_argument("--finetune-steps", type=int, help="by default the size's")
    parser.add_argument("--finetune-lr", type=float, default=3e-4)
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.5, 0.7, 0.8])
    parser.add_argument("--calibration", type=int, default=128, help="sequences")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--no-finetune", action="store_true", help="prune only")
    parser.add_argument("--no-scratch", action="store_true", help="no runs from the start")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--append", action="store_true", help=f"add the results to {RESULTS.name}")
    args = parser.parse_args()
    device = torch.device(args.device)
    bench = Bench(SIZES[args.size], device)
    threads = torch.get_num_threads()
    cpu = f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"
    where = torch.cuda.get_device_name() if device.type == "cuda" else cpu
    commit, today = git_commit(), datetime.date.today().isoformat()
    print(f"{where}, torch {torch.__version__}, commit {commit}; {args.size}: {bench.size}")
    new = args.append and not RESULTS.exists()

    def write(
        seed: int, sparsity: float, pattern: str, stage: str, method: str, model: nn.Module,
        seconds: float = math.nan, peak: int | None = None,
    ) -> None:  # fmt: skip
        nonlocal new
        loss = bench.loss(model)
        weights = [p for name, p in model.named_parameters() if name.startswith("layers") and p.ndim > 1]
        density = sum(int(p.count_nonzero()) for p in weights) / sum(p.numel() for p in weights)
        mib = "" if peak is None else f"{peak / 2**20:.0f}"
        print(
            f"seed {seed}  {sparsity:4.0%} {pattern:12} {stage:9} {method:9}  density {density:.4f}  loss {loss:.4f}"
            + (f"  {seconds:.1f} s, {mib} MiB" if mib else ""),
            flush=True,
        )
        row = [today, commit, where, torch.__version__, args.size, seed, args.steps or bench.size.steps]
        row += [args.finetune_steps or bench.size.finetune_steps, sparsity, pattern, stage, method, f"{density:.6f}"]
        row += [f"{loss:.5f}", f"{loss / math.log(2):.5f}", "" if math.isnan(seconds) else f"{seconds:.2f}", mib]
        if args.append:
            with RESULTS.open("a", newline="") as file:
                csv.writer(file).writerows([COLUMNS, row] if new else [row])
            new = False

    for seed in range(args.seeds):
        run_seed(bench, args, seed, write)


if __name__ == "__main__":
    main()
