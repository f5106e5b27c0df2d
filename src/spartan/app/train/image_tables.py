"""Finds large images: ImageFolder trees and WebDataset shards.

Both become a table that says where each image's bytes lie: random access makes the order, an exact resume and any number
of workers a matter of indices. Shards are indexed once, when the run starts.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spartan.app.train.config import Config, RecipeError
from spartan.app.train.data import source_path

IMAGES = {"jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"}
BUFFER = 16384  # samples of consecutive shards that are shuffled together


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


TABLES: dict[str, Callable[[Config], tuple[ImageTable, ImageTable]]] = {
    "imagefolder": _image_folder,
    "webdataset": _web_dataset,
}
