"""The training loop: a recipe in, a run folder out. Killed at any moment and resumed, it ends with the same weights."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spartan.training import checkpoint, folder
from spartan.training.config import Config, RecipeError, reason
from spartan.training.data import Data, build_data
from spartan.training.display import Display
from spartan.training.metrics import Metrics
from spartan.training.mixing import mix_batch
from spartan.training.models import build_model
from spartan.training.setup import build_optimizer, build_sparsifier, choose_device, lr_at
from spartan.training.signals import Interrupted, StopSignals

FLUSH_EVERY = 50  # steps between looks at the device
MASK_SAMPLE = 1 << 20  # weights whose masks are remembered after every epoch


class Trainer:
    """Everything a run consists of, built from its recipe; nothing is written until `fit`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = choose_device(config.device)
        seed_everything(config.seed)
        self.data: Data = build_data(config, self.device)
        self.micro = config.micro_batch or config.batch_size
        self.steps_per_epoch = self.data.train_size // config.batch_size
        self.total_steps = config.epochs * self.steps_per_epoch
        model = build_model(config, self.data.classes, self.data.shape).to(self.device)
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model: nn.Module = model
        self._try_model()
        self.sparsifier = build_sparsifier(config, model, self.data.shape, self.total_steps)
        self.optimizer = build_optimizer(config, model)
        self.sparsifier.attach(self.optimizer)
        # A method's own parameters may learn at a rate of their own, which follows the same schedule.
        self.relative_lrs = [group["lr"] / config.optimizer.lr for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # batches have one size, so the fastest convolution is worth finding
        # Small nets on a fast GPU wait for launches, so steps are replayed as CUDA graphs.
        compiled = config.compile and self.device.type == "cuda"
        self.forward = torch.compile(model, mode="reduce-overhead") if compiled else model
        self.step = 0
        self.loss_sum = torch.zeros((), device=self.device)  # over the steps of this epoch
        self.seconds = 0.0
        self.masks: list[Tensor] = []
        self.record: dict[str, Any] = {}  # of the last whole epoch

    def _try_model(self) -> None:
        """One image through the model, so that a wrong shape is found before anything is written."""
        self.model.eval()
        try:
            with torch.no_grad(), self._autocast():
                out = self.model(torch.zeros(1, *self.data.shape, device=self.device))
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            message = f"model: {self.config.model} cannot take {self.data.shape} images: {reason(error)}"
            raise RecipeError(message) from None
        if not isinstance(out, Tensor) or out.shape != (1, self.data.classes):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise RecipeError(
                f"model: {self.config.model} gives {got} for one image; (1, {self.data.classes}) is needed"
            )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.amp)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    # ------------------------------------------------------------------ training

    def fit(self, out: Path, *, metrics_offset: int | None = None, quiet: bool = False) -> dict[str, Any]:
        """Train from where the run stands to its end; the summary is written last."""
        metrics = Metrics(out, metrics_offset)
        display = Display(self.config, self.total_steps, quiet)
        try:
            with StopSignals() as signals, display:
                for epoch in range(self.step // self.steps_per_epoch, self.config.epochs):
                    started, first = time.monotonic(), self.step
                    for _ in self._epoch(epoch, metrics):
                        display.step(self.step, metrics.last_loss, self.sparsifier)
                        if self.step % self.steps_per_epoch:  # the end of an epoch is saved below, with its scores
                            self._maybe_save(out, metrics, signals.caught, time.monotonic() - started)
                    images = (self.step - first) * self.config.batch_size
                    self.record = self._end_epoch(epoch, images, started)
                    metrics.epoch(**self.record)
                    display.epoch(self.record)
                    self._maybe_save(out, metrics, signals.caught, 0.0)
        finally:
            metrics.close()
        return folder.finish(out, self, self.record)

    def _maybe_save(self, out: Path, metrics: Metrics, caught: int | None, unfinished: float) -> None:
        """A checkpoint when one is due or the run is asked to stop, which it then does."""
        c, (epoch, within) = self.config, divmod(self.step, self.steps_per_epoch)
        last = self.step == self.total_steps
        due = bool(c.checkpoint_steps) and self.step % c.checkpoint_steps == 0
        if not within:
            due |= last or epoch % c.checkpoint_epochs == 0
        if due or caught is not None:
            self._save(out, metrics, unfinished)
        if caught is not None and not last:
            raise Interrupted(out, caught)

    def _epoch(self, epoch: int, metrics: Metrics) -> Iterator[None]:
        """The remaining optimizer steps of an epoch; yields after each."""
        self.model.train()
        accumulate = self.config.batch_size // self.micro
        done = self.step - epoch * self.steps_per_epoch
        if done == 0:
            self.loss_sum.zero_()
        batches = self.data.train(epoch, start=done * accumulate)
        for _ in range(done, self.steps_per_epoch):
            lr = lr_at(self.config, self.step, self.steps_per_epoch)
            for group, relative in zip(self.optimizer.param_groups, self.relative_lrs, strict=True):
                group["lr"] = lr * relative
            loss = self._step(batches, accumulate)
            self.loss_sum += loss
            self.step += 1
            metrics.step(loss, step=self.step, epoch=epoch + 1, lr=lr, **self.sparsifier.progress())
            if self.step % FLUSH_EVERY == 0:
                metrics.flush()
            yield

    def _step(self, batches: Iterator[tuple[Tensor, Tensor]], accumulate: int) -> Tensor:
        """One optimizer step over `accumulate` micro-batches; returns the mean loss, still on the device."""
        c, total = self.config, torch.zeros((), device=self.device)
        for i in range(accumulate):
            x, y = next(batches)
            if c.mixup or c.cutmix:
                rng = torch.Generator().manual_seed(hash((c.seed, self.step, i)) % (1 << 63))
                x, y = mix_batch(x, y, self.data.classes, c.mixup, c.cutmix, rng)
            if c.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            with self._autocast():
                loss = cross_entropy(self.forward(x), y, label_smoothing=c.label_smoothing) / accumulate
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

    # ------------------------------------------------------------------ measuring

    def _end_epoch(self, epoch: int, images: int, started: float) -> dict[str, Any]:
        train_loss = float(self.loss_sum) / self.steps_per_epoch  # waits for the device
        seconds = time.monotonic() - started
        scores = self.evaluate()
        self._remember_masks()
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
        """Loss, top-1 and top-5 on the test images."""
        self.model.eval()
        top = min(5, self.data.classes)
        sums, seen = torch.zeros(3, dtype=torch.float64, device=self.device), 0
        for x, y in self.data.test():
            if self.config.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            with self._autocast():
                logits = self.model(x).float()
            hits = logits.topk(top, 1).indices == y[:, None]
            sums += torch.stack(
                [hits[:, 0].sum(), hits.any(1).sum(), cross_entropy(logits, y, reduction="sum")]
            ).double()
            seen += len(y)
        top1, top5, loss = (sums / seen).tolist()
        return {"top1": top1, "top5": top5, "test_loss": loss}

    def _remember_masks(self) -> None:
        masks = list(self.sparsifier.masks().values())
        stride = -(-sum(m.numel() for m in masks) // MASK_SAMPLE)
        self.masks.append(torch.cat([m.reshape(-1)[::stride] for m in masks]).cpu())

    # ------------------------------------------------------------------ saving

    def _save(self, out: Path, metrics: Metrics, unfinished: float) -> None:
        """Everything that the future depends on."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "sparsifier": self.sparsifier.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": rng_state(self.device),
            "loss_sum": self.loss_sum,
            "seconds": self.seconds + unfinished,
            "metrics_bytes": metrics.sync(),
            "masks": self.masks,
            "record": self.record,
        }
        checkpoint.save(out, self.step, state)

    def load(self, state: Mapping[str, Any]) -> int:
        """Continue from a checkpoint; returns how much of metrics.jsonl belongs to it."""
        self.step = int(state["step"])
        self.model.load_state_dict(state["model"])
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.loss_sum.copy_(state["loss_sum"])
        self.seconds, self.record = float(state["seconds"]), dict(state["record"])
        self.masks = [m.cpu() for m in state["masks"]]
        set_rng_state(state["rng"], self.device)
        return int(state["metrics_bytes"])


def seed_everything(seed: int) -> None:
    """Python, NumPy and torch."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The random number generators as plain tensors and numbers."""
    import numpy as np

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
    import numpy as np

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def train(config: Config, out: Path, *, quiet: bool = False, command: list[str] | None = None) -> dict[str, Any]:
    """Run a recipe into a new folder. A recipe that cannot run is refused before the folder is made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"--out: {out} is there already; choose another folder, or continue it with --resume {out}")
    trainer = Trainer(config)
    folder.create(out, config, trainer.device, command or [])
    with folder.locked(out):
        return trainer.fit(out, quiet=quiet)


def resume(out: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Continue a run to its end: from its last good checkpoint, or from the start if it has none."""
    config = folder.recipe_of(out)
    if (out / "summary.json").is_file():
        return json.loads((out / "summary.json").read_text())
    trainer = Trainer(config)
    with folder.locked(out):
        found = checkpoint.load_newest(out, trainer.device)
        if found is None:
            return trainer.fit(out, metrics_offset=0, quiet=quiet)
        _, state, trouble = found
        for line in trouble:
            print(f"warning: {line}; continuing from the one before it", file=sys.stderr)
        return trainer.fit(out, metrics_offset=trainer.load(state), quiet=quiet)


def evaluate(config: Config, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Scores of saved weights on a recipe's test images."""
    trainer = Trainer(config)
    trainer.sparsifier.detach()
    try:
        trainer.model.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise RecipeError(f"the weights do not fit model {config.model}: {' '.join(str(error).split())}") from None
    return trainer.evaluate()
