"""Pruning with calibration on a CUDA device: as on a CPU, and within a memory that does not hold the model."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import spartan
from spartan import NM, Block
from spartan.gpt import GPT
from tests.prune.test_criteria import seeded

pytestmark = pytest.mark.gpu


def batches(count: int = 2, length: int = 16) -> list[Any]:
    return [torch.randint(256, (2, length), generator=torch.Generator().manual_seed(i)) for i in range(count)]


@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("pattern", [None, NM(2, 4), Block(4, 4)], ids=str)
def test_as_on_a_cpu(criterion: str, pattern: Any) -> None:
    torch.manual_seed(0)
    model = GPT(context=16, layers=2, width=32, heads=2).double()
    options: dict[str, Any] = {"criterion": criterion, "pattern": pattern, "calibration": batches()}
    expected = spartan.prune(copy.deepcopy(model), 0.5, **options)
    there = spartan.prune(copy.deepcopy(model).cuda(), 0.5, **options)
    moved, report = spartan.prune(copy.deepcopy(model), 0.5, device="cuda", report=True, **options)
    assert report.device == "cuda:0"
    assert report.peak_bytes
    for p, q, r in zip(expected.parameters(), there.parameters(), moved.parameters(), strict=True):
        assert q.is_cuda
        assert not r.is_cuda
        torch.testing.assert_close(p, q.cpu())
        torch.testing.assert_close(p, r)
    assert not any(b.is_cuda for b in moved.buffers())


def test_a_channels_last_convolution() -> None:
    """Single weights stand in the order of memory on a GPU; rows are rows all the same."""
    x = torch.randn(2, 8, 9, 9, dtype=torch.float64)
    for criterion in ("wanda", "sparsegpt"):
        conv = seeded(nn.Conv2d(8, 4, 3))
        expected = spartan.prune(copy.deepcopy(conv), 0.5, criterion=criterion, calibration=[x])
        found = conv.cuda().to(memory_format=torch.channels_last)
        spartan.prune(found, 0.5, criterion=criterion, calibration=[x])
        torch.testing.assert_close(found.weight.cpu(), expected.weight)


def fits(model: nn.Module) -> bool:
    """Whether the whole model has room on the device."""
    try:
        copy.deepcopy(model).cuda()
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
def test_a_decoder_that_does_not_fit(criterion: str) -> None:
    """The model has one and a half times the memory that torch may have on the device."""
    model = GPT(context=64, layers=24, width=768, heads=12)
    size = sum(4 * p.numel() for p in model.parameters())
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / 1.5 / total), 0)
    try:
        assert not fits(model)
        gc.collect()
        torch.cuda.empty_cache()
        _, report = spartan.prune(
            model, 0.5, criterion=criterion, calibration=batches(4, 64), device="cuda", report=True, exclude="head.*"
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert report.peak_bytes is not None
    assert report.peak_bytes < size / 1.5
    assert len(report.blocks) == 24
    spartan.verify(model, 0.5, budget="uniform", exclude="head.*")
