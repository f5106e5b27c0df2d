"""Mixes the images of a batch by mixup and CutMix, where the batch is."""

import torch
from torch import Tensor


def mix_batch(
    x: Tensor, y: Tensor, classes: int, mixup: float, cutmix: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Images [B, C, H, W] mixed with their neighbours in the batch, and soft targets [B, classes] in the same proportion.

    mixup (Zhang et al., 2018) with λ ~ Beta(mixup, mixup), CutMix (Yun et al., 2019) with λ ~ Beta(cutmix, cutmix); 0
    turns one off, and where both are on a coin decides for the whole batch. What comes out depends on the arguments and
    the generator's state alone; nothing waits for the device, whichever device the generator is on.
    """
    targets = (y[:, None] == torch.arange(classes, device=y.device)).to(x.dtype)
    if not (mixup or cutmix):
        return x, targets
    height, width = x.shape[-2:]
    # How much of its own image every pixel keeps; by mixup, λ everywhere.
    if mixup and cutmix:
        coin = torch.rand((), generator=generator, device=generator.device) < 0.5
        everywhere = _beta(mixup, generator).reshape(1, 1)
        weight = torch.where(coin, everywhere, _cutmix_weight(cutmix, height, width, generator))
    elif cutmix:
        weight = _cutmix_weight(cutmix, height, width, generator)
    else:
        weight = _beta(mixup, generator).reshape(1, 1)
    share = weight.mean().to(x.device, x.dtype, non_blocking=True)
    weight = weight.to(x.device, x.dtype, non_blocking=True)
    # The batch is shuffled already, so the neighbour is as good as any partner.
    return torch.lerp(x.roll(1, 0), x, weight), torch.lerp(targets.roll(1, 0), targets, share)


def _cutmix_weight(alpha: float, height: int, width: int, generator: torch.Generator) -> Tensor:
    """How much of its own image every pixel keeps [H, W]: 0 in a box of about 1 − λ of the area, 1 around it."""
    device = generator.device
    half = 0.5 * (1 - _beta(alpha, generator)).sqrt()
    centre = torch.rand(2, generator=generator, device=device)
    inside = []
    for side, where in ((height, centre[0]), (width, centre[1])):
        middle, reach = (where * side).floor(), (half * side).floor()
        pixel = torch.arange(side, device=device)
        inside.append((pixel >= middle - reach) & (pixel < middle + reach))
    return (~(inside[0][:, None] & inside[1])).double()


def _beta(alpha: float, generator: torch.Generator) -> Tensor:
    """λ ~ Beta(α, α), in logarithms because both gamma variates underflow where α is small."""
    shape = torch.full((2,), alpha + 1.0, dtype=torch.float64, device=generator.device)
    uniform = torch.rand(2, dtype=torch.float64, generator=generator, device=generator.device)
    # Gamma(α) = Gamma(α + 1) · U^(1/α)
    logs = torch._standard_gamma(shape, generator=generator).log() + (1 - uniform).log() / alpha
    return torch.sigmoid(logs[0] - logs[1])
