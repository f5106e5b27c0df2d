"""Reads large images from ImageFolder trees and WebDataset shards; worker processes decode and augment them.

Both become a table that says where each image's bytes lie: random access makes the order, an exact resume and any
number of workers a matter of indices. Shards are indexed once, when the run starts.
"""

import functools
import glob
import importlib
import io
import itertools
import os
import re
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from spartan import zoo
from spartan.app.train.config import Config, RecipeError, blaming_the_recipe
from spartan.app.train.data import Batch, Data, seed_of, source_path
from spartan.app.train.processes import Processes

IMAGES = {"jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"}
BUFFER = 16384  # samples of consecutive shards that are shuffled together
# ImageNet's, for pixels from 0 to 255
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Key = tuple[int, int]
Sample = tuple[Tensor, int]
Loader = DataLoader[Sample | RecipeError]


@dataclass(frozen=True)
class ImageTable:
    """Where each image is: a file, an offset into it and a length (−1: all of it), and its label.

    Arrays rather than lists of objects: worker processes share their memory.
    """

    files: np.ndarray  # bytes [files]
    file: np.ndarray  # [n], ascending
    offset: np.ndarray
    size: np.ndarray
    label: np.ndarray
    classes: int

    def __len__(self) -> int:
        return len(self.file)

    def name(self, index: int) -> str:
        """The file that image `index` is in."""
        return os.fsdecode(bytes(self.files[self.file[index]]))

    def read(self, index: int) -> bytes:
        """The encoded image."""
        with open(self.name(index), "rb") as file:
            file.seek(int(self.offset[index]))
            return file.read(int(self.size[index]))

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """An epoch's order: the files shuffled, then all images within a buffer, so that shards are read nearly in turn.

        A folder's files hold one image each: theirs is a plain permutation.
        """
        random = np.random.default_rng([seed, epoch])
        if len(self.files) == len(self):
            return random.permutation(len(self))
        place = random.permutation(len(self.files))[self.file]
        order = np.argsort(place, kind="stable")
        for start in range(0, len(order), BUFFER):
            random.shuffle(order[start : start + BUFFER])
        return order


def _image_folder(config: Config) -> tuple[ImageTable, ImageTable]:
    """path/train/CLASS/**/image and path/val/CLASS/**/image; classes count in the order of their names."""
    root = source_path(config)
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise RecipeError(f"data.path: {root} has no folder {part}/; imagefolder needs train/CLASS/ and val/CLASS/")
    classes = sorted(entry.name for entry in os.scandir(root / "train") if entry.is_dir())
    if not classes:
        raise RecipeError(f"data.path: {root / 'train'} has no class folders")
    strange = {entry.name for entry in os.scandir(root / "val") if entry.is_dir()} - set(classes)
    if strange:
        raise RecipeError(f"data.path: {root} has val/{min(strange)}/, but no train/{min(strange)}/")
    return _table_of_folder(root / "train", classes), _table_of_folder(root / "val", classes)


def _table_of_folder(root: Path, classes: Sequence[str]) -> ImageTable:
    files: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = [
            os.path.join(folder, file)
            for folder, _, names in os.walk(root / name, followlinks=True)
            for file in names
            if file.rpartition(".")[2].lower() in IMAGES
        ]
        files += map(os.fsencode, sorted(found))
        labels += [label] * len(found)
    start, whole = np.zeros(len(files), np.int64), np.full(len(files), -1, np.int64)
    return ImageTable(np.array(files), np.arange(len(files)), start, whole, np.array(labels, np.int64), len(classes))


def _web_dataset(config: Config) -> tuple[ImageTable, ImageTable]:
    """Tar shards in the WebDataset layout: KEY.jpg (or png, ...) and KEY.cls, a number, next to each other.

    `data.path` is a folder (its *.tar and those one folder down), or a pattern with braces and wildcards, such as
    shards/imagenet-{train,val}-{0000..0099}.tar. A shard is for training if a part of its name starts with "train", for
    testing if one starts with "val" (parts lie between -, _ and .); where the name has neither, its folder's decides.
    """
    path = source_path(config)
    inside = [f"{glob.escape(str(path))}/{inner}.tar" for inner in ("*", "*/*")]
    patterns = inside if path.is_dir() else braces(str(path))
    found = sorted({file for pattern in patterns for file in glob.glob(pattern) if os.path.isfile(file)})
    if not found:
        raise RecipeError(f"data.path: {path} matches no .tar file; give a folder or a pattern of shards")
    shards: dict[str, list[str]] = {"train": [], "val": []}
    for file in found:
        names = (os.path.basename(name) for name in (file, os.path.dirname(os.path.abspath(file))))
        parts = (match[1] for name in names if (match := re.search(r"(?:^|[-_.])(train|val)", name)))
        shards.get(next(parts, ""), []).append(file)
    for part, files in shards.items():
        if not files:
            raise RecipeError(f"data.path: {path} has no shards for {part}: names (or folders) must start with {part}")
    return _table_of_shards(shards["train"]), _table_of_shards(shards["val"])


def braces(pattern: str) -> list[str]:
    """Braces written out, as shells do: {a,b} and {000..012}."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        if "{" in pattern or "}" in pattern:
            raise RecipeError(f"data.path: the braces in {pattern!r} do not match")
        return [pattern]
    inner = match[1].split(",")
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        low, high = sorted(map(int, span.groups()))
        inner = [str(i).zfill(len(span[1])) for i in range(low, high + 1)]
    return [out for text in inner for out in braces(pattern[: match.start()] + text + pattern[match.end() :])]


def _table_of_shards(shards: Sequence[str]) -> ImageTable:
    rows = [(i, *row) for i, shard in enumerate(shards) for row in _members(shard)]
    file, offset, size, label = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    classes = int(label.max()) + 1 if len(label) else 0
    return ImageTable(np.array([os.fsencode(shard) for shard in shards]), file, offset, size, label, classes)


def _members(shard: str) -> Iterator[tuple[int, int, int]]:
    """Offset, size and label of every sample of a shard; files that are neither image nor label are passed over."""
    try:
        with tarfile.open(shard, "r:") as tar:
            files = (member for member in tar if member.isreg() and _split(member)[1])
            for (folder, key), members in itertools.groupby(files, lambda member: _split(member)[:2]):
                image: tuple[int, int] | None = None
                label = -1
                for member in members:
                    extension = _split(member)[2]
                    if extension.lower() in IMAGES:
                        image = (member.offset_data, member.size)
                    elif extension == "cls":
                        content = tar.extractfile(member)
                        label = int(content.read()) if content else -1
                if image is None or label < 0:
                    lack = "image" if image is None else "label (.cls, a number from 0 on)"
                    raise RecipeError(f"data.path: sample {folder}{key} in {shard} has no {lack}")
                yield (*image, label)
    except RecipeError:
        raise
    except (tarfile.TarError, OSError, ValueError) as error:
        raise RecipeError(f"data.path: {shard} cannot be read as an uncompressed tar of samples ({error})") from None


def _split(member: tarfile.TarInfo) -> tuple[str, str, str]:
    """Folder (with its slash), key and extension of a file's name."""
    folder, slash, base = member.name.rpartition("/")
    key, _, extension = base.partition(".")
    return folder + slash, key, extension


TABLES = {"imagefolder": _image_folder, "webdataset": _web_dataset}


class Images(Dataset[Sample | RecipeError]):
    """Decoded uint8 images [3, H, W] and labels by (epoch, index); an image's augmentation depends on nothing else.

    What cannot be decoded is an error to hand on, not to raise: raised in a worker it would come with a traceback.
    """

    def __init__(self, table: ImageTable, config: Config, train: bool) -> None:
        self.table, self.seed, self.train = table, config.seed, train
        self.size, self.randaugment = config.data.image_size, config.data.randaugment
        self.interpolation = config.data.interpolation

    def __getitem__(self, key: Key) -> Sample | RecipeError:
        from PIL import Image, UnidentifiedImageError

        epoch, index = key
        try:
            with Image.open(io.BytesIO(self.table.read(index))) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files
            reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
            return RecipeError(f"data.path: an image in {self.table.name(index)} cannot be read ({reason})")
        transform = _transform(self.size, self.randaugment, self.interpolation, self.train)
        with torch.random.fork_rng(devices=[]):
            # The CPU's generator alone; `torch.manual_seed` would reseed the GPU's as well.
            torch.default_generator.manual_seed(seed_of(self.seed, epoch, index))
            return transform(image), int(self.table.label[index])


@functools.cache
def _transform(
    size: int, randaugment: tuple[int, int] | None, interpolation: str, train: bool
) -> Callable[[Any], Tensor]:
    """Made in the process that uses it: a worker must be able to import torchvision by itself."""
    zoo.torchvision()
    v2 = importlib.import_module("torchvision.transforms.v2")
    mode = v2.InterpolationMode(interpolation)
    if train:
        steps = [v2.RandomResizedCrop(size, interpolation=mode), v2.RandomHorizontalFlip()]
        steps += [v2.RandAugment(*randaugment, interpolation=mode)] if randaugment else []
    else:
        steps = [v2.Resize(round(size * 256 / 224), interpolation=mode), v2.CenterCrop(size)]
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
        for key in ("pad", "cutout"):
            if value := getattr(config.data, key):
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
