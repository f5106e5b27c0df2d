"""Narrow versions of the paper's networks, for recipes to name by module and function."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from spartan.zoo import torchvision


def vit(classes: int, **_: Any) -> nn.Module:
    """ViT with four layers of width 64 for 32-pixel images; over 90% of it is in the encoder."""
    model: nn.Module = torchvision().models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=4, num_heads=2, hidden_dim=64, mlp_dim=256, num_classes=classes
    )
    return model


def resnet(classes: int, **_: Any) -> nn.Module:
    """A ResNet of four thin bottlenecks."""
    resnet = torchvision().models.resnet
    model: nn.Module = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=classes, width_per_group=8)
    return model


def dropout(classes: int, **_: Any) -> nn.Module:
    """A net that draws random numbers while it trains."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, classes))


class Call(nn.Module):
    """A function of the input as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def float64(classes: int, **_: Any) -> nn.Module:
    """Convolutions in float64 and no batch norm: the same to rounding however a batch is divided."""
    body = [nn.Conv2d(1, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(Call(Tensor.double), *body, nn.Linear(24 * 16, classes)).double()


class _Trouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * torch.nan


def _at_third_step(rank: int, trouble: Any) -> Call:
    """A layer that passes its input on, until process `rank` comes to its third training step."""
    seen = 0

    def pass_on(x: Tensor) -> Tensor:
        nonlocal seen
        seen += torch.is_grad_enabled()
        return trouble(x) if seen > 2 and os.environ["RANK"] == str(rank) else x

    return Call(pass_on)


def _with(layer: nn.Module, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), layer, nn.ReLU(), nn.Linear(32, classes))


def nan_gradients(classes: int, rank: int, **_: Any) -> nn.Module:
    """On one process, gradients are NaN from the third step on."""
    return _with(_at_third_step(rank, _Trouble.apply), classes)


def fails(classes: int, rank: int, **_: Any) -> nn.Module:
    """On one process, the third step raises."""

    def trouble(x: Tensor) -> Tensor:
        raise ValueError(f"process {rank} has had enough")

    return _with(_at_third_step(rank, trouble), classes)


def vanishes(classes: int, rank: int, **_: Any) -> nn.Module:
    """One process ends in its third step, without a word."""
    return _with(_at_third_step(rank, lambda x: os._exit(9)), classes)
