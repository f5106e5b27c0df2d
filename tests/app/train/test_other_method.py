"""Recipes take any method: what belonged to their own goes when --set changes it, and is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import spartan
from spartan.app.cli import app
from spartan.app.train.config import Config, RecipeError, load_recipe, load_with_note, recipe_names, to_yaml
from spartan.app.train.setup import build_method, build_model, build_sparsifier
from spartan.app.train.sweep import plan
from spartan.methods import as_method
from spartan.problem.costs import Cost, cost_by_name
from spartan.problem.patterns import read_pattern

METHODS = [entry.name for entry in spartan.methods()]
STEPS = 100
RESNET, VIT = "tests.app.train.small_models:resnet", "tests.app.train.small_models:vit"
# Narrow ones in place of large models, whose layers have the same names.
STAND_INS = {"resnet18-cifar": RESNET, "torchvision/resnet50": RESNET, "torchvision/resnet18": RESNET}
STAND_INS |= {"torchvision/vit_b_16": VIT, "timm/vit_small_patch16_224": VIT}
STAND_INS |= {"wrn-22-2": "wrn-10-1", "wrn-16-1": "wrn-10-1", "vit-6-192-4": "vit-4-64-4"}
SMALL_ARGS = {"gpt": {"layers": 2, "width": 64, "heads": 2}}


def example_of(config: Config) -> Tensor:
    """One input for a recipe's stand-in."""
    if config.data.source == "text":
        return torch.zeros(1, 16, dtype=torch.long)
    return torch.zeros(1, 1, 8, 8) if config.data.source == "digits" else torch.zeros(1, 3, 32, 32)


def cost_of(config: Config, model: nn.Module) -> Cost:
    power, include, exclude = config.value_power, config.include, config.exclude
    return cost_by_name(config.cost).for_run(model, example_of(config), power, include, exclude)


def put_zeros(model: nn.Module, config: Config) -> None:
    """The zeros that `fixed` keeps."""
    cost = cost_of(config, model)
    options: dict[str, Any] = {key: getattr(config, key) for key in ("include", "exclude", "count")}
    spartan.prune(model, config.sparsity, pattern=read_pattern(config.pattern), cost=cost, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_with_every_method(recipe: str, method: str) -> None:
    asked, plain = load_recipe(recipe, [f"method={method}"]), load_recipe(recipe)
    model_args = SMALL_ARGS.get(asked.model, {})
    config = dataclasses.replace(asked, model=STAND_INS.get(asked.model, asked.model), model_args=model_args)
    shape: Any = tuple(example_of(config).shape[1:])
    model, own = build_model(config, 10, shape), build_method(config)
    if method == "fixed":
        put_zeros(model, config)
    pattern = read_pattern(config.pattern)
    if pattern.rows and own.refuses_nm:
        with pytest.raises(RecipeError, match="does not go with pattern=NM"):
            build_sparsifier(config, model, cost_of(config, model), STEPS)
        return
    sparsifier = build_sparsifier(config, model, cost_of(config, model), STEPS)
    if method == plain.method:
        assert asked == plain
        return
    settings = sparsifier.settings
    budget = getattr(pattern, "budget", None) or own.budget  # N:M has one only
    assert (settings["method"], settings["budget"]) == (repr(as_method(method)), budget)
    assert settings["warmup_steps"] == round(own.warmup * STEPS)
    assert settings["freeze_step"] == STEPS - round(own.finetune * STEPS)
    for key in ("sparsity", "pattern", "cost", "value_power", "exclude", "count", "optimizer", "data", "epochs"):
        assert getattr(asked, key) == getattr(plain, key)


@pytest.mark.parametrize(
    ("recipe", "sets", "expected", "says"),
    [
        (
            "resnet50-imagenet",
            ["method=rigl"],
            ({}, None, None),
            "method rigl in place of spartan, without its method_args {beta: [1, 10]}, warmup 0.2, finetune 0.2",
        ),
        (
            "resnet50-imagenet",
            ["warmup=0.1", "method=rigl", "finetune=0.2", "method_args.beta=3"],
            ({"beta": 3}, 0.1, 0.2),
            "",
        ),
        (
            "resnet50-imagenet-flops",
            ["method=topkast", "method_args.exploration=0.1"],
            ({"exploration": 0.1}, None, None),
            "method topkast in place of spartan, without its method_args {beta: [1, 10]}, warmup 0.2, finetune 0.2",
        ),
        ("vitb16-imagenet", ["method=spartan"], ({"beta": [1, 20]}, 0.2, 0.2), ""),
        ("vitb16-imagenet", ["sparsity=0.8"], ({"beta": [1, 20]}, 0.2, 0.2), ""),
        ("digits", ["method=imp"], ({}, None, None), ""),
        ("digits", ["method=imp", "method=spartan", "method_args.beta=2"], ({"beta": 2}, None, None), ""),
    ],
)
def test_what_is_dropped(recipe: str, sets: list[str], expected: Any, says: str) -> None:
    config, note = load_with_note(recipe, sets)
    assert (config.method_args, config.warmup, config.finetune) == expected
    assert note == says
    before = load_recipe(recipe).description
    assert config.description == (f"{before}; {says}" if says else before)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("method: topkast\nmethod_args: {exploration: 0.1}\nbudget: uniform\nwarmup: 0\n")
    config, note = load_with_note(path)
    assert (note, config.method, config.method_args, config.budget, config.warmup) == (
        *("", "topkast", {"exploration": 0.1}, "uniform", 0.0),
    )
    assert not load_with_note(path, ["method=topkast", "seed=3"])[1]
    other, note = load_with_note(path, ["method=spartan"])
    assert (other.method_args, other.budget, other.warmup) == ({}, None, None)
    assert other.description == note
    assert "method_args {exploration: 0.1}, budget uniform, warmup 0" in other.description
    path.write_text("budget: {'*': 0.5}\n")  # layers are no matter of methods
    assert load_recipe(path, ["method=rigl"]).budget == {"*": 0.5}
    # A recipe that was written out is the same recipe, with nothing more to drop.
    path.write_text(to_yaml(load_recipe("resnet50-imagenet", ["method=rigl"])))
    assert load_recipe(path) == load_recipe("resnet50-imagenet", ["method=rigl"])
    assert load_recipe(path, ["method=imp"]).description == load_recipe(path).description


@pytest.mark.parametrize("sets", [["method=[1]"], ["method=null"], ["method.x=1"], ["method={a: 1}"]])
def test_a_method_that_is_no_name(sets: list[str]) -> None:
    with pytest.raises(RecipeError, match="^method[:.]"):
        load_recipe("resnet50-imagenet", sets)


def test_another_methods_argument_is_still_a_mistake() -> None:
    with pytest.raises(RecipeError, match=r"method_args.beta.*topkast has no such argument"):
        build_method(load_recipe("resnet50-imagenet", ["method=topkast", "method_args.beta=[1, 3]"]))


def test_a_sweep_over_methods(tmp_path: Path) -> None:
    jobs = plan("resnet50-imagenet-flops", ["method=spartan,topkast", "finetune=0.1"], None, tmp_path)
    assert [(job.config.method, job.config.method_args, job.config.finetune) for job in jobs] == [
        ("spartan", {"beta": [1, 10]}, 0.1),
        ("topkast", {}, 0.1),
    ]
    assert [job.note for job in jobs] == [
        "",
        "method topkast in place of spartan, without its method_args {beta: [1, 10]}, warmup 0.2",
    ]


def test_the_output_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe, runs = tmp_path / "mine.yaml", tmp_path / "runs"
    sets = ["method=spartan", "method_args={beta: [1, 5]}"]
    recipe.write_text(to_yaml(load_recipe("digits", [*sets, "epochs=1", "warmup=0.3"])))
    says = "method imp in place of spartan, without its method_args {beta: [1, 5]}, warmup 0.3"

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--set", "method=imp"])

    shown = invoke("train", str(recipe), "--show")
    assert shown.stderr.strip() == says
    assert shown.stdout.startswith("description:")
    swept = invoke("sweep", str(recipe), "--out", str(runs))
    assert swept.exit_code == 0, swept.output
    assert swept.stdout.count(says) == 1
    saved = load_recipe(runs / "imp-0.95-seed0" / "recipe.yaml")
    assert saved == load_recipe(recipe, ["method=imp"])
    assert saved.description.endswith(says)
    trained = invoke("train", str(recipe), "--out", str(tmp_path / "run"))
    assert trained.exit_code == 0, trained.output
    assert trained.stdout.splitlines()[1] == says
