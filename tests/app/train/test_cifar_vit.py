"""The recipe cifar10-vit on a few images that are made up, for one epoch on a CPU, in every pattern it is meant for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import spartan
from spartan.app.train.config import load_recipe
from spartan.app.train.loop import train
from spartan.app.train.setup import build_model, build_sparsifier
from spartan.files import read

SHAPE = (3, 32, 32)
PATTERNS = {"unstructured": 1, "[8,8]": 64, "[16,16]": 256, "[32,32]": 1024}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, random = tmp_path_factory.mktemp("cifar") / "cifar.npz", np.random.default_rng(0)
    parts = {}
    for part, count in (("train", 40), ("test", 20)):
        parts[f"x_{part}"] = random.integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)
        parts[f"y_{part}"] = np.arange(count, dtype=np.uint8) % 10
    np.savez(path, **parts)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("pattern", ["unstructured", "[16,16]"])
def test_end_to_end(pattern: str, images: Path, tmp_path: Path) -> None:
    sets = [f"data.path={images}", f"pattern={pattern}", "epochs=1", "batch_size=8", "device=cpu"]
    config = load_recipe("cifar10-vit", sets)
    summary = train(config, tmp_path / "run", quiet=True)
    assert 0 <= summary["achieved_sparsity"] - 0.9 < (PATTERNS[pattern] + 1) / summary["parameters"]
    assert summary["parameters"] == summary["model_parameters"] == 2_693_578
    weights = read(tmp_path / "run" / "model.safetensors")
    for layer in summary["layers"]:
        assert int((weights[layer["name"]] != 0).sum()) == layer["kept"]
    # The file names its model, which can be had again without the recipe.
    model = spartan.load(tmp_path / "run" / "model.safetensors", kernels="dense")
    assert model(torch.zeros(1, *SHAPE)).shape == (1, 10)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_fit_the_same_layers(pattern: str) -> None:
    config = load_recipe("cifar10-vit", [f"pattern={pattern}"])
    model = build_model(config, 10, SHAPE)
    sparsifier = build_sparsifier(config, model, spartan.Params(), total_steps=10)
    shapes = {"attn.qkv": (576, 192), "attn.proj": (192, 192), "mlp.0": (768, 192), "mlp.2": (192, 768)}
    expected = {f"blocks.{i}.{name}.weight": shape for i in range(6) for name, shape in shapes.items()}
    assert {layer.name: tuple(layer.shape) for layer in sparsifier.layers()} == expected


def test_the_recipe() -> None:
    c = load_recipe("cifar10-vit")
    o = c.optimizer
    assert (c.model, c.epochs, c.batch_size, c.sparsity, c.count, c.pattern) == (
        *("vit-6-192-4", 60, 256, 0.9, "model", "unstructured"),
    )
    assert (o.name, o.lr, o.warmup_epochs, o.weight_decay, o.final_lr) == ("adamw", 5e-4, 5, 0.05, 0.0)
    assert (c.label_smoothing, c.data.pad, c.data.flip, c.amp) == (0.1, 4, True, "bf16")
