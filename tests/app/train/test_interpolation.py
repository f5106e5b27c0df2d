"""How large images are resized: crops, test images and RandAugment follow `data.interpolation`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from spartan.app.train.config import RecipeError, load_recipe
from spartan.app.train.data import seed_of
from spartan.zoo import torchvision
from tests.app.train.samples import TRAIN, build, config, folder

__all__ = ["folder"]  # a fixture

SIZE = 28  # 32 before the cut in the middle
MODES = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def images(folder: Path, part: str, **data: Any) -> Any:
    """The uint8 images of a part, by (epoch, index), before they are scaled."""
    loader = getattr(build("imagefolder", folder, image_size=SIZE, **data), f"_{part}_loader")
    return loader.dataset


def opened(folder: Path, part: str) -> list[Image.Image]:
    return [Image.open(path).convert("RGB") for path in sorted((folder / part).glob("*/*"))]


def as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("mode", MODES)
def test_test_images_are_resized_as_pillow_does(mode: str, folder: Path) -> None:
    found = images(folder, "test", interpolation=mode)
    for index, image in enumerate(opened(folder, "val")):
        width, height = image.size
        short = min(width, height)
        resized = image.resize((32 * width // short, 32 * height // short), MODES[mode])
        # torchvision rounds the corner of the middle to even
        left, top = round((resized.width - SIZE) / 2), round((resized.height - SIZE) / 2)
        expected = as_tensor(resized.crop((left, top, left + SIZE, top + SIZE)))
        assert torch.equal(found[(0, index)][0], expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("randaugment", [None, (2, 9)])
def test_training_images_are_torchvisions(mode: str, randaugment: tuple[int, int] | None, folder: Path) -> None:
    torchvision()
    v2 = importlib.import_module("torchvision.transforms.v2")
    how = v2.InterpolationMode(mode)
    steps = [v2.RandomResizedCrop(SIZE, interpolation=how), v2.RandomHorizontalFlip()]
    steps += [v2.RandAugment(*randaugment, interpolation=how)] if randaugment else []
    found = images(folder, "train", interpolation=mode, randaugment=randaugment)
    for index, image in enumerate(opened(folder, "train")):
        torch.manual_seed(seed_of(0, 1, index))
        assert torch.equal(found[(1, index)][0], as_tensor(v2.Compose(steps)(image)))


@pytest.mark.parametrize("part", ["train", "test"])
def test_the_two_differ(part: str, folder: Path) -> None:
    linear, cubic = (images(folder, part, interpolation=mode) for mode in MODES)
    assert not torch.equal(linear[(0, 3)][0], cubic[(0, 3)][0])
    assert linear[(0, 3)][0].shape == cubic[(0, 3)][0].shape


def test_randaugment_alone_follows_it() -> None:
    """A picture that a crop leaves as it is shows what RandAugment does to it: operations that move its pixels."""
    from spartan.app.train import large_images

    steps = [large_images._transform(SIZE, (2, 9), mode, True).transforms[2] for mode in MODES]  # type: ignore[attr-defined]
    assert [step.interpolation.value for step in steps] == list(MODES)
    pixels = torch.arange(3 * SIZE * SIZE, dtype=torch.uint8).reshape(SIZE, SIZE, 3)
    image, moved = Image.fromarray(pixels.numpy()), 0
    for seed in range(TRAIN):
        both = []
        for step in steps:
            torch.manual_seed(seed)
            both.append(as_tensor(step(image)))
        moved += not torch.equal(*both)
    assert moved > 0


def test_the_papers_recipes_are_bicubic_as_the_authors_code() -> None:
    papers = ["resnet50-imagenet", "resnet50-imagenet-flops"]
    papers += [f"vitb16-imagenet{blocks}" for blocks in ("", "-block16", "-block32")]
    assert {load_recipe(name).data.interpolation for name in papers} == {"bicubic"}
    assert load_recipe("tiny-imagenet-vit").data.interpolation == "bilinear"
    assert load_recipe("resnet50-imagenet", ["data.interpolation=bilinear"]).data.interpolation == "bilinear"


def test_mistakes() -> None:
    with pytest.raises(RecipeError, match=r"data.interpolation: 'cubic' is not accepted.*accepted: bilinear, bicubic"):
        config("imagefolder", interpolation="cubic")
