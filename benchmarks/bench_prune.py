"""A decoder on bytes, trained dense, pruned by three criteria and finetuned, or trained sparse from the start: test losses.

    pip install 'spartan-sparsity[app]'
    python benchmarks/bench_prune.py --size tiny --seeds 3 [--csv benchmarks/prune.csv]      minutes on two CPU cores
    python benchmarks/bench_prune.py --size full --seeds 3 --device cuda --csv benchmarks/prune.csv

The model is that of the recipe `bytes-gpt`, the text the sources of Python's standard library, of which one file in ten
is for testing; the head stays dense. The stages, for every seed:

    dense       trained for --steps steps
    pruned      that model at 50, 70 and 80% and with 2 of every 4, by magnitude, Wanda and SparseGPT, all of them with
                the same sparsity in every layer; calibrated on --calibration sequences of the training text
    fixed       the model that SparseGPT pruned, trained on for --finetune-steps with its zeros
    gradual     the dense model, pruned over as many steps by the method `gradual`
    distilled   the same, with half of the loss the distance to the dense model's scores
    scratch     a new model, trained sparse for all of these steps together by --scratch-method
    longer      a new model, trained dense for all of these steps together

Every run has AdamW with a cosine, 1e-3 or when finetuning 3e-4 (--finetune-lr) at its height, and gradients clipped to 1.
Training is compiled on a GPU, once for all models of a process.

Seeds, stages and settings may run in processes side by side, each with its own --csv, since `scratch` and `longer` need no
dense model, and --dense FILE keeps one for other processes:

    python benchmarks/bench_prune.py --seed 0 --stages dense,pruned,fixed,gradual,distilled --dense 0.pt --csv a.csv &
    python benchmarks/bench_prune.py --seed 0 --stages scratch --settings 0.5,0.7 --csv b.csv &
    python benchmarks/bench_prune.py --seed 0 --stages scratch,longer --settings 0.8,2:4 --csv c.csv &
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
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
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

COLUMNS = ["date", "commit", "device", "torch", "size", "seed", "steps", "finetune_steps", "sparsity", "pattern"]
COLUMNS += ["stage", "method", "density", "loss", "bits_per_byte", "seconds", "peak_mib"]
STAGES = ("dense", "pruned", "fixed", "gradual", "distilled", "scratch", "longer")
CRITERIA = ("magnitude", "wanda", "sparsegpt")
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
    "full": Size(6, 384, 6, 256, 64, 2000, 500),
}


@dataclass(frozen=True)
class Setting:
    """How sparse, and in which pattern: read from "0.7" or "2:4"."""

    sparsity: float
    pattern: NM | None

    @classmethod
    def read(cls, text: str) -> Setting:
        """From an argument."""
        if ":" not in text:
            return cls(float(text), None)
        n, m = (int(part) for part in text.split(":"))
        return cls(1 - n / m, NM(n, m))

    @property
    def asked(self) -> dict[str, Any]:
        """Of `prune` and of `Sparsifier`."""
        return {"pattern": self.pattern, "exclude": EXCLUDE, "budget": "uniform"}

    def __str__(self) -> str:
        return f"{self.pattern.n}:{self.pattern.m}" if self.pattern else "unstructured"


DENSE = Setting(0.0, None)


def objective(model: nn.Module, teacher: nn.Module | None, both: Tensor) -> Tensor:
    """The loss of a batch. Models are its arguments, so that what is compiled for one of them is so for all."""
    with torch.autocast(both.device.type, torch.bfloat16, enabled=both.is_cuda):
        scores = model(both[:, :-1]).flatten(0, 1)
        loss = cross_entropy(scores.float(), both[:, 1:].flatten())
        if teacher is None:
            return loss
        with torch.no_grad():
            its = teacher(both[:, :-1]).flatten(0, 1)
        return 0.5 * loss + 0.5 * spartan.distillation_loss(scores.float(), its.float())


class Bench:
    """Text and a device; what is asked of every model."""

    def __init__(self, size: Size, device: torch.device, compiled: bool) -> None:
        self.size, self.device = size, device
        self._objective = torch.compile(objective, dynamic=False) if compiled else objective
        corpus = read_corpus(load_recipe("bytes-gpt"))
        self._train, self._test = (
            torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()).to(device)
            for text in (corpus.train, corpus.test)
        )
        self._along = torch.arange(size.context + 1, device=device)

    def starts(self, *shape: int, seed: int) -> Tensor:
        """Where sequences begin in the training text, drawn on the CPU: the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(len(self._train) - len(self._along), shape, generator=generator).to(self.device)

    def sequences(self, starts: Tensor) -> Tensor:
        """Sequences of the training text, with the byte after each."""
        return self._train[starts[:, None] + self._along].long()

    def model(self, seed: int) -> GPT:
        """Untrained."""
        torch.manual_seed(seed)
        s = self.size
        return GPT(context=s.context, layers=s.layers, width=s.width, heads=s.heads).to(self.device)

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Per byte, over evenly spread windows of the test text."""
        model.eval()
        context = self.size.context
        windows = (len(self._test) - 1) // context
        starts = torch.tensor([i * windows // TEST_WINDOWS * context for i in range(min(TEST_WINDOWS, windows))])
        batches = [self._test[some[:, None] + self._along].long() for some in starts.to(self.device).split(50)]
        return float(sum(objective(model, None, both) * len(both) for both in batches)) / len(starts)

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
        for starts in self.starts(steps, self.size.batch, seed=seed):
            self._objective(model, teacher, self.sequences(starts)).backward()
            if sparsifier is not None:
                sparsifier.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if sparsifier is not None:
            sparsifier.finalize()
        return model


class Rows:
    """Prints results and adds them to a file, each as it comes."""

    def __init__(self, args: argparse.Namespace, bench: Bench) -> None:
        threads = torch.get_num_threads()
        cpu = f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"
        where = torch.cuda.get_device_name() if bench.device.type == "cuda" else cpu
        self._bench, self._path = bench, args.csv
        self._first = [datetime.date.today().isoformat(), git_commit(), where, torch.__version__, args.size]
        self._steps = [args.steps, args.finetune_steps]
        print(f"{where}, torch {torch.__version__}, commit {self._first[1]}; {args.size}: {bench.size}", flush=True)

    def add(
        self, seed: int, setting: Setting, stage: str, method: str, model: nn.Module, since: float, peak: int | None
    ) -> None:
        """A model that is done."""
        weights = [p for name, p in model.named_parameters() if name.startswith("layers") and p.ndim > 1]
        density = sum(int(p.count_nonzero()) for p in weights) / sum(p.numel() for p in weights)
        seconds = time.monotonic() - since  # counting has waited for the device
        loss = self._bench.loss(model)
        pattern = "" if setting == DENSE else str(setting)
        mib = "" if peak is None else f"{peak / 2**20:.0f}"
        print(
            f"seed {seed}  {setting.sparsity:4.0%} {pattern:12} {stage:9} {method:9}  density {density:.4f}  "
            f"loss {loss:.4f}  {seconds:.1f} s" + (f", {mib} MiB" if mib else ""),
            flush=True,
        )
        if self._path is None:
            return
        row = [*self._first, seed, *self._steps, setting.sparsity, pattern, stage, method, f"{density:.6f}"]
        row += [f"{loss:.5f}", f"{loss / math.log(2):.5f}", f"{seconds:.2f}", mib]
        new = not self._path.exists() or not self._path.stat().st_size
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerows([COLUMNS, row] if new else [row])


def git_commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"


class Seed:
    """All stages of one seed. What goes wrong in one of them is printed, and the next one comes."""

    def __init__(self, bench: Bench, args: argparse.Namespace, seed: int, rows: Rows) -> None:
        self._bench, self._args, self._seed, self._rows = bench, args, seed, rows
        self.failed = 0

    def run(self) -> None:
        """The stages that are asked for, in order; without a dense model those that need none."""
        wanted = [stage for stage in STAGES if stage in self._args.stages]
        if "dense" in wanted:
            with self._stage(DENSE, "dense", "dense") as done:
                done(self._dense)
        if self.failed:
            wanted = [stage for stage in wanted if stage in ("scratch", "longer")]
        for setting in self._args.settings:
            for stage in STAGES[1:-1]:
                if stage in wanted:
                    getattr(self, f"_{stage}")(setting)
        if "longer" in wanted:
            with self._stage(DENSE, "longer", "dense") as done:
                done(self._bench.train(self._bench.model(self._seed), self._all_steps, 1e-3, self._seed))

    @property
    def _all_steps(self) -> int:
        return int(self._args.steps + self._args.finetune_steps)

    @cached_property
    def _dense(self) -> nn.Module:
        """From its file, or trained, and written there."""
        args, model = self._args, self._bench.model(self._seed)
        made = {"size": args.size, "seed": self._seed, "steps": args.steps}
        if args.dense is not None and args.dense.exists():
            found = torch.load(args.dense, map_location=self._bench.device)
            if found["made"] != made:
                raise SystemExit(f"{args.dense} holds a model of {found['made']}; one of {made} is needed")
            model.load_state_dict(found["model"])
            return model
        self._bench.train(model, args.steps, 1e-3, self._seed)
        if args.dense is not None:
            torch.save({"made": made, "model": model.state_dict()}, args.dense)
        return model

    @contextmanager
    def _stage(self, setting: Setting, stage: str, method: str) -> Any:
        """Gives a function to call with the model that is done; an error ends the stage, not the run."""
        started = time.monotonic()
        try:
            yield lambda model, peak=None: self._rows.add(self._seed, setting, stage, method, model, started, peak)
        except Exception:
            self.failed += 1
            print(f"seed {self._seed} {setting} {stage} {method} failed:\n{traceback.format_exc()}", flush=True)

    def _prune(self, setting: Setting, criterion: str) -> tuple[nn.Module, int | None]:
        data: dict[str, Any] = {}
        if criterion != "magnitude":
            starts = self._bench.starts(self._args.calibration, seed=1000 + self._seed)
            data = {"calibration": self._bench.sequences(starts)[:, :-1].split(16), "progress": False}
        model, report = spartan.prune(
            copy.deepcopy(self._dense), setting.sparsity, criterion=criterion, report=True, **setting.asked, **data
        )
        return model, report.peak_bytes

    def _pruned(self, setting: Setting) -> None:
        for criterion in CRITERIA:
            with self._stage(setting, "pruned", criterion) as done:
                done(*self._prune(setting, criterion))

    def _finetune(
        self, model: nn.Module, sparsify: Callable[[], Sparsifier], teacher: nn.Module | None = None
    ) -> nn.Module:
        args = self._args
        return self._bench.train(model, args.finetune_steps, args.finetune_lr, self._seed + 1, sparsify, teacher)

    def _fixed(self, setting: Setting) -> None:
        with self._stage(setting, "fixed", "sparsegpt") as done:
            model, _ = self._prune(setting, "sparsegpt")
            done(self._finetune(model, partial(Sparsifier.from_sparse, model, exclude=EXCLUDE)))

    def _gradual(self, setting: Setting, distilled: bool = False) -> None:
        with self._stage(setting, "distilled" if distilled else "gradual", "gradual") as done:
            model, teacher = copy.deepcopy(self._dense), self._dense.eval() if distilled else None
            steps = self._args.finetune_steps
            sparsify = partial(Sparsifier, model, setting.sparsity, steps, "gradual", **setting.asked)
            done(self._finetune(model, sparsify, teacher))

    def _distilled(self, setting: Setting) -> None:
        self._gradual(setting, distilled=True)

    def _scratch(self, setting: Setting) -> None:
        method = self._args.scratch_method
        with self._stage(setting, "scratch", method) as done:
            model = self._bench.model(self._seed)
            sparsify = partial(Sparsifier, model, setting.sparsity, self._all_steps, method, **setting.asked)
            done(self._bench.train(model, self._all_steps, 1e-3, self._seed, sparsify))


def stages(text: str) -> list[str]:
    found = text.split(",")
    if wrong := set(found) - set(STAGES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(wrong))}: not one of {', '.join(STAGES)}")
    return found


def settings(text: str) -> list[Setting]:
    return [Setting.read(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="of dense training; by default the size's")
    parser.add_argument("--finetune-steps", type=int, help="by default the size's")
    parser.add_argument("--finetune-lr", type=float, default=3e-4)
    parser.add_argument("--settings", type=settings, default="0.5,0.7,0.8,2:4", help="sparsities and n:m, by commas")
    parser.add_argument("--stages", type=stages, default=",".join(STAGES), help="by commas; all by default")
    parser.add_argument("--scratch-method", default="topkast")
    parser.add_argument("--calibration", type=int, default=128, help="sequences")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=1, help="how many, from 0 on")
    which.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--dense", type=Path, help="read the dense model from there, or train it and write it there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile on a GPU, as on a CPU")
    parser.add_argument("--csv", type=Path, help="add the results to this file, each as it comes")
    args = parser.parse_args()
    if args.dense is not None and args.seed is None:
        parser.error("--dense is the model of one seed: pass --seed")
    size, device = SIZES[args.size], torch.device(args.device)
    args.steps = args.steps or size.steps
    args.finetune_steps = args.finetune_steps or size.finetune_steps
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled is only slower
    bench = Bench(size, device, device.type == "cuda" and not args.no_compile)
    rows, failed = Rows(args, bench), 0
    for seed in range(args.seeds) if args.seed is None else [args.seed]:
        one = Seed(bench, args, seed, rows)
        one.run()
        failed += one.failed
    if failed:
        raise SystemExit(f"{failed} stage{'s' * (failed > 1)} failed")


if __name__ == "__main__":
    main()
