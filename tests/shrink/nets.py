"""Small nets of random structure, with random channels dead."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIZES = (4, 6, 8, 12)


class TwoHalves(nn.Module):
    """Something between two reshapes: the channels as heads, whose number is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.num_heads, -1)).transpose(0, 1).relu().transpose(0, 1).flatten(1, 2)


class Squeeze(nn.Module):
    """Squeeze and excite."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.ReLU(), nn.Conv2d(4, channels, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3), keepdim=True))


class Halved(nn.Module):
    """One half of the channels times the other's sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return a * b.sigmoid()


class RandomNet(nn.Module):
    """Steps, each of which reads one or two of the feature maps before it; the last one is classified."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random: Any = random.Random(seed)
        self.channels = self.random.choice([2, 3])
        # Of each feature map: channels, width, what it is read from and how.
        self.maps: list[tuple[int, int]] = [(self.channels, 16)]
        self.steps: list[tuple[tuple[int, ...], str]] = []
        self.layers = nn.ModuleDict()
        for _ in range(self.random.randint(2, 16)):
            self._add_step()
        self._drop_unused()
        channels, width = self.maps[-1]
        self.flat = self.random.random() < 0.5
        self.head = nn.Linear(channels * width**2 if self.flat else channels, 5)
        self.tail = nn.Sequential(nn.ReLU(), nn.Linear(5, 6, bias=False), nn.GELU(), nn.Linear(6, 3))
        self.random = None

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor | None] = [x]
        for number, (reads, kind) in enumerate(self.steps):
            if kind == "unused":
                maps.append(None)
                continue
            inputs = [maps[i] for i in reads]
            step: Any = self.layers[str(number)] if kind == "layer" else getattr(self, f"_{kind}")
            maps.append(step(*inputs))
        last = maps[-1]
        assert last is not None
        return self.tail(self.head(last.flatten(1) if self.flat else last.mean((2, 3))))

    def _plus(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def _times(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def _beside(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], 1)

    def _step(
        self, reads: tuple[int, ...], kind: str, channels: int, width: int, layer: nn.Module | None = None
    ) -> None:
        if layer is not None:
            self.layers[str(len(self.steps))] = layer
        self.steps.append((reads, kind))
        self.maps.append((channels, width))

    def _add_step(self) -> None:
        pick = self.random
        at = len(self.maps) - 1 if pick.random() < 0.7 else pick.randrange(len(self.maps))
        c, w = self.maps[at]
        o, bias, even = pick.choice(SIZES), pick.random() < 0.5, c % 2 == 0
        kernel, padding = pick.choice([1, 3, 3]), pick.choice([0, 1])
        shortest = w - kernel + 1 + 2 * padding * (kernel > 1)
        mode: Any = pick.choice(["zeros", "zeros", "reflect"])
        makers: dict[str, Callable[[], nn.Module]] = {
            "conv": lambda: nn.Conv2d(c, o, kernel, padding=padding * (kernel > 1), bias=bias, padding_mode=mode),
            "norm": lambda: nn.BatchNorm2d(c, affine=pick.random() < 0.8),
            "act": lambda: pick.choice([nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Tanh])(),
            "depthwise": lambda: nn.Conv2d(c, c, 3, padding=1, groups=c, bias=bias),
            "prelu": lambda: nn.PReLU(c),
            "squeeze": lambda: Squeeze(c),
            "instance": lambda: nn.InstanceNorm2d(c, affine=bias),
        }
        makers |= {"pool": lambda: pick.choice([nn.MaxPool2d, nn.AvgPool2d])(2)} if w >= 6 else {}
        makers |= {"up": lambda: nn.ConvTranspose2d(c, 6, 2, 2, bias=bias)} if w <= 8 else {}
        if even:
            makers |= {
                "groups": lambda: nn.Conv2d(c, 8, 1, groups=2, bias=bias),
                "group norm": lambda: nn.GroupNorm(2, c),
                "glu": lambda: nn.GLU(1),
                "halved": Halved,
                "two halves": TwoHalves,
            }
        kind = pick.choice(["conv", "conv", "conv", "norm", "act", "plus", "plus", "times", "beside", *makers])
        same = [i for i, shape in enumerate(self.maps) if shape == (c, w) and i != at]
        if kind == "beside":
            other = pick.choice([i for i, shape in enumerate(self.maps) if shape[1] == w])
            self._step((at, other), kind, c + self.maps[other][0], w)
        elif kind in ("plus", "times"):
            if not same:
                self._step((at,), "layer", c, w, nn.Conv2d(c, c, 3, padding=1, bias=False))
                same = [len(self.maps) - 1]
            self._step((at, pick.choice(same)), kind, c, w)
        elif kind != "conv" or shortest >= 3:
            channels = {"conv": o, "up": 6, "groups": 8, "glu": c // 2, "halved": c // 2}.get(kind, c)
            width = {"conv": shortest, "up": 2 * w, "pool": w // 2}.get(kind, w)
            self._step((at,), "layer", channels, width, makers[kind]())

    def _drop_unused(self) -> None:
        """What leads nowhere: tracing does not see it, and so no channel that it reads could go."""
        live = {len(self.steps)}
        for number in reversed(range(len(self.steps))):
            if number + 1 in live:
                live |= set(self.steps[number][0])
            else:
                self.steps[number] = ((), "unused")
                if str(number) in self.layers:
                    del self.layers[str(number)]


@torch.no_grad()
def kill_channels(model: nn.Module, share: float, seed: int) -> None:
    """Set about this share of rows and of columns to zero, and of biases and norms; the norms' statistics are drawn."""
    generator = torch.Generator().manual_seed(seed)

    def some(size: int, share: float) -> Tensor:
        return (torch.rand(size, generator=generator) < share).nonzero()[:, 0]

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.ConvTranspose2d):
            for dim in (0, 1):
                module.weight.index_fill_(dim, some(module.weight.shape[dim], share), 0.0)
            if module.bias is not None:
                module.bias[some(len(module.bias), 0.5)] = 0.0
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.InstanceNorm2d) and module.weight is not None:
            module.weight.normal_(generator=generator)
            module.bias.normal_(generator=generator)
            module.weight[some(len(module.weight), share / 2)] = 0.0
            module.bias[some(len(module.weight), 0.4)] = 0.0


def largest_difference(a: Tensor, b: Tensor) -> float:
    """As a share of the largest entry."""
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))


def seeded_model(model: Any, seed: int = 0) -> Any:
    """In eval mode, with biases and statistics that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias") or x.ndim == 1:
                x += 0.2 * torch.randn(x.shape, generator=generator)
        for name, x in model.named_buffers():
            if name.endswith("running_mean"):
                x.copy_(0.3 * torch.randn(x.shape, generator=generator))
            elif name.endswith("running_var"):
                x.copy_(0.5 + torch.rand(x.shape, generator=generator))
    return model.eval()
