"""Reads large images, which worker processes decode and augment."""

from __future__ import annotations

import functools
import importlib
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from spartan import zoo
from spartan.app.train.config import Config, RecipeError, blaming_the_recipe
from spartan.app.train.data import Batch, Data, seed_of
from spartan.app.train.image_tables import TABLES, ImageTable
from spartan.app.train.processes import Processes

# ImageNet's, for pixels from 0 to 255
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Key = tuple[int, int]
Sample = tuple[Tensor, int]
Loader = DataLoader[Sample | RecipeError]


class Images(Dataset[Sample | RecipeError]):
    """Decoded uint8 images [3, H, W] and labels by (epoch, index); an image's augmentation depends on nothing else.

    What cannot be decoded is an error to hand on, not to raise: raised in a worker it would come with a traceback.
    """

    def __init__(self, table: ImageTable, config: Config, train: bool) -> None:
        self.table, self.seed, self.train = table, config.seed, train
        self.size, self.randaugment = config.data.image_size, config.data.randaugment

    def __getitem__(self, key: Key) -> Sample | RecipeError:
        from PIL import Image, UnidentifiedImageError

        epoch, index = key
        try:
            with Image.open(io.BytesIO(self.table.read(index))) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
            reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
            return RecipeError(f"data.path: an image in {self.table.name(index)} cannot be read ({reason})")
        transform = _transform(self.size, self.randaugment, self.train)
        with torch.random.fork_rng(devices=[]):
            # The CPU's generator alone; `torch.manual_seed` would reseed the GPU's as well.
            torch.default_generator.manual_seed(seed_of(self.seed, epoch, index))
            return transform(image), int(self.table.label[index])


@functools.cache
def _transform(size: int, randaugment: tuple[int, int] | None, train: bool) -> Callable[[Any], Tensor]:
    """Made in the process that uses it: a worker must be able to import torchvision by itself."""
    zoo.torchvision()
    v2 = importlib.import_module("torchvision.transforms.v2")
    if train:
        steps = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        steps += [v2.RandAugment(*randaugment)] if randaugment else []
    else:
        steps = [v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size)]
    transform: Callable[[Any], Tensor] = v2.Compose([*steps, v2.PILToTensor()])
    return transform


class Batches:
    """Which images come next: a batch sampler that is set before each pass, so that workers stay between epochs."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.order = size, 0, np.arange(0)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, order, size = self.epoch, self.order, self.size
        return ([(epoch, int(i)) for i in order[start : start + size]] for start in range(0, len(order), size))


class LargeImages(Data):
    """Images read from files by workers, copied to the device as uint8 and normalised there."""

    def __init__(self, config: Config, device: torch.device, us: Processes) -> None:
        for key, value in (("pad", config.data.pad), ("cutout", config.data.cutout)):
            if value:
                raise RecipeError(f"data.{key}: {value} is for small images only; set it to 0")
        if config.data.randaugment and not (config.data.randaugment[0] >= 0 <= config.data.randaugment[1] <= 30):
            raise RecipeError(f"data.randaugment: {list(config.data.randaugment)} must be [operations, 0 to 30]")
        with blaming_the_recipe():
            zoo.torchvision()  # a missing package is an error here, not in a worker
        train, test = TABLES[config.data.source](config)
        self._check_counts(config, train, test)
        side, self._table = config.data.image_size, train
        classes = config.data.classes or train.classes
        super().__init__(config, device, us, classes, (3, side, side), (len(train), len(test)))
        self.scale = (1 / torch.tensor(STD)).to(device)[:, None, None]
        self.shift = (-torch.tensor(MEAN) / torch.tensor(STD)).to(device)[:, None, None]
        self._train_batches, self._train_loader = self._loader(Images(train, config, train=True))
        self._test_batches, self._test_loader = self._loader(Images(test, config, train=False))

    @staticmethod
    def _check_counts(config: Config, train: ImageTable, test: ImageTable) -> None:
        data = config.data
        sizes = (("train_size", data.train_size, len(train)), ("test_size", data.test_size, len(test)))
        for key, given, found in sizes:
            if given is not None and given != found:
                raise RecipeError(f"data.{key}: {given} samples expected, but {data.path} holds {found}")
        most = max((int(table.label.max()) + 1 for table in (train, test) if len(table)), default=0)
        if data.classes is not None and data.classes < most:
            raise RecipeError(f"data.classes: {data.classes} is too few; the labels go up to {most - 1}")
        if data.classes is None and len(test) and int(test.label.max()) >= train.classes:
            raise RecipeError(f"data.path: a test label is {most - 1}, but training labels end at {train.classes - 1}")

    def _loader(self, images: Images) -> tuple[Batches, Loader]:
        batches, workers = Batches(self.micro), self.config.data.workers
        return batches, DataLoader(
            images,
            batch_sampler=batches,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
            pin_memory=self.device.type == "cuda",
            collate_fn=_collate,
            worker_init_fn=_leave_signals,
            generator=torch.Generator(),  # its own: starting a pass draws from it, and the global one is the model's
        )

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, from its number `start` on; no other image is even read."""
        order = self._table.order(self.config.seed, epoch)[: self.micro_batches * self.micro]
        mine = order.reshape(-1, self.micro)[self.us.rank :: self.us.world]
        self._train_batches.epoch = epoch
        self._train_batches.order = mine[start:].reshape(-1)
        yield from self._pass(self._train_loader)

    def test(self) -> Iterator[Batch]:
        """Every test image of this process's share, once."""
        self._test_batches.order = np.arange(self.us.rank, self.test_size, self.us.world)
        yield from self._pass(self._test_loader)

    def _pass(self, loader: Loader) -> Iterator[Batch]:
        for batch in loader:
            if isinstance(batch, RecipeError):
                raise RecipeError(*batch.args)  # a new one: the frame that raises must not hold it, or workers linger
            x, y = (part.to(self.device, non_blocking=True) for part in batch)
            yield x * self.scale + self.shift, y


def _collate(samples: Sequence[Sample | RecipeError]) -> Any:
    return next((s for s in samples if isinstance(s, RecipeError)), None) or default_collate(list(samples))


def _leave_signals(worker: int) -> None:
    """Ctrl-C and SIGTERM may reach the whole process group; the main process saves first and then ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

        def end_with_parent() -> None:
            while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
                pass
            os._exit(0)

        threading.Thread(target=end_with_parent, daemon=True).start()
