"""torchvision and timm, imported where they are used, also beside a CPU build of torch."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from spartan.app.train.config import RecipeError

_declarations: list[torch.library.Library] = []  # a declaration lasts as long as its library object


def torchvision() -> ModuleType:
    """The torchvision module.

    PyPI's torchvision is built for CUDA. Beside a CPU build of torch its compiled operators cannot load, and the import
    then fails only because two of them are not declared. The models, transforms and data sets need neither.
    """
    try:
        return _installed("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    _declarations.append(library)
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return _installed("torchvision")


def timm() -> ModuleType:
    """The timm module, which imports torchvision by itself."""
    torchvision()
    return _installed("timm")


def _installed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        hint = "pip install 'spartan-sparsity[vision]'"
        raise RecipeError(f"this recipe needs {name}, which is not installed: {hint}") from None
