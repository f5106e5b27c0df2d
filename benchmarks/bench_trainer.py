"""What Spartan adds to a step of Hugging Face's Trainer, and the Trainer to one of a plain loop: four runners, in turn.

    python benchmarks/bench_trainer.py --append            # on a GPU: GPT-2- and Llama-shaped, bf16 and fp16
    python benchmarks/bench_trainer.py --tiny              # on a CPU: shows that it runs, and measures nothing

Each runner trains a copy of the same model (no download: the shape is written here, the tokens are random), with AdamW,
clipping by norm and a linear schedule; "loop" is a plain loop with autocast, and a GradScaler in fp16. In every round
each of them trains anew: for those with Spartan the beginning of a long run (LONG steps: what is done a hundred times in a
run must not be done at every step of a short one, nor β go all its way in a few), at the target density from its first
step on and with masks that are solved for at every step, so that the timed steps are alike. At their end zeros are
counted, exactly. A step is from one `on_step_begin` to the next, by events on the device: nothing waits for
it but at the end of a round (and where a runner does so by itself, as the Trainer does when it looks for a loss that is
not finite, by default at every step; `--no-nan-filter` has it not look). The first steps of a round do not count, and
the figure is the median of all others. "ratio" is over the plain loop without Spartan, of the same model and precision.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import gc
import statistics
import subprocess
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import spartan
from spartan.integrations.transformers import SpartanCallback

HERE = Path(__file__).parent
RESULTS = HERE / "trainer.csv"
COLUMNS = [
    *("date", "commit", "device", "torch", "transformers", "model", "batch", "length", "precision", "runner"),
    *("ms", "least_ms", "ratio", "steps", "skipped", "kept", "targets", "method"),
]
RUNNERS = ["loop", "loop+spartan", "trainer", "trainer+spartan"]
# What is compared with what.
PAIRS = [
    ("trainer+spartan", "trainer"),
    ("loop+spartan", "loop"),
    ("trainer+spartan", "loop+spartan"),
    ("trainer", "loop"),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RATE = 1e-4
LONG = 10_000  # steps of the run whose first ones are taken


def build(name: str, tiny: bool, length: int) -> Any:
    """A decoder of this shape, its weights drawn at random."""
    torch.manual_seed(0)
    width, layers, heads, words = (32, 2, 2, 64) if tiny else (768, 12, 12, 50257 if name == "gpt2" else 32000)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=words, n_positions=length, n_embd=width, n_layer=layers, n_head=heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ends,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    other = transformers.LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=length, **ends,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(other)


class Clock(transformers.TrainerCallback):
    """Marks the beginning of every step, as an event on the device, and waits for none."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps = device, steps
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Notes that the device has come here, or on a CPU the time."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def on_step_begin(self, *args: Any, **given: Any) -> None:
        """A step begins: the Trainer has its batch."""
        self.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The Trainer is to stop after so many."""
        control.should_training_stop = state.global_step >= self.steps

    def times(self) -> list[float]:
        """Milliseconds from each mark to the next; waits for the device."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in pairs]
        return [1e3 * (b - a) for a, b in pairs]


class Bench:
    """One model in one precision, trained by any of the runners."""

    def __init__(self, name: str, precision: str, args: argparse.Namespace) -> None:
        self.name, self.precision, self.args = name, precision, args
        self.device = torch.device("cpu" if args.tiny or not torch.cuda.is_available() else "cuda")
        self.start = build(name, args.tiny, args.length).to(self.device)
        words = self.start.config.vocab_size
        self.steps = args.warm_up + args.steps + 1  # the last one ends with no mark
        rows = torch.randint(words, (self.steps * args.batch, args.length), generator=torch.Generator().manual_seed(1))
        self.rows = [{"input_ids": x, "labels": x} for x in rows]
        # At the target density from the first step on, and no step with masks that are fixed.
        self.settings: dict[str, Any] = {"method": args.method, "warmup": 0.0, "finetune": 0.0}

    def run(self, runner: str) -> dict[str, Any]:
        """Times of a round's steps, and of a sparse model what is left of it."""
        model, clock = copy.deepcopy(self.start), Clock(self.device, self.steps)
        train = self.by_trainer if runner.startswith("trainer") else self.by_loop
        sparsifier = train(model, clock, runner.endswith("spartan"))
        found: dict[str, Any] = {"times": clock.times()[self.args.warm_up :], "skipped": 0, "kept": "", "targets": ""}
        if sparsifier is not None:
            found |= self.count(model, sparsifier)
        return found

    def by_loop(self, model: nn.Module, clock: Clock, sparse: bool) -> Any:
        """A plain loop: what the Trainer is asked for, and nothing else."""
        cuda, dtype = self.device.type == "cuda", DTYPES[self.precision]
        optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0, fused=True)
        schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=LONG)
        scaler = torch.amp.GradScaler(self.device.type, enabled=cuda and self.precision == "fp16")
        sparsifier = None
        if sparse:
            sparsifier = spartan.Sparsifier(model, self.args.sparsity, LONG, **self.settings).attach(optimizer)
        batches = DataLoader(self.rows, self.args.batch, shuffle=True, pin_memory=cuda, drop_last=True)  # type: ignore[arg-type,var-annotated]
        model.train()
        for batch in batches:
            moved: dict[str, Tensor] = {key: x.to(self.device, non_blocking=True) for key, x in batch.items()}
            clock.mark()
            with torch.autocast(self.device.type, dtype, enabled=cuda or dtype is torch.bfloat16):
                loss = model(**moved).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        if sparsifier is not None:
            sparsifier.finalize()
            sparsifier.detach()
        return sparsifier

    def by_trainer(self, model: nn.Module, clock: Clock, sparse: bool) -> Any:
        """The Trainer, and a line of ours."""
        cuda = self.device.type == "cuda"
        options: dict[str, Any] = {"bf16": self.precision == "bf16", "fp16": self.precision == "fp16" and cuda}
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, max_steps=LONG, per_device_train_batch_size=self.args.batch, learning_rate=RATE,
                max_grad_norm=1.0, optim="adamw_torch_fused", lr_scheduler_type="linear", weight_decay=0.0,
                save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not cuda,
                logging_nan_inf_filter=self.args.nan_filter, dataloader_drop_last=True, **options,
            )  # fmt: skip
            trainer = transformers.Trainer(model, arguments, train_dataset=self.rows, callbacks=[clock])
            trainer.remove_callback(transformers.PrinterCallback)
            mine = SpartanCallback(self.args.sparsity, **self.settings) if sparse else None
            if mine is not None:
                trainer.add_callback(mine)
            trainer.train()
        return None if mine is None else mine.sparsifier

    def count(self, model: nn.Module, sparsifier: Any) -> dict[str, Any]:
        """The weights that are left, counted in the model: as many as the budget, or an error."""
        spartan.verify(model, self.args.sparsity)
        targets = [model.get_parameter(layer.name) for layer in sparsifier.layers()]
        kept, every = sum(int((p != 0).sum()) for p in targets), sum(p.numel() for p in targets)
        budget = int((1 - self.args.sparsity) * every + 1e-6)
        if kept != budget:
            raise RuntimeError(f"{kept} weights are left, of {every}; the budget is {budget}")
        return {"kept": kept, "targets": every, "skipped": self.steps - sparsifier.stats.step}


def measure(bench: Bench, runners: list[str], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """What each runner took, in rounds, of which none begins after that time; one that fails is left out."""
    begun = time.perf_counter()
    found: dict[str, dict[str, Any]] = {}
    failed: set[str] = set()
    for turn in range(rounds):
        if turn > 1 and time.perf_counter() - begun > seconds:
            print(f"{bench.name}, {bench.precision}: {turn} rounds, for want of time")
            break
        shift = turn % len(runners)  # nobody is always the first
        for runner in [*runners[shift:], *runners[:shift]]:
            if runner in failed:
                continue
            try:
                result = bench.run(runner)
            except Exception:
                failed.add(runner)
                found.pop(runner, None)
                print(f"{bench.name}, {bench.precision}, {runner} failed:\n{traceback.format_exc()}", flush=True)
                continue
            finally:
                gc.collect()  # models and optimizers of the one before
            times = [*found.get(runner, {"times": []})["times"], *result["times"]]
            found[runner] = result | {"times": times}
    return found


def git_commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, cwd=HERE).stdout.strip()
    except FileNotFoundError:
        found = ""
    return found or "unknown"


def show(bench: Bench, found: dict[str, dict[str, Any]], about: list[str], append: bool) -> None:
    """Prints medians and ratios, and adds rows to the file."""
    args, median = bench.args, {name: statistics.median(one["times"]) for name, one in found.items()}
    rows: list[list[Any]] = []
    print(f"{bench.name}, {bench.precision}, batch {args.batch} × {args.length}")
    for name in (n for n in RUNNERS if n in found):
        one, times = found[name], found[name]["times"]
        ratio = f"{median[name] / median['loop']:.4f}" if "loop" in median else ""
        left = f"  {one['kept']:,} of {one['targets']:,} weights left" if one["kept"] else ""
        skipped = f", {one['skipped']} steps skipped in the last round" if one["skipped"] else ""
        print(f"  {name:16} {median[name]:9.3f} ms, least {min(times):9.3f}, {ratio:>7} × loop{left}{skipped}")
        numbers = [f"{median[name]:.3f}", f"{min(times):.3f}", ratio, len(times)]
        row = [*about, bench.name, args.batch, args.length, bench.precision, name, *numbers]
        method = args.method if name.endswith("spartan") else ""
        rows.append([*row, one["skipped"], one["kept"], one["targets"], method])
    for ours, theirs in PAIRS:
        if ours in median and theirs in median:
            print(f"  {ours} over {theirs}: {median[ours] / median[theirs]:.4f}")
    if append and rows:
        fresh = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows] if fresh else rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("gpt2", "llama"), default=["gpt2", "llama"])
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp16"), default=["bf16", "fp16"])
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=RUNNERS)
    parser.add_argument("--method", default="spartan", help="a name; the runners are called +spartan whichever it is")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--warm-up", type=int, default=4, help="steps of a round that do not count")
    parser.add_argument("--steps", type=int, default=8, help="steps of a round that do")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="about what all of it may take")
    parser.add_argument("--no-nan-filter", dest="nan_filter", action="store_false", help="logging_nan_inf_filter=False")
    parser.add_argument("--commit", help="where git cannot tell")
    parser.add_argument("--append", action="store_true", help="rows go to trainer.csv")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with models of 30,000 weights")
    args = parser.parse_args()
    if args.tiny:
        args.batch, args.length = 2, 16
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    begun, where = time.perf_counter(), "cpu"
    if torch.cuda.is_available() and not args.tiny:
        where = torch.cuda.get_device_name()
    versions = [torch.__version__, transformers.__version__]
    about = [datetime.date.today().isoformat(), args.commit or git_commit(), where, *versions]
    print(", ".join(about), flush=True)
    gc.freeze()  # what is imported by now is not looked through again
    share = args.seconds / len(args.models) / len(args.precisions)
    for name in args.models:
        for precision in args.precisions:
            bench = Bench(name, precision, args)
            show(bench, measure(bench, args.runners, args.rounds, 0.7 * share), about, args.append)
            print(f"  {time.perf_counter() - begun:.0f} s so far", flush=True)
    gc.unfreeze()


if __name__ == "__main__":
    main()
