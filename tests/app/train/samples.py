"""Small data sets of every kind, made up for the tests."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from spartan.app.train.config import Config, from_dict
from spartan.app.train.data import Data, build_data
from spartan.app.train.processes import Processes

CPU = torch.device("cpu")
TRAIN, TEST, CLASSES = 22, 7, 3


def config(
    source: str, path: Any = None, batch: int = 4, seed: int = 0, micro: int | None = None, **data: Any
) -> Config:
    section = {"source": source, "path": None if path is None else str(path), "workers": 0, **data}
    return from_dict({"seed": seed, "batch_size": batch, "micro_batch": micro, "data": section})


def build(*args: Any, us: Processes = Processes(), **kwargs: Any) -> Data:  # noqa: B008
    return build_data(config(*args, **kwargs), CPU, us)


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def arrays(side: int = 8, channels: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def images(n: int) -> np.ndarray:
        return random.integers(0, 256, (n, side, side, channels)).astype(np.uint8)

    y_train, y_test = np.arange(TRAIN, dtype=np.uint8) % CLASSES, np.arange(TEST, dtype=np.uint8) % CLASSES
    return {"x_train": images(TRAIN), "y_train": y_train, "x_test": images(TEST), "y_test": y_test}


@pytest.fixture(scope="session")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("npz") / "small.npz"
    np.savez(path, **arrays())  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of several sizes, one of them grey and one a PNG with transparency."""
    root, random = tmp_path_factory.mktemp("folder"), np.random.default_rng(0)
    for part, count in (("train", TRAIN), ("val", TEST)):
        for i in range(count):
            place = root / part / f"class-{i % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (40 + i, 52 - i, 3)).astype(np.uint8)
            mode = {0: "L", 1: "RGBA"}.get(i, "RGB")
            name = f"{i:03}.png" if mode == "RGBA" else f"{i:03}.JPEG"
            Image.fromarray(pixels).convert(mode).save(place / name)
    return root


@pytest.fixture(scope="session")
def shards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder's images in the folder's order, five to a shard."""
    root = tmp_path_factory.mktemp("shards")
    for part in ("train", "val"):
        files = sorted((folder / part).glob("*/*"))
        for start in range(0, len(files), 5):
            with tarfile.open(root / f"{part}-{start // 5:04}.tar", "w") as tar:
                for file in files[start : start + 5]:
                    key = f"samples/{file.parent.name}-{file.stem}"
                    add(tar, f"{key}.json", b"{}")
                    add(tar, f"{key}{file.suffix.lower()}", file.read_bytes())
                    add(tar, f"{key}.cls", file.parent.name[-1].encode())
    return root


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
