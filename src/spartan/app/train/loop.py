"""Trains: a recipe in, a run folder out. Killed at any moment and resumed, a run ends with the same weights.

One process or many run the same lines: alone, a process is the first of one.
"""

import contextlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import spartan
from spartan.app.interrupted import Interrupted
from spartan.app.runs import fixed_settings, read_run
from spartan.app.terminal import Display
from spartan.app.train import checkpoint, folder
from spartan.app.train.config import Config, RecipeError, load_recipe
from spartan.app.train.data import Data, build_data, seed_of
from spartan.app.train.distill import Teacher
from spartan.app.train.metrics import Metrics
from spartan.app.train.mixing import mix_batch
from spartan.app.train.parallel import distribute, gathered, in_shards, on_meta
from spartan.app.train.processes import StopAgreement, StopSignals, choose_device, current
from spartan.app.train.setup import (
    build_cost,
    build_model,
    build_optimizer,
    build_sparsifier,
    load_start,
    lr_at,
    passes_a_step,
)
from spartan.app.train.trackers import check_installed
from spartan.distributed import local
from spartan.problem.costs import Cost
from spartan.wording import first_line

FLUSH_EVERY = 50  # steps between looks at the device
MASK_SAMPLE = 1 << 20  # weights whose masks are remembered after every epoch


class Trainer:
    """Everything a run consists of, built from its recipe; nothing is written until `fit`."""

    def __init__(self, config: Config) -> None:
        self.config, self.us = config, current()
        check_installed(config.tracker)
        self.device = choose_device(config.device, self.us)
        seed_everything(config.seed)
        self.data: Data = build_data(config, self.device, self.us)
        self.accumulate = config.batch_size // (self.data.micro * self.us.world)
        self.steps_per_epoch = self.data.train_size // config.batch_size
        self.total_steps = config.epochs * self.steps_per_epoch
        self.teacher = Teacher(config, self.build_model(), self.device) if config.distill else None
        model, whole = self._models()
        cost = self._cost(model if whole is None else whole)
        backwards = self.accumulate * passes_a_step(config)
        self.parallel = distribute(config, model, self.us, backwards, self.device, whole)
        self.model = self.parallel.model
        del model, whole  # the first process has all weights no longer
        self.sparsifier = build_sparsifier(config, self.model, cost, self.total_steps)
        self.optimizer = build_optimizer(config, self.model)
        self.sparsifier.attach(self.optimizer)
        # A method's own parameters may learn at a rate of their own, which follows the same schedule.
        self.relative_lrs = [group["lr"] / config.optimizer.lr for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # batches have one size, so the fastest convolution is worth finding
        if not self.us.alone:
            self._check_model(self.model)  # in shards, too: their layers must be called as modules
            seed_everything(seed_of(config.seed, self.us.rank))  # dropout is not to be the same on every process
        self.step = 0
        self.loss_sum = torch.zeros((), device=self.device)  # over the steps of this epoch
        self.seconds = 0.0
        self.masks: list[Tensor] = []
        self.record: dict[str, Any] = {}  # of the last whole epoch

    def build_model(self) -> nn.Module:
        """A model of the recipe's kind, untrained."""
        return build_model(self.config, self.data.classes, self.data.shape)

    def _models(self) -> tuple[nn.Module, nn.Module | None]:
        """The model as it is distributed; where that is one without weights, the first process has one with them, too.

        In shards no device holds all of the model: the first process makes the weights in the host's memory.
        """
        bare = on_meta(self.build_model) if in_shards(self.config, self.us) else None
        if bare is None:
            return load_start(self.config, self.build_model()).to(self.device), None
        return bare, load_start(self.config, self.build_model()) if self.us.first else None

    def _cost(self, model: nn.Module) -> Cost:
        """What the budget counts, of a whole model that is found to work."""
        if in_shards(self.config, self.us):
            return self.us.decide(lambda: self._cost_of(model))
        return self._cost_of(model)

    def _cost_of(self, model: nn.Module) -> Cost:
        self._check_model(model)
        return build_cost(self.config, model, self.data.example(next(model.parameters()).device))

    def _check_model(self, model: nn.Module) -> None:
        """One example through the model, so that a wrong shape is found before anything is written."""
        model.eval()
        try:
            with torch.no_grad(), self._autocast():
                out = model(self.data.example(local(next(model.parameters())).device))
        except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
            how = "" if self.us.alone else f" with parallel: {self.config.parallel}"
            what = f"{self.data.shape} {self.data.unit}"
            message = f"model: {self.config.model} cannot take {what}{how}: {first_line(error)}"
            raise RecipeError(message) from None
        # A score for every class; with text, at every position.
        wanted = (1, *(self.data.shape if self.data.task == "text" else ()), self.data.classes)
        if not isinstance(out, Tensor) or out.shape != wanted:
            got, one = (
                tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__,
                self.data.unit.removesuffix("s"),
            )
            raise RecipeError(f"model: {self.config.model} gives {got} for one {one}; {wanted} is needed")

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.amp)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    # ------------------------------------------------------------------ training

    def fit(self, out: Path, *, metrics_offset: int | None = None, quiet: bool = False) -> dict[str, Any]:
        """Train from where the run stands to its end; the summary is written last."""
        agreement = StopAgreement(self.us)
        with (
            StopSignals(launched=not self.us.alone) as signals,
            Metrics(out, metrics_offset, self.us, self.config.tracker, fixed_settings(self.config)) as metrics,
            Display(self.config.epochs, self.total_steps, quiet or not self.us.first) as display,
        ):
            for epoch in range(self.step // self.steps_per_epoch, self.config.epochs):
                started, first = time.monotonic(), self.step
                for _ in self._epoch(epoch, metrics):
                    display.step(self.step, metrics.last_loss, self.sparsifier.progress)
                    if self.step % self.steps_per_epoch:  # the end of an epoch is saved below, with its scores
                        self._save_if_due(out, metrics, agreement.ask(signals.caught), time.monotonic() - started)
                images = (self.step - first) * self.config.batch_size
                self.record = self._end_epoch(epoch, images, started)
                metrics.epoch(**self.record)
                display.epoch(self.record)
                self._save_if_due(out, metrics, agreement.ask(signals.caught), 0.0)
            agreement.wait()
            self.parallel.wait()
        summary = folder.finish(out, self, self.record)
        return self.us.decide(lambda: summary)

    def _save_if_due(self, out: Path, metrics: Metrics, caught: int | None, unfinished: float) -> None:
        """A checkpoint when one is due or the run is asked to stop, which it then does."""
        c, (epoch, within) = self.config, divmod(self.step, self.steps_per_epoch)
        last = self.step == self.total_steps
        due = bool(c.checkpoint_steps) and self.step % c.checkpoint_steps == 0
        if not within:
            due |= last or epoch % c.checkpoint_epochs == 0
        if due or caught is not None:
            self._save(out, metrics, unfinished)
        if caught is not None and not last:
            self.parallel.wait()
            self.us.decide(lambda: None)  # a launcher ends the others when one has ended: not before it is saved
            raise Interrupted(out, caught)

    def _epoch(self, epoch: int, metrics: Metrics) -> Iterator[None]:
        """The remaining optimizer steps of an epoch; yields after each."""
        self.model.train()
        done = self.step - epoch * self.steps_per_epoch
        if done == 0:
            self.loss_sum.zero_()
        batches = self.data.train(epoch, start=done * self.accumulate)
        for _ in range(done, self.steps_per_epoch):
            lr = lr_at(self.config, self.step, self.steps_per_epoch)
            for group, relative in zip(self.optimizer.param_groups, self.relative_lrs, strict=True):
                group["lr"] = lr * relative
            loss = self._step(batches)
            self.loss_sum += loss
            self.step += 1
            metrics.step(loss, step=self.step, epoch=epoch + 1, lr=lr, **self.sparsifier.progress())
            if self.step % FLUSH_EVERY == 0:
                metrics.flush()
            yield

    def _step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """One optimizer step over this process's micro-batches; returns their mean loss, still on the device."""
        c, total = self.config, torch.zeros((), device=self.device)
        micro: Iterable[tuple[Tensor, Tensor]] = (self._mixed(i, *next(batches)) for i in range(self.accumulate))
        for share in spartan.passes(self.sparsifier):
            micro = micro if share == 1.0 else list(micro)  # each pass is over the same
            for i, (x, y) in enumerate(micro):
                with self.parallel.gradient_sync(last=i == self.accumulate - 1):
                    with self._autocast():
                        logits = self.parallel.forward(x)
                        if self.data.task == "text":  # every position counts
                            logits, y = logits.flatten(0, -2), y.flatten()
                        loss = cross_entropy(logits, y, label_smoothing=c.label_smoothing)
                        loss = loss if self.teacher is None else self.teacher.blend(loss, logits, x)
                        loss = loss / (self.accumulate / share)
                    self.scaler.scale(loss).backward()
                total += loss.detach()
        if c.clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.sparsifier.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), c.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _mixed(self, i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """A micro-batch as the model takes it: mixed, and in its memory format."""
        c = self.config
        if c.mixup or c.cutmix:
            number = i * self.us.world + self.us.rank  # of the micro-batch, among those of all processes
            rng = torch.Generator().manual_seed(hash((c.seed, self.step, number)) % (1 << 63))
            x, y = mix_batch(x, y, self.data.classes, c.mixup, c.cutmix, rng)
        return x.contiguous(memory_format=torch.channels_last) if c.channels_last else x, y

    # ------------------------------------------------------------------ measuring

    def _end_epoch(self, epoch: int, images: int, started: float) -> dict[str, Any]:
        train_loss = float(self.us.mean_(self.loss_sum.double())) / self.steps_per_epoch  # waits for the device
        seconds = time.monotonic() - started
        scores = self.evaluate()
        masks = list(self.sparsifier.masks().values())
        stride = -(-sum(m.numel() for m in masks) // MASK_SAMPLE)
        self.masks.append(torch.cat([gathered(m).reshape(-1)[::stride] for m in masks]).cpu())
        self.seconds += time.monotonic() - started
        stats = self.sparsifier.stats
        return {
            "epoch": epoch + 1,
            "step": self.step,
            "train_loss": train_loss,
            **scores,
            "images_per_s": images / max(seconds, 1e-9),
            "seconds": self.seconds,
            "density": stats.density,
            "target_density": stats.target_density,
            "beta": stats.beta,
            "phase": stats.phase,
            "mask_histogram": self.sparsifier.mask_histogram(50),
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss, top-1 and top-5 on the test data, of which every process takes its share; of text, bits per byte too."""
        self.us.copy_(self.model.buffers())  # one model is measured: the one that is saved
        self.model.eval()
        top = min(5, self.data.classes)
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for x, y in self.parallel.test_batches(self.data):
            if self.config.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            with self._autocast():
                logits = (
                    self.model(x)[: len(y)].flatten(0, -2).float()
                )  # none of a batch that only keeps others company
            y = y.flatten()
            hits = logits.topk(top, 1).indices == y[:, None]
            lost = cross_entropy(logits, y, reduction="sum")
            sums[:3] += torch.stack([hits[:, 0].sum(), hits.any(1).sum(), lost]).double()
            sums[3] += len(y)
        top1, top5, loss = (self.us.sum_(sums)[:3] / sums[3]).tolist()
        bits = {"bits_per_byte": loss / math.log(2)} if self.data.task == "text" else {}
        return {"top1": top1, "top5": top5, "test_loss": loss, **bits}

    # ------------------------------------------------------------------ saving

    def _save(self, out: Path, metrics: Metrics, unfinished: float) -> None:
        """Everything that the future depends on."""
        state = {
            "step": self.step,
            "recipe": fixed_settings(self.config),
            "scaler": self.scaler.state_dict(),
            # What each process has of its own.
            "own": self.us.gather({"rng": rng_state(self.device), "loss_sum": float(self.loss_sum)}),
            "seconds": self.seconds + unfinished,
            "metrics_bytes": metrics.sync(),
            "masks": self.masks,
            "record": self.record,
            "data": self.data.facts,
        }
        self.parallel.save(out, self.step, state, self.optimizer, self.sparsifier)

    def load(self, path: Path, state: Mapping[str, Any]) -> int:
        """Continue from a checkpoint; returns how much of metrics.jsonl belongs to it."""
        folder.check_data(state.get("data", {}), self.data.facts)
        self.step = int(state["step"])
        self.parallel.load(path, state, self.optimizer, self.sparsifier)
        self.scaler.load_state_dict(state["scaler"])
        self.seconds, self.record = float(state["seconds"]), dict(state["record"])
        self.masks = [m.cpu() for m in state["masks"]]
        own = state["own"]
        if len(own) == self.us.world:
            self.loss_sum.fill_(own[self.us.rank]["loss_sum"])
            set_rng_state(own[self.us.rank]["rng"], self.device)
        else:  # more processes than before, or fewer
            self.loss_sum.fill_(sum(o["loss_sum"] for o in own) / len(own))
            seed_everything(seed_of(self.config.seed, self.step, self.us.rank))
        return int(state["metrics_bytes"])


def seed_everything(seed: int) -> None:
    """Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The random number generators as plain tensors and numbers."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put them back."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def train(config: Config, out: Path, *, quiet: bool = False, command: list[str] | None = None) -> dict[str, Any]:
    """Run a recipe into a new folder. A recipe that cannot run is refused before the folder is made."""

    def check() -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            hint = f"choose another folder, or continue it with --resume {out}"
            raise RecipeError(f"--out: {out} is there already; {hint}")

    current().decide(check)
    trainer = Trainer(config)
    trainer.us.decide(lambda: folder.create(out, config, trainer.device, command or [], trainer.data.facts))
    with contextlib.ExitStack() as stack:
        trainer.us.decide(lambda: stack.enter_context(folder.locked(out)))
        return trainer.fit(out, quiet=quiet)


def resume(out: Path, sets: Sequence[str] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Continue a run to its end: from its last good checkpoint, or from the start if it has none.

    On any number of processes, whatever the number before; they must all see the folder. `sets` may say where and how
    it is done from now on, such as parallel=fsdp2. A recipe that is no longer what the checkpoint was trained with is
    refused; without a checkpoint nothing was trained, and the run begins with the recipe that is there.
    """
    us = current()
    summary = us.decide(lambda: read_run(out).summary)
    if summary is not None:
        return summary

    def last_good() -> Path | None:
        path, state, trouble = checkpoint.load_newest(out, torch.device("cpu")) or (None, {}, [])
        for line in trouble:
            print(f"warning: {line}; continuing from the one before it", file=sys.stderr)
        if path is not None:
            folder.check_recipe(out, config, path.name, state["recipe"])
        return path

    with contextlib.ExitStack() as stack:
        us.decide(lambda: stack.enter_context(folder.locked(out)))
        summary = us.decide(lambda: read_run(out).summary)  # whoever had the lock before may have finished it
        if summary is not None:
            return summary
        config = us.decide(lambda: load_recipe(out / "recipe.yaml", sets))
        path = us.decide(last_good)
        trainer = Trainer(config)
        # The first process has checked every file; that is enough.
        offset = 0 if path is None else trainer.load(path, checkpoint.load(path, trainer.device, check=False))
        return trainer.fit(out, metrics_offset=offset, quiet=quiet)


def evaluate(config: Config, fill: Callable[[nn.Module], None]) -> dict[str, float]:
    """Scores on a recipe's test images of its model, once `fill` has put the weights into it."""
    trainer = Trainer(config)
    trainer.sparsifier.detach()
    fill(trainer.model)
    return trainer.evaluate()
