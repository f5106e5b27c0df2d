"""Builds models by name: small ones of our own, torchvision's and timm's, or those of a user's function.

Nothing but torch is needed for our own; torchvision and timm are imported when a name asks for them.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartan.gpt import GPT
from spartan.vit import ViT
from spartan.wording import nearest, one_line

Shape = tuple[int, ...]  # of an image: channels, height, width; of text: how many tokens
WRN = re.compile(r"wrn-(\d{1,99})-(\d{1,99})")
VIT = re.compile(r"vit-(\d{1,99})-(\d{1,99})-(\d{1,99})")


def build_model(
    name: str, classes: int, shape: Shape, arguments: Mapping[str, Any] | None = None, source: str = "the shape given"
) -> nn.Module:
    """The model of this name, its weights drawn from torch's global RNG; ValueError that says why there is none.

    Args:
        name: digits-cnn, wrn-DEPTH-WIDTH, resnet18-cifar, vit-DEPTH-WIDTH-PATCH, gpt, torchvision/NAME, timm/NAME, or
            module:function.
        classes: how many scores it gives an image.
        shape: of an image: channels, height, width; of text: how many tokens.
        arguments: for gpt, for the constructor of torchvision or timm, or for the function.
        source: what the shape is from, for the error message where it does not suit the model.

    Example:
        >>> sum(p.numel() for p in build_model("wrn-10-1", 10, (3, 32, 32)).parameters())
        77850
    """
    arguments = dict(arguments or {})
    library, slash, inner = name.partition("/")
    if slash and library == "torchvision":
        return _torchvision_model(inner, classes, shape, arguments, source)
    if slash and library == "timm":
        return _timm_model(inner, classes, shape, arguments)
    if ":" in name:
        return _users_model(name, {"classes": classes, **arguments})
    if name == "gpt":
        if len(shape) != 1:
            raise ValueError(f"model: gpt takes sequences of tokens, and {source} has examples of shape {tuple(shape)}")
        return _call(GPT, name, {"classes": classes, "context": shape[0]}, arguments)
    if len(shape) != 3:
        raise ValueError(f"model: {name} takes images, and {source} has sequences of tokens; gpt takes these")
    wrn, vit = WRN.fullmatch(name), VIT.fullmatch(name)
    ours = {"digits-cnn": digits_cnn, "resnet18-cifar": resnet18_cifar}
    if name not in ours and wrn is None and vit is None:
        known = [*ours, "gpt", "wrn-22-2", "vit-6-192-4", "torchvision/resnet50", "timm/vit_small_patch16_224"]
        accepted = (
            "digits-cnn, wrn-DEPTH-WIDTH, resnet18-cifar, vit-DEPTH-WIDTH-PATCH, gpt, torchvision/NAME, timm/NAME, "
        )
        accepted += "module:function"
        raise ValueError(f"model: {name!r} is unknown{nearest(name, known)}; accepted: {accepted}")
    if arguments:
        raise ValueError(f"model_args: {', '.join(arguments)}: {name} takes no arguments")
    if vit:
        return ViT(int(vit[1]), int(vit[2]), int(vit[3]), classes, shape)
    return WideResNet(int(wrn[1]), int(wrn[2]), classes, shape[0]) if wrn else ours[name](classes, shape[0])


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
        if depth > 1000 or width > 100:
            raise ValueError(
                f"model: wrn-{depth}-{width} is too large; a depth of at most 1000 and a width of at most 100"
            )
        if depth < 10 or (depth - 4) % 6 or width < 1:
            near = max(10, round((depth - 4) / 6) * 6 + 4)
            raise ValueError(
                f"model: wrn-{depth}-{width} does not exist: the depth is 6n + 4 and the width at least 1 "
                f"(did you mean wrn-{near}-{max(width, 1)}?)"
            )
        self.conv = _he(nn.Conv2d(channels, 16, 3, 1, 1, bias=False))
        inputs, blocks = 16, []
        for outputs, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for i in range((depth - 4) // 6):
                blocks.append(WideBlock(inputs, outputs, 1 if i else stride))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(inputs)
        self.head = nn.Linear(inputs, classes)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores [B, classes]."""
        x = F.relu(self.bn(self.blocks(self.conv(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet18_cifar(classes: int, channels: int = 3) -> nn.Module:
    """ResNet-18 for 32×32 images: a 3×3 stem of stride 1 and no max-pooling; 11.17M parameters for 10 classes."""
    model: nn.Module = torchvision().models.resnet18(num_classes=classes)
    model.conv1 = _he(nn.Conv2d(channels, 64, 3, 1, 1, bias=False))
    model.maxpool = nn.Identity()
    return model


def _he(layer: nn.Conv2d) -> nn.Conv2d:
    """He initialisation by fan-out, as in torchvision's ResNets."""
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _torchvision_model(name: str, classes: int, shape: Shape, given: dict[str, Any], source: str) -> nn.Module:
    models = torchvision().models
    known = models.list_models(module=models)
    if name not in known:
        raise ValueError(f"model: torchvision has no model {name!r}{nearest(name, known)}")
    if shape[0] != 3:
        raise ValueError(
            f"model: torchvision/{name} takes images of 3 channels, and {source} has {shape[0]}; "
            "timm's models take any number"
        )
    arguments: dict[str, Any] = {"num_classes": classes}
    if name.startswith("vit_"):
        arguments["image_size"] = shape[1]
        if given.keys() & VIT_SIZES.keys():
            with torch.device("meta"):
                named = models.get_model(name)
            arguments |= {key: size(named) for key, size in VIT_SIZES.items()}
            return _call(models.VisionTransformer, f"torchvision/{name}", arguments, given)
    if name in ("googlenet", "inception_v3"):
        # auxiliary classifiers would make the output a tuple; leaving the other to its default warns
        arguments |= {"aux_logits": False, "init_weights": True}
    return _call(lambda **kw: models.get_model(name, **kw), f"torchvision/{name}", arguments, given)


# torchvision's named ViTs refuse other sizes than their own; recipes may still ask for a narrower or shorter one.
VIT_SIZES: dict[str, Callable[[Any], int]] = {
    "patch_size": lambda vit: vit.patch_size,
    "num_layers": lambda vit: len(vit.encoder.layers),
    "num_heads": lambda vit: vit.encoder.layers[0].num_heads,
    "hidden_dim": lambda vit: vit.hidden_dim,
    "mlp_dim": lambda vit: vit.mlp_dim,
}


def _timm_model(name: str, classes: int, shape: Shape, given: dict[str, Any]) -> nn.Module:
    models = timm()
    if not models.is_model(name):
        raise ValueError(f"model: timm has no model {name!r}{nearest(name, models.list_models())}")
    arguments = {"pretrained": False, "num_classes": classes} | ({} if shape[0] == 3 else {"in_chans": shape[0]})
    return _call(lambda **kw: models.create_model(name, **kw), f"timm/{name}", arguments, given)


def _users_model(name: str, arguments: dict[str, Any]) -> nn.Module:
    function = load_function("model", name)
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that does not tell its arguments
        given = ", ".join(f"{key}=" for key in arguments)
        raise ValueError(f"model: {name} cannot be called with {given} ({error})") from None
    model = function(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {name} returned {type(model).__name__}; a torch.nn.Module is needed")
    return model


def _call(function: Callable[..., nn.Module], name: str, arguments: dict[str, Any], given: dict[str, Any]) -> nn.Module:
    """A library's model; the arguments given go over ours, and what the library refuses is their mistake."""
    try:
        return function(**arguments | given)
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        told = f" with model_args {given}" if given else ""
        raise ValueError(f"model: {name} cannot be built{told}: {one_line(error)}") from error


def torchvision() -> ModuleType:
    """The torchvision module, also beside a CPU build of torch; ValueError where it is not installed.

    PyPI's torchvision is built for CUDA. Beside a CPU build of torch its compiled operators cannot load, and the import
    then fails only because two of them are not declared. The models, transforms and data sets need neither.
    """
    try:
        return _installed("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return _installed("torchvision")


def timm() -> ModuleType:
    """The timm module, which imports torchvision by itself; ValueError where it is not installed."""
    torchvision()
    return _installed("timm")


def _installed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        hint = "pip install 'spartan-sparsity[vision]'"
        raise ValueError(f"this recipe needs {name}, which is not installed: {hint}") from None


def load_function(key: str, spec: str) -> Callable[..., Any]:
    """The function that `module:function` names, for the recipe's `key`; modules in the current directory are found too."""
    module_name, _, name = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may fail in any way
        raise ValueError(f"{key}: cannot import {module_name!r} ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(f"{key}: {module_name!r} has no function {name!r}{nearest(name, public)}")
    return function
