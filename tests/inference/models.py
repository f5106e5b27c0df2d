"""Small models with every kind of tensor that a file can hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor: equal exactly if every bit is."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def sparse(*shape: int, density: float = 0.1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    return x.masked_fill_(torch.rand(shape, generator=g) >= density, 0.0).to(dtype)


def blocks(rows: int, columns: int, h: int, w: int, density: float = 0.1, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    keep = torch.rand(rows // h, 1, columns // w, 1, generator=g) < density
    keep[0, 0, 0, 0] = True
    full = torch.randn(rows // h, h, columns // w, w, generator=g)
    return torch.where(keep, full, 0.0).reshape(rows, columns)


def two_of_four(rows: int, columns: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows * columns // 4, 4, generator=g)
    return x.masked_fill_(torch.rand(x.shape, generator=g).argsort(1) >= 2, 0.0).reshape(rows, columns)


class Everything(nn.Module):
    """Each code, dense tensors of several dtypes, tied weights, an empty one and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps = nn.Parameter(sparse(96, 96))
        self.mask = nn.Parameter(sparse(60, 60, density=0.55))
        self.block = nn.Parameter(blocks(64, 64, 8, 8))
        self.nm = nn.Parameter(two_of_four(48, 48))
        self.dense = nn.Parameter(torch.randn(20, 20, generator=torch.Generator().manual_seed(1)))
        self.narrow = nn.Parameter(sparse(80, 40, dtype=torch.bfloat16))
        self.tied = self.gaps
        self.register_buffer("counts", sparse(64, 64).mul(100).to(torch.int64))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("zeros", torch.zeros(500))
        self.register_buffer("causal", torch.ones(40, 40, dtype=torch.bool).tril_(-30))
