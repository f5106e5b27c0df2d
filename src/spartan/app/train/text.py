"""Reads text as bytes, and draws sequences from it on the device."""

import codecs
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spartan.app.train.config import Config, RecipeError
from spartan.app.train.data import Batch, Data, seed_of
from spartan.app.train.processes import Processes

TENTH = 10  # one file in so many is for testing; of a single file, the last such part
# Folders of the standard library that hold no sources of it, or tests, which not every installation has.
NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """A text in two parts, as bytes, and what to record of it."""

    train: bytes
    test: bytes
    facts: dict[str, Any]


class Text(Data):
    """Sequences of `data.context` bytes and, for each, the bytes that come next.

    An epoch has `data.train_size` sequences that begin anywhere in the text, or as many as it has room for; the test
    goes over the other part without gaps, or over `data.test_size` of these sequences, evenly spread.
    """

    unit, task = "sequences", "text"

    def __init__(self, config: Config, device: torch.device, us: Processes) -> None:
        c = config.data
        images_only = {
            "data.randaugment": c.randaugment, "data.pad": c.pad, "data.flip": c.flip, "data.cutout": c.cutout,
            "mixup": config.mixup, "cutmix": config.cutmix, "channels_last": config.channels_last,
        }  # fmt: skip
        for key, value in images_only.items():
            if value:
                raise RecipeError(f"{key}: {value!r} is for images, and data.source is text; leave it out")
        corpus = read_corpus(config)
        self.facts = corpus.facts
        for part, text in (("training", corpus.train), ("test", corpus.test)):
            if len(text) <= c.context:
                raise RecipeError(
                    f"data.path: the {part} part of {corpus.facts['text']} has {len(text):,} bytes, too few for a sequence "
                    f"of {c.context} and the byte after it; give it more text, or set data.context lower"
                )
        windows = (len(corpus.test) - 1) // c.context
        sizes = c.train_size or (len(corpus.train) - 1) // c.context, min(windows, c.test_size or windows)
        super().__init__(config, device, us, 256, (c.context,), sizes)
        self.test_micro = max(self.micro, 64)
        self._train, self._test = (_on(device, text) for text in (corpus.train, corpus.test))
        self._along = torch.arange(c.context + 1, device=device)
        # Whole numbers: where a sequence begins must not depend on how a machine rounds.
        every = [i * windows // sizes[1] * c.context for i in range(sizes[1])]
        self._starts = torch.tensor(every[us.rank :: us.world], dtype=torch.int64, device=device)

    def example(self, device: torch.device) -> Tensor:
        """One sequence, of zeros."""
        return torch.zeros(1, *self.shape, dtype=torch.int64, device=device)

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, from its number `start` on; nothing waits for the device."""
        generator = torch.Generator().manual_seed(seed_of(self.config.seed, epoch))
        last = len(self._train) - len(self._along)
        starts = torch.randint(last + 1, (self.train_size,), generator=generator)
        starts = (starts.pin_memory() if self.device.type == "cuda" else starts).to(self.device, non_blocking=True)
        for i in range(start * self.us.world + self.us.rank, self.micro_batches, self.us.world):
            yield self._cut(self._train, starts[i * self.micro : (i + 1) * self.micro])

    def test(self) -> Iterator[Batch]:
        """Every test sequence of this process's share, once."""
        for starts in self._starts.split(self.test_micro):
            if len(starts):  # there may be more processes than sequences
                yield self._cut(self._test, starts)

    def prompts(self, count: int, length: int) -> Tensor:
        """The beginnings of some test sequences, evenly spread: what a model is to go on from."""
        every = [i * (len(self._test) - length) // count for i in range(count)]
        return torch.stack([self._test[i : i + length].long() for i in every])

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        both = text[starts[:, None] + self._along].long()
        return both[:, :-1], both[:, 1:]


def _on(device: torch.device, text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()).to(device)


def read_corpus(config: Config) -> Corpus:
    """The text that `data.path` names, in a training and a test part; by default the standard library's sources.

    Which file goes where depends on its name alone, so that it stays so when others come or go. A single file is cut
    by position.
    """
    given = config.data.path
    root = Path(given).expanduser() if given else Path(sysconfig.get_paths()["stdlib"])
    files = _files(root, config.data.suffix or ("" if given else ".py"), own=not given)
    texts = {name: _read(path) for name, path in files.items()}
    name = str(given) if given else "the Python standard library"
    if not any(texts.values()):
        raise RecipeError(f"data.path: {name} is empty; text is needed")
    digest = hashlib.sha256()
    for key, text in texts.items():
        digest.update(f"{key}\0{len(text)}\0".encode() + text)
    facts = {"text": name, "files": len(texts), "bytes": sum(map(len, texts.values())), "sha256": digest.hexdigest()}
    if len(texts) == 1:
        (text,) = texts.values()
        cut = len(text) - len(text) // TENTH
        return Corpus(text[:cut], text[cut:], facts)
    numbers = {key: int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") for key in texts}
    tested = {key for key, number in numbers.items() if number % TENTH == 0} or {min(numbers, key=lambda k: numbers[k])}
    if len(tested) == len(texts):
        tested.remove(max(tested, key=lambda key: numbers[key]))
    train, test = (b"\n".join(t for key, t in texts.items() if (key in tested) is part) for part in (False, True))
    return Corpus(train, test, facts)


def _files(root: Path, suffix: str, own: bool) -> dict[str, Path]:
    """The files of a folder by their name in it, in order; or the one that is named."""
    if root.is_file():
        return {root.name: root}
    if not root.is_dir():
        raise RecipeError(f"data.path: there is no file or folder {root}")
    found = sorted(path for path in root.rglob("*") if path.name.endswith(suffix) and path.is_file())
    names = {path.relative_to(root).as_posix(): path for path in found}
    hidden = {name for name in names if any(part.startswith(".") for part in name.split("/"))}
    if own:
        hidden |= {name for name in names if NOT_SOURCES & set(name.split("/"))}
    names = {name: path for name, path in names.items() if name not in hidden}
    if not names:
        ending = f" whose names end in {suffix} (data.suffix)" if suffix else ""
        raise RecipeError(f"data.path: {root} has no files{ending}; text is needed")
    return names


def _read(path: Path) -> bytes:
    """A file's bytes, which must be text in UTF-8."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"data.path: {path} cannot be read: {error.strerror or error}") from None
    pick = "data.suffix picks the files of a folder, such as --set data.suffix=.txt"
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # of UTF-32, too
        raise RecipeError(f"data.path: {path} is in UTF-16 or UTF-32; save it as UTF-8, or leave it out: {pick}")
    zero = text.find(b"\0")
    if zero >= 0:
        raise RecipeError(f"data.path: {path} is no text: byte {zero:,} is zero; {pick}")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"data.path: {path} is not UTF-8 at byte {error.start:,}; save it as UTF-8, or leave it out: {pick}"
        ) from None
    return text
