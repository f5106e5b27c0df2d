"""Narrow versions of the paper's networks, for recipes to name by module and function."""

from __future__ import annotations

from typing import Any

from torch import nn

from spartan.training.vision import torchvision


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
