import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from spartan.app.train.config import RecipeError
from spartan.app.train.data import Data
from spartan.app.train.large_images import LargeImages, braces
from spartan.app.train.processes import Processes
from tests.app.train.samples import CLASSES, TEST, TRAIN, add, arrays, build, folder, npz, same, shards

__all__ = ["folder", "npz", "shards"]  # fixtures

# Python 3.12 warns of forks beside threads; torch's loaders fork.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def make(kind: str, request: pytest.FixtureRequest, **more: Any) -> Data:
    if kind == "digits":
        return build("digits", batch=200, micro=100, pad=1, flip=True, cutout=2, **more)
    if kind == "npz":
        return build("npz", request.getfixturevalue("npz"), micro=2, pad=2, flip=True, cutout=3, **more)
    path = request.getfixturevalue({"imagefolder": "folder", "webdataset": "shards"}[kind])
    return build(kind, path, micro=2, image_size=16, randaugment=[2, 9], **more)


# ---------------------------------------------------------------------- what every source promises


@pytest.mark.parametrize("kind", ["digits", "npz", "imagefolder", "webdataset"])
def test_batches_and_exact_resume(kind: str, request: pytest.FixtureRequest) -> None:
    data = make(kind, request)
    state = torch.get_rng_state()
    whole = list(data.train(3))
    assert len(whole) == data.micro_batches == data.train_size // data.config.batch_size * 2
    for x, y in whole:
        assert x.shape == (data.micro, *data.shape)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert 0 <= int(y.min()) <= int(y.max()) < data.classes
    for start in (0, 1, 3, len(whole)):
        assert same(list(data.train(3, start=start)), whole[start:])
    assert same(list(make(kind, request).train(3)), whole)
    assert not same(list(data.train(4)), whole)
    assert not same(list(make(kind, request, seed=1).train(3)), whole)
    tests = list(data.test())
    assert sum(len(y) for _, y in tests) == data.test_size
    assert same(list(data.test()), tests)
    assert torch.equal(torch.get_rng_state(), state)  # the model's randomness is its own


@pytest.mark.parametrize("kind", ["imagefolder", "webdataset"])
def test_workers_change_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    alone, data = make(kind, request), make(kind, request, workers=2)
    state = torch.get_rng_state()
    assert same(list(data.train(0)), list(alone.train(0)))
    assert same(list(data.test()), list(alone.test()))
    passing = data.train(1)
    next(passing)  # left in the middle: the next pass must not see the rest of it
    assert same(list(data.train(1, start=2)), list(alone.train(1, start=2)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["digits", "npz", "imagefolder", "webdataset"])
def test_processes_share_one_order(kind: str, request: pytest.FixtureRequest) -> None:
    alone = make(kind, request)  # two micro-batches a step: one for each process
    whole, tests = list(alone.train(3)), [torch.cat(part) for part in zip(*alone.test(), strict=True)]
    for world in (1, 2):
        shares = [make(kind, request, us=Processes(rank, world)) for rank in range(world)]
        assert {data.micro for data in shares} == {alone.micro}
        for rank, data in enumerate(shares):
            assert same(list(data.train(3)), whole[rank::world])
            assert same(list(data.train(3, start=2)), whole[rank::world][2:])
            mine = [torch.cat(part) for part in zip(*data.test(), strict=True)]
            assert all(torch.equal(a, b[rank::world]) for a, b in zip(mine, tests, strict=True))


def test_more_processes_than_test_images(npz: Path, folder: Path) -> None:
    for source, path in (("npz", npz), ("imagefolder", folder)):
        shares = [build(source, path, us=Processes(rank, 2 * TEST), batch=2 * TEST, image_size=8) for rank in (0, TEST)]
        assert [sum(len(y) for _, y in data.test()) for data in shares] == [1, 0]


def test_an_epoch_shows_every_image_once(npz: Path, folder: Path, shards: Path) -> None:
    data = build("npz", npz, batch=2)
    stored = sorted((arrays()["x_train"].astype(int)).sum((1, 2, 3)).tolist())
    seen = [((x - data.shift) / data.scale).sum((1, 2, 3)) for x, _ in data.train(5)]  # type: ignore[attr-defined]
    assert sorted(torch.cat(seen).round().int().tolist()) == stored
    for source, path in (("imagefolder", folder), ("webdataset", shards)):
        large = build(source, path, image_size=8)
        assert isinstance(large, LargeImages)
        orders = [large._table.order(0, epoch) for epoch in range(3)]
        assert all(sorted(order.tolist()) == list(range(TRAIN)) for order in orders)
        assert not (orders[0] == orders[1]).all()


def test_labels_stay_with_their_images(npz: Path) -> None:
    data, stored = build("npz", npz, batch=2), arrays()
    label = {int(x.astype(int).sum()): int(y) for x, y in zip(stored["x_train"], stored["y_train"], strict=True)}
    for x, y in data.train(0):
        sums = ((x - data.shift) / data.scale).sum((1, 2, 3)).round().int()  # type: ignore[attr-defined]
        assert [label[s] for s in sums.tolist()] == y.tolist()


# ---------------------------------------------------------------------- large images


def test_shards_and_folders_give_the_same_samples(folder: Path, shards: Path) -> None:
    a = build("imagefolder", folder, image_size=16, randaugment=[2, 9])
    b = build("webdataset", shards, image_size=16, randaugment=[2, 9])
    assert (a.classes, a.shape, a.train_size, a.test_size) == (b.classes, b.shape, b.train_size, b.test_size)
    assert (a.classes, a.shape, a.train_size, a.test_size) == (CLASSES, (3, 16, 16), TRAIN, TEST)
    assert same(list(a.test()), list(b.test()))
    images = [data._train_loader.dataset for data in (a, b)]  # type: ignore[attr-defined]
    for index in range(TRAIN):
        (x, y), (u, v) = images[0][(2, index)], images[1][(2, index)]
        assert y == v
        assert torch.equal(x, u)
        assert x.dtype == torch.uint8
    assert not torch.equal(images[0][(2, 5)][0], images[0][(3, 5)][0])


def test_test_images_are_resized_and_cut_in_the_middle(tmp_path: Path) -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, 32:] = (255, 0, 0)
    for part in ("train", "val"):
        (tmp_path / part / "only").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / part / "only" / "x.png")
    x, y = next(build("imagefolder", tmp_path, batch=1, image_size=56).test())
    assert y.tolist() == [0]
    mean, std = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    shown = torch.from_numpy(pixels)[4:60, 4:60].permute(2, 0, 1) / 255  # 56 · 256 / 224 = 64: no resizing
    assert torch.allclose(x[0], (shown - mean) / std, atol=1e-5)


def test_shards_by_pattern_and_by_folder(shards: Path, tmp_path: Path) -> None:
    whole = list(build("webdataset", shards, image_size=8).test())
    for pattern in ("{train,val}-*.tar", "{train-000{0..4},val-000{0..1}}.tar", "*-{0000..0004}.tar"):
        data = build("webdataset", shards / pattern, image_size=8)
        assert data.train_size == TRAIN
        assert same(list(data.test()), whole)
    assert build("webdataset", shards / "{train-0000,val-0000}.tar", classes=3).train_size == 5
    for file in shards.glob("*.tar"):
        part = "training" if file.name.startswith("train") else "validation"
        (tmp_path / part).mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / part / file.name.partition("-")[2])
    assert same(list(build("webdataset", tmp_path, image_size=8).test()), whole)
    counts: dict[str, Any] = {"train_size": TRAIN, "test_size": TEST, "classes": 5}
    assert build("webdataset", shards, image_size=8, **counts).classes == 5
    assert braces("a{08..11}{x,}") == [f"a{n}{x}" for n in ("08", "09", "10", "11") for x in ("x", "")]


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("kind", ["digits", "npz", "imagefolder", "webdataset"])
def test_a_batch_larger_than_the_data(kind: str, npz: Path, folder: Path, shards: Path) -> None:
    path = {"npz": npz, "imagefolder": folder, "webdataset": shards}.get(kind)
    with pytest.raises(RecipeError, match="batch_size: 5000 is larger than the training set of"):
        build(kind, path, batch=5000)


@pytest.mark.parametrize(
    ("source", "path", "says"),
    [
        ("digit", None, r"data.source: 'digit' is unknown \(did you mean digits\?\)"),
        ("npz", None, "data.path: not set; npz needs it"),
        ("npz", "none.npz", "data.path: there is no file .*none.npz"),
        ("torchvision/MNIST", None, "data.path: not set; torchvision/MNIST needs it"),
        ("torchvision/CIFAR10", "none.npz", "data.path: there is no file .*none.npz"),
        ("imagefolder", None, "data.path: not set; imagefolder needs it"),
        ("imagefolder", "none", "data.path: .*none has no folder train/"),
        ("webdataset", "none", "data.path: .*none matches no .tar file"),
        ("webdataset", "train-{0..3}.tar", "matches no .tar file"),
        ("webdataset", "train-{0..3.tar", "the braces in .* do not match"),
        ("no_such_module:load", None, "data.source: cannot import 'no_such_module'"),
        ("math:load", None, "data.source: 'math' has no function 'load'"),
    ],
)
def test_missing_sources(source: str, path: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=says):
        build(source, None if path is None else tmp_path / path)


def test_settings_that_do_not_fit(npz: Path, folder: Path, shards: Path) -> None:
    cases: list[tuple[str, Path, dict[str, Any], str]] = [
        ("npz", npz, {"pad": 8}, "data.pad: 8 must be smaller than the images"),
        ("npz", npz, {"cutout": 8}, "data.cutout: 8 must be smaller than the images"),
        ("npz", npz, {"classes": 2}, "data.classes: 2 is too few; the labels go up to 2"),
        ("npz", npz, {"randaugment": [2, 9]}, "data.randaugment: only large images"),
        ("imagefolder", folder, {"pad": 4}, "data.pad: 4 is for small images only"),
        ("imagefolder", folder, {"randaugment": [2, 31]}, "data.randaugment: .* must be"),
        ("webdataset", shards, {"train_size": 5}, "data.train_size: 5 samples expected, but .* holds 22"),
        ("webdataset", shards, {"classes": 2}, "data.classes: 2 is too few"),
    ]
    for source, path, data, says in cases:
        with pytest.raises(RecipeError, match=says):
            build(source, path, **data)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named(workers: int, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "val" / "class-0" / "bad.jpg").write_bytes(b"no image")
    data = build("imagefolder", tmp_path, image_size=8, workers=workers)
    with pytest.raises(RecipeError, match=r"^data.path: an image in .*bad.jpg cannot be read [^\n]*$"):
        list(data.test())


def test_damaged_trees_and_shards(folder: Path, shards: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "tree")
    (tmp_path / "tree" / "val" / "images").mkdir()
    with pytest.raises(RecipeError, match="has val/images/, but no train/images/"):
        build("imagefolder", tmp_path / "tree")
    shutil.copytree(shards, tmp_path / "shards")
    bad = tmp_path / "shards" / "train-0009.tar"
    for content, says in (
        ([("a.jpg", b"x")], "sample a in .*train-0009.tar has no label"),
        ([("a.cls", b"1"), ("b.jpg", b"x"), ("b.cls", b"1")], "sample a in .* has no image"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], "cannot be read as an uncompressed tar of samples"),
    ):
        with tarfile.open(bad, "w") as tar:
            for name, data in content:
                add(tar, name, data)
        with pytest.raises(RecipeError, match=says):
            build("webdataset", tmp_path / "shards")
    bad.write_bytes(b"no tar" * 100)
    with pytest.raises(RecipeError, match="train-0009.tar cannot be read as an uncompressed tar"):
        build("webdataset", tmp_path / "shards")
    with pytest.raises(RecipeError, match="has no shards for val"):
        build("webdataset", shards / "train-*.tar")
