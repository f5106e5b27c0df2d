"""Computes a convolution whose windows do not overlap as a product with a row for each window.

The first layer of a vision transformer is one. As a convolution of three channels it is a poor fit for tensor cores: on an
H200, in bfloat16, it takes a tenth of the whole dense ViT-B/16 (0.58 ms for 64 images); as a product of patches 0.06 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spartan.inference.cpu.ops import Conv
from spartan.inference.gpu.choice import timed
from spartan.inference.runtime import DenseConv2d, DenseLinear, DeviceLinear


def convertible(conv: Conv) -> bool:
    """Whether a convolution's stride is its window, and it needs nothing else."""
    plain = conv.groups == 1 and conv.padding == (0, 0) and conv.dilation == (1, 1)
    return plain and conv.stride == conv.kernel != (1, 1)


class PatchConv(nn.Module):
    """The convolution's output, from `linear` on patches [images, windows, channels · height · width].

    Args:
        conv: without an activation, which would come after a residual.

    Example:
        >>> from spartan.inference.fuse import plain_conv
        >>> conv = torch.nn.Conv2d(3, 8, 4, stride=4)
        >>> x = torch.randn(2, 3, 17, 16)
        >>> same = PatchConv(DenseConv2d(conv.weight, conv.bias, plain_conv(conv)))
        >>> bool(torch.allclose(same(x), conv(x), atol=1e-6))
        True
    """

    linear: DenseLinear | DeviceLinear

    def __init__(self, conv: DenseConv2d) -> None:
        super().__init__()
        self.window = conv.conv.kernel
        self.linear = DenseLinear(conv.weight.flatten(1), conv.bias)
        self.eval()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output for x [images, channels, height, width] or [channels, height, width]."""
        h, w = self.window
        *images, channels, height, width = x.shape
        down, across = height // h, width // w  # what is left at the edges is not seen, as in the convolution
        x = x[..., : down * h, : across * w].reshape(-1, channels, down, h, across, w)
        x = x.permute(0, 2, 4, 1, 3, 5).reshape(len(x), down * across, channels * h * w)
        y = self.linear(x).transpose(1, 2)
        y = y.reshape(*images, y.shape[1], down, across)
        return y if residual is None else y + residual


def faster(
    patches: PatchConv, conv: nn.Conv2d | DenseConv2d, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[bool, str]:
    """Whether the device is done sooner with the patches, and the times."""
    with torch.inference_mode():
        x = torch.randn(shape, device=conv.weight.device).to(dtype)
        times = timed({"patches": patches, "convolution": conv}, x)
    told = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in sorted(times.items(), key=lambda t: t[1]))
    return times["patches"] < times["convolution"], told
