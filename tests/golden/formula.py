"""A small net and its data, from integer arithmetic alone: the same numbers wherever they are built.

Nothing of ours is imported here, so that other people's code can train the same net.
"""

import torch
from torch import Tensor, nn

STEPS, WARMUP, FINETUNE = 50, 0.16, 0.2  # 8 steps of growing sparsity, masks fixed after 40
LR, MOMENTUM, DECAY = 0.05, 0.9, 1e-3


def numbers(*shape: int, seed: int) -> Tensor:
    """Between −0.47 and 0.53, no two alike in size among the first 1009."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return ((((i + 1) * 7919 + seed * 104_729) % 1009).double() / 1009 - 0.47).reshape(shape)


def net() -> nn.Sequential:
    """Three Linears of 16 × 12, 24 × 16 and 8 × 24: 768 weights, every side divisible by two."""
    model = nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8, bias=False)
    ).double()
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            p.copy_(numbers(*p.shape, seed=seed) * (1.5 if p.ndim == 2 else 0.1))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """16 examples in 8 classes: the signs of three inputs."""
    x = numbers(16, 12, seed=100 + step) * 3
    bits = (x[:, :3] > 0).long()
    return x, bits[:, 0] + 2 * bits[:, 1] + 4 * bits[:, 2]


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Cross entropy on the batch of a step."""
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x), y)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def weights_of(model: nn.Module) -> list[Tensor]:
    """The weights that are made sparse, in their order."""
    return [p.detach() for p in model.parameters() if p.ndim == 2]


def mask_of(weight: Tensor) -> str:
    """Where a weight is not zero, as hexadecimal digits."""
    bits = "".join("1" if x else "0" for x in (weight.reshape(-1) != 0).tolist())
    return f"{int(bits, 2):0{len(bits) // 4}x}"


def sums_of(weight: Tensor) -> list[float]:
    """Σw, Σw² and Σw·(position mod 97)."""
    w = weight.double().reshape(-1)
    place = (torch.arange(w.numel()) % 97).double()
    return [float(w.sum()), float((w * w).sum()), float((w * place).sum())]
