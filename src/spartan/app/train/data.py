"""Chooses where images or text come from, and says what every source gives."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from spartan.app.train.config import Config, RecipeError
from spartan.app.train.processes import Processes, micro_batch
from spartan.wording import nearest
from spartan.zoo import Shape

Batch = tuple[Tensor, Tensor]


class Data(ABC):
    """Training and test examples in micro-batches on the device.

    Images are float32 NCHW, normalised, with int64 labels; text is int64, sequences of tokens [B, T] with those that
    come next.

    Everything random is a pure function of (seed, epoch, index): `train(epoch, start=n)` yields exactly what an
    uninterrupted `train(epoch)` yields from its n-th micro-batch on, whatever the number of workers. Of W processes,
    each takes every W-th micro-batch of the one global order, and every W-th test image.
    """

    unit: ClassVar[str] = "images"
    task: ClassVar[Literal["images", "text"]] = "images"
    facts: dict[str, Any]  # what to record of the data with a run, and to check when it goes on

    def __init__(
        self, config: Config, device: torch.device, us: Processes, classes: int, shape: Shape, sizes: tuple[int, int]
    ) -> None:
        self.config, self.device, self.us = config, device, us
        self.classes, self.shape, (self.train_size, self.test_size) = classes, shape, sizes
        self.facts = getattr(self, "facts", {})
        # examples per forward pass of one process, in training and in testing
        self.micro = self.test_micro = micro_batch(config, us.world)
        for part, size in zip(("training", "test"), sizes, strict=True):
            if not size:
                raise RecipeError(f"data.source: {config.data.source} has no {part} {self.unit}")
        if config.batch_size > self.train_size:
            raise RecipeError(
                f"batch_size: {config.batch_size} is larger than the training set of {self.train_size:,} {self.unit}"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches in an epoch, of all processes together; an incomplete last batch is dropped."""
        return self.train_size // self.config.batch_size * (self.config.batch_size // self.micro)

    @property
    def test_batches(self) -> int:
        """Batches in `test()` of the process that has the most examples."""
        return -(-self.test_size // (self.us.world * self.test_micro))

    def example(self, device: torch.device) -> Tensor:
        """One example of zeros, to find out what a model makes of it."""
        return torch.zeros(1, *self.shape, device=device)

    @abstractmethod
    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, from its number `start` on."""

    @abstractmethod
    def test(self) -> Iterator[Batch]:
        """Every test example of this process's share, once."""


def build_data(config: Config, device: torch.device, us: Processes = Processes()) -> Data:  # noqa: B008
    """The data that `config.data` describes, for one of these processes."""
    from spartan.app.train import large_images, small_images, text

    source = config.data.source
    if source == "text":
        return text.Text(config, device, us)
    if source in large_images.TABLES:
        return large_images.LargeImages(config, device, us)
    if source in small_images.READERS or source.startswith("torchvision/") or ":" in source:
        return small_images.SmallImages(config, device, us)
    named = [f"torchvision/{name}" for name in small_images.TORCHVISION]
    known = [*small_images.READERS, *large_images.TABLES, "text", *named]
    raise RecipeError(
        f"data.source: {source!r} is unknown{nearest(source, known)}; accepted: {', '.join(known)}, module:function"
    )


def seed_of(*parts: int) -> int:
    """A seed for a generator, well mixed: neighbouring epochs or indices give unrelated ones."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def source_path(config: Config) -> Path:
    """`data.path`, which the source cannot do without."""
    if not config.data.path:
        raise RecipeError(f"data.path: not set; {config.data.source} needs it (--set data.path=...)")
    return Path(config.data.path).expanduser()
