"""Recipes: every built-in one reads and round-trips; every mistake is one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import spartan
from spartan import NM, Block, Channel, Heads, Unstructured
from spartan.app.train.config import Config, RecipeError, from_dict, load_recipe, recipe_names, to_yaml
from spartan.app.train.loop import Trainer, train
from spartan.app.train.setup import lr_at
from spartan.files import read
from spartan.problem.patterns import Pattern, read_pattern
from spartan.zoo import digits_cnn

NAMES = [
    "bytes-gpt",
    "bytes-gpt-finetune",
    "cifar10-resnet18",
    "cifar10-vit",
    "cifar10-wrn22",
    "cifar100-resnet18-flops",
    "cifar100-wrn22",
    "digits",
    "fashion-mnist",
    "resnet50-imagenet",
    "resnet50-imagenet-flops",
    "resnet50-imagenet-nm",
    "tiny-imagenet-resnet18",
    "tiny-imagenet-vit",
    "vitb16-imagenet",
    "vitb16-imagenet-block16",
    "vitb16-imagenet-block32",
]


def test_the_recipes() -> None:
    assert recipe_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_round_trips(name: str, tmp_path: Path) -> None:
    config = load_recipe(name)
    assert config.description
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(config))
    assert load_recipe(path) == config


def test_resnet50_is_the_papers_table() -> None:
    c = load_recipe("resnet50-imagenet")
    o = c.optimizer
    assert (o.name, o.momentum, o.nesterov, o.lr, o.final_lr, o.warmup_epochs) == ("sgd", 0.9, True, 1.0, 0.001, 5)
    assert (c.batch_size, o.weight_decay, c.label_smoothing, c.data.image_size) == (4096, 1e-4, 0.1, 224)
    assert (c.warmup, c.finetune, c.method_args, c.count) == (0.2, 0.2, {"beta": [1, 10]}, "model")
    flops = load_recipe("resnet50-imagenet-flops")
    assert (flops.cost, flops.value_power, flops.method_args) == ("flops", 1.0, {"beta": [1, 10]})


def test_srste_is_its_authors_configuration() -> None:
    """NM-sparsity/NM-sparsity: classification/configs/config_resnet50_2by4.yaml, and models/resnet.py for `fc`."""
    c = load_recipe("resnet50-imagenet-nm")
    o = c.optimizer
    assert (c.method, c.method_args, c.pattern, c.sparsity) == ("srste", {"decay": 2e-4}, "nm:2:4", 0.5)
    assert (c.epochs, c.batch_size, c.label_smoothing, c.clip) == (120, 256, 0.0, None)
    assert (o.name, o.lr, o.final_lr, o.warmup_epochs, o.momentum, o.nesterov) == ("sgd", 0.1, 0.0, 5, 0.9, False)
    assert o.weight_decay == 5e-5
    assert "fc.*" in c.exclude


@pytest.mark.parametrize(("name", "pattern"), [("", "unstructured"), ("-block16", (16, 16)), ("-block32", (32, 32))])
def test_vit_is_the_papers_table(name: str, pattern: Any) -> None:
    c = load_recipe("vitb16-imagenet" + name)
    o = c.optimizer
    assert (o.name, o.betas, o.eps, o.lr, o.final_lr) == ("adamw", (0.9, 0.999), 1e-8, 0.003, 0.0)
    assert o.warmup_epochs == 0.1 * c.epochs
    assert (c.batch_size, o.weight_decay, c.label_smoothing, c.clip) == (4096, 0.3, 0.1, 1.0)
    assert (c.mixup, c.cutmix, c.data.randaugment, c.count) == (0.2, 1.0, (2, 9), "model")
    assert (c.warmup, c.finetune, c.method_args, c.pattern) == (0.2, 0.2, {"beta": [1, 20]}, pattern)
    assert c.exclude == ([] if pattern == "unstructured" else ["conv_proj.*", "heads.*"])


def test_settings_reach_into_sections() -> None:
    c = load_recipe(
        "digits", ["epochs=3", "optimizer.lr=1e-3", "data.path=x.npz", "pattern=[4, 4]", "clip=null", "exclude=[a.*]"]
    )
    assert (c.epochs, c.optimizer.lr, c.data.path, c.pattern, c.clip, c.exclude) == (
        3,
        1e-3,
        "x.npz",
        (4, 4),
        None,
        ["a.*"],
    )
    assert c.optimizer.momentum == load_recipe("digits").optimizer.momentum


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epohs=3", r"epohs: there is no such key \(did you mean epochs\?\)"),
        ("optimizer.learning_rate=3", r"optimizer.learning_rate: there is no such key"),
        ("data.pth=x", r"data.pth: there is no such key \(did you mean path\?\)"),
        ("epochs=many", "epochs: 'many' is str; a whole number is needed"),
        ("epochs=2.5", "epochs: 2.5 is float; a whole number is needed"),
        ("epochs=0", "epochs: 0 is too small"),
        ("sparsity=1.5", r"sparsity: 1.5 is outside \[0, 1\)"),
        ("sparsity=true", "sparsity: True is bool; a number is needed"),
        ("optimizer=adam", "optimizer: 'adam' must be a section"),
        ("optimizer.name=adamv", r"optimizer.name: 'adamv' is not accepted \(did you mean adam"),
        ("optimizer.lr=-0.1", "optimizer.lr: -0.1 is no learning rate"),
        ("optimizer.betas=[0.9]", "optimizer.betas: .* must be a list of 2 values"),
        ("amp=fp8", "amp: 'fp8' is not accepted"),
        ("clip=0", "clip: 0.0 is no gradient norm"),
        ("micro_batch=48", "micro_batch: 48 must divide batch_size 64"),
        ("exclude=conv", "exclude: 'conv' must be a list"),
        ("count=all", "count: 'all' is not accepted; accepted: targets, model"),
        ("pattern=blocky", "pattern: 'blocky' is not accepted"),
        ("epochs.x=3", "epochs is a value, not a section"),
        ("epochs", "write key=value"),
        ("data.path={", r"--set 'data.path={': the value cannot be read: .*\(line 1"),
    ],
)
def test_mistakes(setting: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe("digits", [setting])
    assert "\n" not in str(caught.value)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    for text, message in (
        ("- a\n- b", "must be a table"),
        ("a: [", "bad.yaml cannot be read: .*line 1"),
        ("epochs: 3\nfoo: 1", "foo: there is no"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            load_recipe(path)
    with pytest.raises(RecipeError, match="there is no file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match=r"'digit' is unknown \(did you mean digits\?\)"):
        load_recipe("digit")
    assert from_dict({}) == Config()
    assert yaml.safe_load(to_yaml(Config()))["optimizer"]["name"] == "sgd"


def test_the_learning_rate() -> None:
    config = load_recipe(
        "digits", ["epochs=10", "optimizer.lr=1.0", "optimizer.final_lr=0.1", "optimizer.warmup_epochs=2"]
    )
    rates = [lr_at(config, step, 5) for step in range(50)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[30] == pytest.approx(0.55)
    assert lr_at(config, 50, 5) == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("unstructured", Unstructured()),
        ("[4, 8]", Block(4, 8)),
        ("channel", Channel()),
        ("channel:in", Channel("in")),
        ("nm:2:4", NM(2, 4)),
        ("nm:1:16", NM(1, 16)),
        ("heads:3", Heads(3)),
    ],
)
def test_patterns_by_name(text: str, pattern: Pattern) -> None:
    config = load_recipe("digits", [f"pattern={text}"])
    assert read_pattern(config.pattern) == pattern
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    "text", ["nm", "nm:2", "nm:2:4:8", "nm:a:b", "channels", "channel:up", "block:2:2", "2:4", "heads"]
)
def test_unknown_patterns_are_errors(text: str) -> None:
    with pytest.raises(RecipeError, match=r"pattern: .* is not accepted.*; accepted: unstructured, .*nm:N:M"):
        load_recipe("digits", [f"pattern={text}"])


def test_unknown_costs_are_errors() -> None:
    with pytest.raises(RecipeError, match="cost: 'latency' is not accepted; accepted: params, flops"):
        load_recipe("digits", ["cost=latency"])


def test_heads_from_a_recipe(tmp_path: Path) -> None:
    """Whole attention heads of a small ViT, from a recipe to a file with exact zeros."""
    pytest.importorskip("tests.torchvision_cpu")
    pytest.importorskip("timm")
    arguments = "{img_size: 8, patch_size: 4, embed_dim: 24, depth: 2, num_heads: 4}"
    sets = [
        *("model=timm/vit_tiny_patch16_224", f"model_args={arguments}", "method=svite", "pattern=heads:4"),
        *("include=['*.qkv.weight']", "sparsity=0.5", "epochs=1", "budget=uniform"),
    ]
    train(load_recipe("digits", sets), tmp_path / "run", quiet=True)
    weights = read(tmp_path / "run" / "model.safetensors")
    for name in ("blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"):
        alive = weights[name].reshape(3, 4, 6, 24).abs().sum((0, 2, 3)) > 0
        assert int(alive.sum()) == 2


def test_least_densities_from_a_recipe(tmp_path: Path) -> None:
    """`min_density` in a recipe, by name, holds in the file that a run ends with; a glob that matches nothing is told."""
    sets = ["sparsity=0.98", "epochs=1", "exclude=[]"]
    weight = next(name for name, p in digits_cnn(10).named_parameters() if p.ndim == 4)
    train(load_recipe("digits", [*sets, f"min_density={{{weight}: 0.5}}"]), tmp_path / "run", quiet=True)
    saved = read(tmp_path / "run" / "model.safetensors")
    assert int((saved[weight] != 0).sum()) >= saved[weight].numel() / 2
    with pytest.raises(ValueError, match="min_density"):
        train(load_recipe("digits", [*sets, "min_density={nothing: 0.5}"]), tmp_path / "other", quiet=True)


def test_a_run_starts_from_a_file_and_keeps_its_zeros(tmp_path: Path) -> None:
    model = spartan.prune(digits_cnn(), 0.9)
    spartan.save(model, tmp_path / "sparse.safetensors")
    torch.save(model.state_dict(), tmp_path / "sparse.pt")
    sets = ["epochs=1", "method=fixed", "sparsity=0.8"]
    zeros = {name: p == 0 for name, p in model.named_parameters() if p.ndim > 1}
    for file in ("sparse.safetensors", "sparse.pt"):
        train(load_recipe("digits", [*sets, f"start={tmp_path / file}"]), tmp_path / file.replace(".", "-"), quiet=True)
        found = read(tmp_path / file.replace(".", "-") / "model.safetensors")
        assert all(torch.equal(found[name] == 0, there) for name, there in zeros.items())
        assert not torch.equal(found["0.weight"], model.state_dict()["0.weight"])


def test_a_start_that_does_not_fit_is_named(tmp_path: Path) -> None:
    spartan.save(torch.nn.Linear(4, 4), tmp_path / "other.safetensors")
    torch.save({"weight": torch.zeros(4, 4)}, tmp_path / "other.pt")
    for file, words in (
        ("nowhere.pt", "start: there is no file"),
        ("other.safetensors", "start: "),
        ("other.pt", "start: .*digits-cnn"),
    ):
        with pytest.raises(RecipeError, match=words):
            Trainer(load_recipe("digits", [f"start={tmp_path / file}"]))
    with pytest.raises(RecipeError, match=r"method='fixed' keeps the zeros that are there"):
        Trainer(load_recipe("digits", ["method=fixed"]))
