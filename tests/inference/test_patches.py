"""Convolutions without overlap as products of patches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spartan.inference.fuse import plain_conv
from spartan.inference.runtime import DenseConv2d
from spartan.inference.stand_ins import PatchConv


def dense(conv: nn.Conv2d) -> DenseConv2d:
    constants = plain_conv(conv)
    assert constants is not None
    return DenseConv2d(conv.weight, conv.bias, constants)


def patches(conv: nn.Conv2d) -> PatchConv:
    assert PatchConv.suits(dense(conv))
    return PatchConv(dense(conv))


@pytest.mark.parametrize("window", [(2, 2), (4, 3), (16, 16)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(16, 18), (17, 19), (33, 31)])
def test_a_patch_is_a_window(window: tuple[int, int], bias: bool, size: tuple[int, int]) -> None:
    conv = nn.Conv2d(3, 5, window, stride=window, bias=bias).double()
    for shape in ((2, 3, *size), (1, 3, *size), (3, *size), (0, 3, *size)):
        x = torch.randn(shape, dtype=torch.float64)
        with torch.no_grad():
            got, expected = patches(conv)(x), conv(x)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(patches(conv)(x, residual=expected), 2 * expected)
    x = torch.randn(2, 3, *size, dtype=torch.float64).to(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(patches(conv)(x), conv(x))


def test_the_tokens_of_a_transformer_are_not_copied() -> None:
    y = patches(nn.Conv2d(3, 8, 4, stride=4))(torch.randn(2, 3, 16, 16))
    tokens = y.flatten(2).transpose(1, 2)
    assert tokens.is_contiguous()
    assert tokens.data_ptr() == y.data_ptr()


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 8, 4, stride=2),
        nn.Conv2d(3, 8, 4, stride=4, padding=1),
        nn.Conv2d(4, 8, 4, stride=4, groups=2),
        nn.Conv2d(3, 8, 2, stride=2, dilation=2),
        nn.Conv2d(3, 8, 1),
    ],
    ids=str,
)
def test_windows_that_overlap_or_more_are_left_alone(conv: nn.Conv2d) -> None:
    assert not PatchConv.suits(dense(conv))
