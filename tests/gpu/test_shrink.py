"""Shrinking on a CUDA device: the same cuts as on a CPU, and the same outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from spartan.shrink import shrink
from tests.shrink.nets import RandomNet, kill_channels, largest_difference, seeded_model
from tests.shrink.test_attention import kill_heads

pytestmark = pytest.mark.gpu


def encoder() -> Any:
    torch.manual_seed(0)
    model = seeded_model(nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 6, 40, batch_first=True), 2)).double()
    for layer in model.layers:
        kill_heads(layer.self_attn.in_proj_weight, 3, 6, 0, 1, 4, 5)
        layer.linear1.weight.data[::2] = 0.0
    return model


@pytest.mark.filterwarnings("ignore:nothing can be cut")
@pytest.mark.parametrize("seed", [None, 0, 2, 5, 8])
def test_as_on_a_cpu(seed: int | None) -> None:
    model = encoder() if seed is None else RandomNet(seed).double().eval()
    x = torch.randn(2, 7, 24) if seed is None else torch.randn(2, model.channels, 16, 16)
    if seed is not None:
        kill_channels(model, 0.5, seed)
    x = x.double()
    expected = shrink(model, x)
    smaller, report = shrink(copy.deepcopy(model).cuda(), x, report=True)  # inputs go where the model is
    assert report.refused == ()
    assert {k: v.shape for k, v in smaller.state_dict().items()} == {
        k: v.shape for k, v in expected.state_dict().items()
    }
    assert all(p.is_cuda for p in smaller.parameters())
    with torch.no_grad():
        assert largest_difference(model(x), smaller(x.cuda()).cpu()) < 1e-10
