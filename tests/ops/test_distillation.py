"""The distance to a teacher's scores."""

from __future__ import annotations

import math

import pytest
import torch

from spartan import distillation_loss


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, torch.tensor(4.0)])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (7,)])
def test_as_by_hand(shape: tuple[int, ...], temperature: float) -> None:
    torch.manual_seed(0)
    scores, teacher = torch.randn(shape).double().requires_grad_(), torch.randn(shape).double()
    total, t = 0.0, float(temperature)
    for mine, its in zip(scores.detach().reshape(-1, 7).tolist(), teacher.reshape(-1, 7).tolist(), strict=True):
        p = [math.exp(x / t) / sum(math.exp(y / t) for y in its) for x in its]
        q = [math.exp(x / t) / sum(math.exp(y / t) for y in mine) for x in mine]
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    loss = distillation_loss(scores, teacher.requires_grad_(), temperature)
    assert loss.item() == pytest.approx(t * t * total / max(1, scores.numel() // 7), rel=1e-12)
    loss.backward()
    assert scores.grad is not None
    assert teacher.grad is None


def test_half_precision_is_computed_in_float32() -> None:
    scores = torch.randn(4, 100, dtype=torch.bfloat16)
    assert distillation_loss(scores, scores + 1).dtype == torch.float32
    assert distillation_loss(scores, scores.clone()).item() == 0.0


def test_bad_arguments() -> None:
    x = torch.zeros(2, 3)
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"temperature=.*; a positive number is needed"):
            distillation_loss(x, x, temperature)
    with pytest.raises(ValueError, match=r"scores are \(2, 3\) and the teacher's \(3, 3\)"):
        distillation_loss(x, torch.zeros(3, 3))
