import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spartan import zoo
from spartan.app.train.config import RecipeError, from_dict
from spartan.app.train.parallel import blocks
from spartan.app.train.setup import build_model


def build(model: str, classes: int = 10, shape: tuple[int, int, int] = (3, 32, 32), **args: Any) -> nn.Module:
    return build_model(from_dict({"model": model, "model_args": args}), classes, shape)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "shape", "low", "high"),
    [
        ("digits-cnn", 10, (1, 8, 8), 56_000, 57_000),
        ("wrn-22-2", 10, (3, 32, 32), 1.07e6, 1.09e6),
        ("wrn-22-2", 100, (3, 32, 32), 1.08e6, 1.10e6),
        ("wrn-16-1", 10, (1, 28, 28), 0.17e6, 0.18e6),
        ("wrn-10-3", 7, (2, 16, 16), 0.6e6, 0.8e6),
        ("resnet18-cifar", 10, (3, 32, 32), 11.17e6, 11.18e6),
        ("vit-6-192-4", 10, (3, 32, 32), 2_693_578, 2_693_578),
        ("vit-2-64-4", 7, (1, 28, 20), 0.1e6, 0.11e6),
        ("torchvision/resnet18", 5, (3, 64, 64), 11.1e6, 11.3e6),
        ("torchvision/squeezenet1_1", 5, (3, 64, 64), 0.7e6, 0.8e6),
        ("timm/resnet10t", 7, (3, 32, 32), 4e6, 6e6),
        ("timm/resnet10t", 7, (1, 32, 32), 4e6, 6e6),
    ],
)
def test_parameters_and_scores(name: str, classes: int, shape: tuple[int, int, int], low: float, high: float) -> None:
    model = build(name, classes, shape)
    assert low <= parameters(model) <= high
    scores = model.train()(torch.randn(2, *shape))
    assert scores.shape == (2, classes)
    assert scores.isfinite().all()


def test_the_stem_of_resnet18_keeps_small_images_large() -> None:
    model = build("resnet18-cifar")
    seen: list[torch.Size] = []
    assert isinstance(model.layer1, nn.Module)
    model.layer1.register_forward_hook(lambda *args: seen.append(args[2].shape))
    model(torch.randn(2, 3, 32, 32))
    assert seen == [(2, 64, 32, 32)]


def test_wide_resnets_are_initialised_by_he_and_start_in_the_right_scale() -> None:
    torch.manual_seed(0)
    model = build("wrn-22-2")
    weight = dict(model.named_parameters())["blocks.8.conv2.weight"]
    assert weight.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in model.modules()) == 19
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) for m in model.modules()) == 3


def test_vits_follow_the_image_size() -> None:
    model = build("torchvision/vit_b_16", 5, (3, 32, 32), num_layers=1, hidden_dim=32, num_heads=2, mlp_dim=64)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    assert model.patch_size == 16
    with torch.device("meta"):
        assert parameters(build("torchvision/vit_b_16", 1000, (3, 224, 224))) == 86_567_656
        assert parameters(build("torchvision/vit_b_16", 1000, (3, 224, 224), num_layers=12)) == 86_567_656
        assert parameters(build("torchvision/vit_b_16", 1000, (3, 32, 32))) == 86_567_656 - (196 - 4) * 768
    with pytest.raises(RecipeError, match="model: torchvision/vit_b_16 cannot be built with model_args .*divisible"):
        build("torchvision/vit_b_16", 5, (3, 32, 32), num_layers=1, hidden_dim=33)
    small = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24}
    model = build("timm/vit_tiny_patch16_224", 5, (3, 32, 32), **small)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_our_vit_computes_what_torchs_transformer_does() -> None:
    torch.manual_seed(0)
    model, x = build("vit-2-128-8").eval(), torch.randn(3, 3, 32, 32)
    state = model.state_dict()
    layer = nn.TransformerEncoderLayer(128, 2, 512, 0.0, "gelu", batch_first=True, norm_first=True)
    torchs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    theirs = {
        "norm1": "norm1",
        "norm2": "norm2",
        "self_attn.out_proj": "attn.proj",
        "linear1": "mlp.0",
        "linear2": "mlp.2",
    }
    theirs |= {"self_attn.in_proj": "attn.qkv"}
    for key, value in torchs.state_dict().items():
        _, number, inner = key.split(".", 2)
        name, _, what = inner.rpartition("_" if "in_proj_" in inner else ".")
        value.copy_(state[f"blocks.{number}.{theirs[name]}.{what}"])
    cut = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(3, 16, -1)  # patches row by row
    tokens = cut @ state["patches.weight"].flatten(1).T + state["patches.bias"]
    tokens = torch.cat([state["token"].expand(3, 1, -1), tokens], 1) + state["positions"]
    first = nn.functional.layer_norm(torchs(tokens)[:, 0], [128], state["norm.weight"], state["norm.bias"])
    expected = first @ state["head.weight"].T + state["head.bias"]
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert len(blocks(model)) == 2  # what FSDP2 gathers at a time


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("wrn22-2", {}, r"model: 'wrn22-2' is unknown \(did you mean wrn-22-2\?\)"),
        ("wrn-23-2", {}, r"model: wrn-23-2 does not exist.*did you mean wrn-22-2\?"),
        ("wrn-22-0", {}, r"did you mean wrn-22-1\?"),
        ("vit-6-192", {}, r"model: 'vit-6-192' is unknown \(did you mean vit-6-192-4\?\)"),
        ("vit-6-200-4", {}, r"the width a multiple of 64 \(did you mean vit-6-192-4\?\)"),
        ("vit-0-10-4", {}, r"did you mean vit-1-64-4\?"),
        ("vit-6-192-5", {}, "model: vit-6-192-5 cannot cut images of 32×32 into squares of 5×5"),
        ("vit-6-192-0", {}, "cannot cut images of 32×32 into squares of 0×0"),
        ("vit-1001-64-4", {}, "model: vit-1001-64-4 is too large; a depth of at most 1000"),
        ("vit-6-192-4", {"heads": 4}, "model_args: heads: vit-6-192-4 takes no arguments"),
        ("digits-cnn", {"depth": 3}, "model_args: depth: digits-cnn takes no arguments"),
        ("torchvision/resnet51", {}, r"torchvision has no model 'resnet51' \(did you mean resnet50\?\)"),
        ("torchvision/fasterrcnn_resnet50_fpn", {}, "torchvision has no model"),
        ("torchvision/resnet18", {"widht": 2}, r"model: torchvision/resnet18 cannot be built.*widht"),
        ("torchvision/resnet18", {"weights": "NONESUCH"}, "model: torchvision/resnet18 cannot be built"),
        ("timm/resnet10tt", {}, r"timm has no model 'resnet10tt' \(did you mean resnet10t\?\)"),
        ("timm/resnet10t", {"widht": 2}, r"model: timm/resnet10t cannot be built.*widht"),
        ("no_such_module:net", {}, "model: cannot import 'no_such_module'"),
        ("math:net", {}, "model: 'math' has no function 'net'"),
        ("math:sqrt", {}, "model: math:sqrt cannot be called with classes="),
        ("builtins:dict", {}, "model: builtins:dict cannot be called with classes="),
    ],
)
def test_bad_names_and_arguments(name: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        build(name, **args)


def test_torchvision_models_want_three_channels() -> None:
    with pytest.raises(RecipeError, match="takes images of 3 channels, and data.source digits has 1"):
        build("torchvision/resnet18", 10, (1, 8, 8))


def test_ones_own_function_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_models.py").write_text(
        "import torch\ndef net(classes, hidden=4):\n    return torch.nn.Linear(hidden, classes)\n"
        "def table(classes):\n    return {}\n"
    )
    (tmp_path / "my_broken_models.py").write_text("def net(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert parameters(build("my_own_models:net", 3, hidden=5)) == 18
    with pytest.raises(RecipeError, match=r"has no function 'nte' \(did you mean net\?\)"):
        build("my_own_models:nte")
    with pytest.raises(RecipeError, match="my_own_models:table returned dict; a torch.nn.Module is needed"):
        build("my_own_models:table")
    with pytest.raises(RecipeError, match="model: cannot import 'my_broken_models' .SyntaxError"):
        build("my_broken_models:net")


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # Python's way of saying there is none
    says = r"needs timm, which is not installed: pip install 'spartan-sparsity\[vision\]'"
    with pytest.raises(RecipeError, match=says):
        build("timm/resnet10t")
    with pytest.raises(ValueError, match=says):
        zoo.timm()


def test_the_zoo_knows_nothing_of_recipes() -> None:
    with pytest.raises(
        ValueError, match="takes images of 3 channels, and the shape given has 1; timm's models"
    ) as caught:
        zoo.build_model("torchvision/resnet18", 10, (1, 8, 8))
    assert type(caught.value) is ValueError
    assert parameters(zoo.build_model("timm/resnet10t", 7, (3, 32, 32), {"stem_width": 8})) < 5e6
