"""Other libraries, and layers as they have them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """As transformers' own: inputs × outputs."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


class Featured(nn.Module):
    """Says how many inputs and outputs it has."""

    def __init__(self, *shape: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.randn(*shape))


class Experts(nn.Module):
    """A matrix for each expert, outputs × inputs or the other way round."""

    is_transposed: bool | None

    def __init__(self, count: int, inputs: int, outputs: int, transposed: bool | None = False) -> None:
        super().__init__()
        sides = (inputs, outputs) if transposed else (outputs, inputs)
        self.up = nn.Parameter(torch.randn(count, *sides))
        self.up_bias = nn.Parameter(torch.zeros(count, outputs, 2))
        self.is_transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        up = self.up if self.is_transposed else self.up.transpose(1, 2)
        return torch.bmm(x.expand(len(up), *x.shape[-2:]), up)


def library(name: str) -> Any:
    """A library, beside whatever build of torch; the test is skipped where it is not installed."""
    if importlib.util.find_spec("torchvision"):
        importlib.import_module(
            "tests.torchvision_cpu"
        )  # which others import, and which may not fit a CPU build of torch
    return pytest.importorskip(name)
