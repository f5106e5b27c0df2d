"""The kernels on weights that stand otherwise than a Linear's: inputs × outputs, and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spartan import NM, Block, Channel, Sparsifier, Unstructured
from spartan.problem.patterns import Pattern
from tests.foreign import Conv1D, Experts
from tests.solvers.triton import DEVICE

PATTERNS = [Unstructured(), Block(2, 4), Block(1, -1), Block(-1, 2), Channel(), Channel("in"), NM(2, 4)]


def run(kernels: str, pattern: Pattern, transposed: bool) -> tuple[nn.Module, Sparsifier]:
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(12, 16), Experts(3, 12, 8, transposed)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    options: dict[str, Any] = {"pattern": pattern, "warmup": 0.34, "finetune": 0.34, "kernels": kernels}
    sparsifier = Sparsifier(model, 0.5, 6, **options).attach(optimizer)
    rng = torch.Generator().manual_seed(1)
    for _ in range(6):
        model(torch.randn(5, 16, generator=rng).to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, sparsifier


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_a_run_is_that_of_plain_torch(pattern: Pattern, transposed: bool) -> None:
    plain, of_plain = run("torch", pattern, transposed)
    fast, of_fast = run("triton", pattern, transposed)
    for (key, mask), other in zip(of_plain.masks().items(), of_fast.masks().values(), strict=True):
        assert torch.equal(mask, other), key
    for a, b in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_has_no_kernels_says_so() -> None:
    model = nn.Sequential(Experts(3, 12, 8, transposed=True)).to(DEVICE)
    assert "by torch (0.up is experts of inputs × outputs)" in repr(
        Sparsifier(model, 0.5, 6, pattern=Block(2, 2), kernels="triton")
    )
