import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spartan.app.train.config import RecipeError
from spartan.app.train.data import Data
from tests.app.train.samples import CLASSES, TEST, TRAIN, arrays, build, npz, same

__all__ = ["npz"]  # a fixture


def numbered(tmp_path: Path, side: int = 5, count: int = 64, **data: Any) -> tuple[Data, Iterator[Tensor]]:
    """All images are the same, pixel (r, c) being 10 r + c; what comes back is in those units."""
    image = (10 * np.arange(side)[:, None] + np.arange(side)).astype(np.uint8)
    x, y = np.tile(image, (count, 1, 1)), np.arange(count) % 2
    np.savez(tmp_path / "numbered.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    built: Any = build("npz", tmp_path / "numbered.npz", batch=count, **data)
    return built, (((x - built.shift) / built.scale)[:, 0].round().int() for x, _ in built.train(0))


def test_crops_show_the_reflected_border(tmp_path: Path) -> None:
    _, batches = numbered(tmp_path, pad=2)
    image = 10 * np.arange(5)[:, None] + np.arange(5)
    padded = np.pad(image, 2, mode="reflect")
    crops = {padded[r : r + 5, c : c + 5].tobytes(): (r, c) for r in range(5) for c in range(5)}
    seen = {crops[x.long().numpy().tobytes()] for x in next(batches)}
    assert len(seen) > 15  # of 25, from 64 draws


def test_flips_mirror_half_of_the_images(tmp_path: Path) -> None:
    _, batches = numbered(tmp_path, flip=True)
    image = (10 * torch.arange(5)[:, None] + torch.arange(5)).int()
    flipped = [torch.equal(x, image.flip(1)) for x in next(batches)]
    assert all(f or torch.equal(x, image) for f, x in zip(flipped, next(numbered(tmp_path, flip=True)[1]), strict=True))
    assert 20 < sum(flipped) < 44


def test_cutout_fills_a_square_with_the_mean(tmp_path: Path) -> None:
    data, _ = numbered(tmp_path, side=8, cutout=3)
    x, _ = next(data.train(0))
    holes = x[:, 0] == 0  # no pixel is the mean, 38.5
    rows, columns = holes.any(2), holes.any(1)
    assert torch.equal(holes, rows[:, :, None] & columns[:, None, :])
    assert {int(n) for n in rows.sum(1)} == {int(n) for n in columns.sum(1)} == {2, 3}  # 2 where it sticks out
    inside = rows[:, 1:-1].any(1) & (rows.sum(1) == 3) & (columns.sum(1) == 3)
    assert (holes[inside].sum((1, 2)) == 9).all()
    assert (rows.sum(0) > 0).all()  # every row is covered now and then


def test_images_are_normalised_by_the_training_set(npz: Path) -> None:
    data, stored = build("npz", npz, batch=TRAIN, pad=0), arrays()
    x = next(data.train(0))[0]
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)
    mean, std = stored["x_train"].mean((0, 1, 2)), stored["x_train"].std((0, 1, 2))
    expected = torch.from_numpy(((stored["x_test"] - mean) / std).transpose(0, 3, 1, 2)).float()
    assert torch.allclose(torch.cat([x for x, _ in data.test()]), expected, atol=1e-5)


def test_digits_have_a_fixed_split() -> None:
    a, b = build("digits", batch=64), build("digits", batch=64, seed=5)
    assert (a.classes, a.shape, a.train_size, a.test_size) == (10, (1, 8, 8), 1437, 360)
    assert same(list(a.test()), list(b.test()))
    labels = torch.cat([y for _, y in a.test()])
    assert torch.bincount(labels).min() >= 34


def test_floats_and_single_channels(tmp_path: Path) -> None:
    plain = {k: v for k, v in arrays(channels=1).items() if k[0] == "y"}
    grey = {k: v[..., 0] for k, v in arrays(channels=1).items() if k[0] == "x"}
    np.savez(tmp_path / "grey.npz", **plain, **grey)  # type: ignore[arg-type]
    floats = {k: (v[:, None] / 255).astype(np.float64) for k, v in grey.items()}
    np.savez(tmp_path / "floats.npz", **plain, **floats)  # type: ignore[arg-type]
    a, b = build("npz", tmp_path / "grey.npz", pad=1), build("npz", tmp_path / "floats.npz", pad=1)
    assert a.shape == b.shape == (1, 8, 8)
    for (x, y), (u, v) in zip(a.train(0), b.train(0), strict=True):
        assert torch.allclose(x, u, atol=1e-4)
        assert torch.equal(y, v)


def test_a_constant_channel_is_no_division_by_zero(tmp_path: Path) -> None:
    stored = arrays()
    stored["x_train"][..., 1] = 7
    np.savez(tmp_path / "x.npz", **stored)  # type: ignore[arg-type]
    assert all(x.isfinite().all() for x, _ in build("npz", tmp_path / "x.npz").train(0))


def test_torchvision_sets(tmp_path: Path, npz: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    stored = arrays(channels=1)
    for part, name in (("train", "train"), ("test", "t10k")):
        x, y = stored[f"x_{part}"], stored[f"y_{part}"]
        (raw / f"{name}-images-idx3-ubyte").write_bytes(np.array([2051, len(x), 8, 8], ">i4").tobytes() + x.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(np.array([2049, len(y)], ">i4").tobytes() + y.tobytes())
    data = build("torchvision/FashionMNIST", tmp_path, pad=1, flip=True)
    assert (data.shape, data.train_size, data.test_size, data.classes) == ((1, 8, 8), TRAIN, TEST, CLASSES)
    assert torch.equal(torch.cat([y for _, y in data.test()]), torch.from_numpy(stored["y_test"]).long())
    # an .npz in its place
    assert build("torchvision/CIFAR10", npz).train_size == TRAIN
    with pytest.raises(RecipeError, match=r"data.path: CIFAR10 could not be loaded from .*data.download=true"):
        build("torchvision/CIFAR10", tmp_path)
    with pytest.raises(RecipeError, match=r"torchvision/CIFAR11 is unknown \(did you mean CIFAR10.*imagefolder"):
        build("torchvision/CIFAR11", tmp_path)


def test_ones_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, npz: Path) -> None:
    (tmp_path / "my_own_data.py").write_text(
        f"import numpy, torch\nstored = numpy.load({str(npz)!r})\n"
        "def tensors(): return [torch.from_numpy(stored[k]) for k in ('x_train', 'y_train', 'x_test', 'y_test')]\n"
        "def two(): return tensors()[:2]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert same(list(build("my_own_data:tensors", pad=2).train(1)), list(build("npz", npz, pad=2).train(1)))
    with pytest.raises(RecipeError, match="data.source: my_own_data:two must return x_train, y_train, x_test, y_test"):
        build("my_own_data:two")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y_test": None}, "lacks y_test; it must have x_train, y_train, x_test, y_test"),
        ({"x_train": np.zeros((TRAIN, 8, 8, 3), np.int64)}, r"x_train is int64 \[22, 8, 8, 3\]; accepted: uint8"),
        ({"x_train": np.zeros((TRAIN, 192), np.uint8)}, r"x_train is uint8 \[22, 192\]; accepted"),
        ({"x_train": np.zeros((TRAIN, 3, 32, 32), np.uint8)}, "would be 32 channels"),
        ({"x_train": np.full((TRAIN, 3, 8, 8), np.nan)}, "x_train has values that are not finite"),
        ({"x_train": np.zeros((TRAIN, 9, 9, 3), np.uint8)}, "x_train and x_test differ"),
        ({"x_train": np.zeros((0, 8, 8, 3), np.uint8), "y_train": np.zeros(0, int)}, "has no training images"),
        ({"y_train": np.zeros(3, np.int64)}, "y_train has 3 labels for 22 images"),
        ({"y_train": np.zeros(TRAIN)}, "y_train is float64 .*labels must be whole numbers"),
        ({"y_train": np.full(TRAIN, -1)}, "y_train has negative labels"),
        ({"y_train": np.array(["a"] * TRAIN)}, "y_train is no array of numbers"),
    ],
)
def test_bad_arrays(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    stored = {k: v for k, v in {**arrays(), **change}.items() if v is not None}
    np.savez(tmp_path / "bad.npz", **stored)
    with pytest.raises(RecipeError, match=says):
        build("npz", tmp_path / "bad.npz")


def test_files_that_are_no_archives(tmp_path: Path, npz: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "cut.npz").write_bytes(npz.read_bytes()[:-200])
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    for name in ("text", "cut", "one"):
        with pytest.raises(RecipeError, match="data.path: .* (cannot be read as an .npz of arrays|lacks x_train)"):
            build("npz", tmp_path / f"{name}.npz")
