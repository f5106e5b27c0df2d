"""A net, its data and what every loop has to show."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 32  # optimizer steps of a run
SPARSITY = 0.9


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(256, 32, generator=g)
    return TensorDataset(x, (x @ torch.randn(32, 4, generator=g)).argmax(1))


def loader(batch: int = 16) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data(), batch)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
