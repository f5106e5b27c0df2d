"""Models by name: small ones of our own, torchvision's and timm's, or a function of the user's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartan.app.train import vision
from spartan.app.train.config import Config, RecipeError, nearest
from spartan.app.train.data import load_function

Shape = tuple[int, int, int]
_WRN = re.compile(r"wrn-(\d+)-(\d+)")


def build_model(config: Config, classes: int, shape: Shape) -> nn.Module:
    """The model that `config.model` names, for images of `shape` (C, H, W); its weights come from torch's global RNG."""
    name = config.model
    if name.startswith("torchvision/"):
        return _torchvision_model(name.removeprefix("torchvision/"), config, classes, shape)
    if name.startswith("timm/"):
        return _timm_model(name.removeprefix("timm/"), config, classes, shape)
    if ":" in name:
        return _users_model(config, classes)
    if name not in ("digits-cnn", "resnet18-cifar") and not _WRN.fullmatch(name):
        known = ["digits-cnn", "wrn-22-2", "resnet18-cifar", "torchvision/resnet50", "timm/vit_small_patch16_224"]
        ours = "digits-cnn, wrn-DEPTH-WIDTH, resnet18-cifar, torchvision/NAME, timm/NAME, module:function"
        raise RecipeError(f"model: {name!r} is unknown{nearest(name, known)}; accepted: {ours}")
    if config.model_args:
        raise RecipeError(f"model_args: {', '.join(config.model_args)}: {name} takes no arguments")
    if name == "digits-cnn":
        return digits_cnn(classes, shape[0])
    if name == "resnet18-cifar":
        return resnet18_cifar(classes, shape[0])
    match = _WRN.fullmatch(name)
    assert match is not None
    return WideResNet(int(match[1]), int(match[2]), classes, shape[0])


# ---------------------------------------------------------------------- our own


def digits_cnn(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """Three convolutions with batch norm and a linear classifier: 56,224 weights for 10 classes."""

    def conv(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [_he(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)), nn.BatchNorm2d(outputs), nn.ReLU()]

    body = [*conv(channels, 32, 1), *conv(32, 64, 2), *conv(64, 64, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class WideBlock(nn.Module):
    """Batch norm, ReLU, 3×3 convolution, twice, around a shortcut (He et al., 2016b)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = _he(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False))
        self.conv2 = _he(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False))
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else _he(nn.Conv2d(inputs, outputs, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output; where the shape changes, the shortcut starts after the first activation."""
        out = F.relu(self.bn1(x))
        x = x if self.shortcut is None else self.shortcut(out)
        return x + self.conv2(F.relu(self.bn2(self.conv1(out))))


class WideResNet(nn.Module):
    """WRN-DEPTH-WIDTH for small images (Zagoruyko and Komodakis, 2016), without dropout."""

    def __init__(self, depth: int, width: int, classes: int, channels: int = 3) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 or width < 1:
            near = max(10, round((depth - 4) / 6) * 6 + 4)
            raise RecipeError(
                f"model: wrn-{depth}-{width} does not exist: the depth is 6n + 4 and the width at least 1 "
                f"(did you mean wrn-{near}-{max(width, 1)}?)"
            )
        self.conv = _he(nn.Conv2d(channels, 16, 3, 1, 1, bias=False))
        sizes, blocks = [16, 16 * width, 32 * width, 64 * width], []
        for group in range(3):
            for i in range((depth - 4) // 6):
                inputs = sizes[group] if i == 0 else sizes[group + 1]
                blocks.append(WideBlock(inputs, sizes[group + 1], 2 if group > 0 and i == 0 else 1))
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(sizes[3])
        self.head = nn.Linear(sizes[3], classes)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores [B, classes]."""
        x = F.relu(self.bn(self.blocks(self.conv(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet18_cifar(classes: int, channels: int = 3) -> nn.Module:
    """ResNet-18 for 32×32 images: a 3×3 stem of stride 1 and no max-pooling; 11.17M parameters for 10 classes."""
    model: nn.Module = vision.torchvision().models.resnet18(num_classes=classes)
    model.conv1 = _he(nn.Conv2d(channels, 64, 3, 1, 1, bias=False))
    model.maxpool = nn.Identity()
    return model


def _he(layer: nn.Conv2d) -> nn.Conv2d:
    """He initialisation by fan-out, as in torchvision's ResNets."""
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


# ---------------------------------------------------------------------- others'


def _torchvision_model(name: str, config: Config, classes: int, shape: Shape) -> nn.Module:
    models = vision.torchvision().models
    known = models.list_models(module=models)
    if name not in known:
        raise RecipeError(f"model: torchvision has no model {name!r}{nearest(name, known)}")
    if shape[0] != 3:
        raise RecipeError(
            f"model: torchvision/{name} takes images of 3 channels, and data.source {config.data.source} has "
            f"{shape[0]}; timm's models take any number"
        )
    arguments: dict[str, Any] = {"num_classes": classes}
    if name.startswith("vit_"):
        arguments |= {} if shape[1] == 224 else {"image_size": shape[1]}
        if config.model_args.keys() & VIT_SIZES.keys():
            return _call(models.VisionTransformer, config, {"image_size": shape[1], **_vit_sizes(name), **arguments})
    if name in ("googlenet", "inception_v3"):
        # auxiliary classifiers would make the output a tuple; leaving the other to its default warns
        arguments |= {"aux_logits": False, "init_weights": True}
    return _call(lambda **kw: models.get_model(name, **kw), config, arguments)


# torchvision's named ViTs refuse other sizes than their own; recipes may still ask for a narrower or shorter one.
VIT_SIZES: dict[str, Callable[[Any], int]] = {
    "patch_size": lambda vit: vit.patch_size,
    "num_layers": lambda vit: len(vit.encoder.layers),
    "num_heads": lambda vit: vit.encoder.layers[0].num_heads,
    "hidden_dim": lambda vit: vit.hidden_dim,
    "mlp_dim": lambda vit: vit.mlp_dim,
}


def _vit_sizes(name: str) -> dict[str, int]:
    with torch.device("meta"):
        vit = vision.torchvision().models.get_model(name)
    return {key: size(vit) for key, size in VIT_SIZES.items()}


def _timm_model(name: str, config: Config, classes: int, shape: Shape) -> nn.Module:
    timm = vision.timm()
    if not timm.is_model(name):
        raise RecipeError(f"model: timm has no model {name!r}{nearest(name, timm.list_models())}")
    arguments = {"pretrained": False, "num_classes": classes} | ({} if shape[0] == 3 else {"in_chans": shape[0]})
    return _call(lambda **kw: timm.create_model(name, **kw), config, arguments)


def _users_model(config: Config, classes: int) -> nn.Module:
    function = load_function("model", config.model)
    arguments = {"classes": classes, **config.model_args}
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that does not tell its arguments
        given = ", ".join(f"{key}=" for key in arguments)
        raise RecipeError(f"model: {config.model} cannot be called with {given} ({error})") from None
    model = function(**arguments)
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model: {config.model} returned {type(model).__name__}; a torch.nn.Module is needed")
    return model


def _call(function: Callable[..., nn.Module], config: Config, arguments: dict[str, Any]) -> nn.Module:
    """The library's model; `model_args` go over our own arguments, and what it refuses is the recipe's mistake."""
    try:
        return function(**{**arguments, **config.model_args})
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        given = f" with model_args {config.model_args}" if config.model_args else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RecipeError(f"model: {config.model} cannot be built{given}: {reason}") from error
