"""The two ends of the sharpness: β = 0 is Top-KAST after rescaling, β → ∞ with a whole-unit budget is IMP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from spartan import IMP, Block, Sparsifier, Spartan, TopKAST, Unstructured, constant
from tests.contract.cases import Net, backward

STEPS, SPARSITY = 20, 0.75


def runs(
    first: Any, second: Any, scale: float, lr: tuple[float, float], pattern: Any
) -> list[tuple[nn.Module, Any, Any]]:
    """Two runs from the same weights, the second's dense weights scaled; constant density, plain SGD."""
    torch.manual_seed(0)
    one = Net().double()
    two = copy.deepcopy(one)
    with torch.no_grad():
        for p in two.parameters():
            if p.ndim > 1:
                p.mul_(scale)
    found: list[tuple[nn.Module, Any, Any]] = []
    for model, method, rate in zip((one, two), (first, second), lr, strict=True):
        sparsifier = Sparsifier(model, SPARSITY, 100, method, pattern=pattern, warmup=0.0, finetune=0.0)
        weights = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.SGD([{"params": weights, "lr": rate}, {"params": others, "lr": lr[0]}])
        found.append((model, sparsifier.attach(optimizer), optimizer))
    return found


def compare(found: list[tuple[nn.Module, Any, Any]], atol: float) -> None:
    moved, before = False, found[0][1].masks()
    for step in range(STEPS):
        for model, _, optimizer in found:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        (one, a, _), (two, b, _) = found
        for name, mask in a.masks().items():
            assert torch.equal(mask, b.masks()[name]), f"step {step}: {name} has another support"
            moved |= not torch.equal(mask, before[name])
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=atol)
    assert moved, "a support that never changes shows nothing"


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2)])
def test_flat_masks_are_top_kast(pattern: Any) -> None:
    """w = θ·k/C: started from θ·C/k with learning rate lr·(C/k)², support and w are Top-KAST's."""
    c_over_k = 1.0 / (1.0 - SPARSITY)
    found = runs(TopKAST(), Spartan(beta=constant(0.0)), c_over_k, (0.3, 0.3 * c_over_k**2), pattern)
    compare(found, atol=1e-11)


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2)])
def test_infinitely_sharp_masks_are_imp(pattern: Any) -> None:
    compare(runs(IMP(), Spartan(beta=float("inf")), 1.0, (1.0, 1.0), pattern), atol=0.0)


def test_very_sharp_masks_are_nearly_imp() -> None:
    """At finite β only units within 1/β of the threshold differ; with gaps much wider than that, none do."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).double()
    with torch.no_grad():
        model.weight.copy_((torch.randperm(256).double() + 1).reshape(16, 16) / 256)
    other = copy.deepcopy(model)
    pairs = []
    for m, method in ((model, IMP()), (other, Spartan(beta=1e6))):
        s = Sparsifier(m, 0.75, 100, method, warmup=0.0, finetune=0.0)
        pairs.append((m, s, torch.optim.SGD(m.parameters(), lr=1e-4)))
        s.attach(pairs[-1][2])
    for step in range(STEPS):
        x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for m, _, optimizer in pairs:
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model.weight, other.weight, rtol=1e-9, atol=1e-12)
