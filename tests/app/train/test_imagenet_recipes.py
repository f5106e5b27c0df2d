"""Every ImageNet recipe runs end to end on generated images, narrow and small, from a folder tree and from shards."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spartan.app.train.config import load_recipe
from spartan.app.train.loop import train
from spartan.files import read

CLASSES, TRAIN, TEST = 10, 160, 40
# Reduced width and depth, by settings alone.
RECIPES = {
    "resnet50-imagenet": "resnet",
    "resnet50-imagenet-flops": "resnet",
    "resnet50-imagenet-nm": "resnet",
    "vitb16-imagenet": "vit",
    "vitb16-imagenet-block16": "vit",
    "vitb16-imagenet-block32": "vit",
}


def jpeg(label: int, i: int) -> bytes:
    """A coloured picture whose hue tells its class."""
    rng = np.random.default_rng(1000 * label + i)
    pixels = rng.integers(0, 60, (48, 56, 3)) + np.array([20 * label, 190 - 19 * label, 100])
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tree, shards = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("shards")
    for split, count in (("train", TRAIN), ("val", TEST)):
        samples = [(i % CLASSES, i) for i in range(count)]
        for label, i in samples:
            path = tree / split / f"class{label:02d}" / f"{i:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(label, i))
        for shard in range(2):
            with tarfile.open(shards / f"{split}-{shard:04d}.tar", "w") as tar:
                for label, i in samples[shard::2]:
                    for suffix, data in (("jpg", jpeg(label, i)), ("cls", str(label).encode())):
                        info = tarfile.TarInfo(f"{i:05d}.{suffix}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
    return {"imagefolder": tree, "webdataset": shards}


@pytest.mark.parametrize("source", ["imagefolder", "webdataset"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_end_to_end(recipe: str, source: str, images: dict[str, Path], tmp_path: Path) -> None:
    config = load_recipe(
        recipe,
        [
            f"data.source={source}",
            f"data.path={images[source]}",
            "data.image_size=32",
            "data.workers=0",
            "epochs=2",
            "batch_size=80",
            "micro_batch=40",
            "optimizer.lr=0.01",
            "optimizer.warmup_epochs=1",
            "checkpoint_steps=0",
            f"model=tests.app.train.small_models:{RECIPES[recipe]}",
        ],
    )
    summary = train(config, tmp_path / "run", quiet=True)
    weights = read(tmp_path / "run" / "model.safetensors")
    for layer in summary["layers"]:
        assert int((weights[layer["name"]] != 0).sum()) == layer["kept"]
    if config.cost == "params":
        largest_unit = 1 if isinstance(config.pattern, str) else config.pattern[0] * config.pattern[1]
        assert 0 <= summary["achieved_sparsity"] - config.sparsity < (largest_unit + 1) / summary["parameters"]
    else:
        weighted = [(x["flops"], x["sparse_flops"]) for x in summary["layers"]]
        assert sum(b for _, b in weighted) <= (1 - config.sparsity) * sum(a for a, _ in weighted) * (1 + 1e-9)
    record = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in record if x["kind"] == "step"] == [1, 2, 3, 4]
    if not isinstance(config.pattern, str):
        beta = [x["beta"] for x in record if x["kind"] == "epoch"][-1]
        assert beta == pytest.approx(20 * config.pattern[0])
