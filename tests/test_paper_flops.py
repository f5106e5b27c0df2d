"""The FLOP figures of the paper (Appendices E and F), from networks pruned as it prunes them.

It prints percentages with two digits; ours differ by less than one in the last of them. Its tool counted no LayerNorm then.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spartan
from spartan import Block, Flops
from spartan.problem.flops import FlopCount, flops
from tests.torchvision_cpu import torchvision

IMAGE = torch.zeros(1, 3, 224, 224)


def without_norms(count: FlopCount) -> FlopCount:
    """The count as the paper's tool had it."""
    return FlopCount(tuple(layer for layer in count.layers if layer.kind != "LayerNorm"))


def test_dense_networks() -> None:
    with torch.device("meta"):
        resnet, vit, image = torchvision.models.resnet50(), torchvision.models.vit_b_16(), torch.empty(1, 3, 224, 224)
    assert round(flops(resnet, image).dense / 1e9, 2) == 8.24
    assert round(without_norms(flops(vit, image)).dense / 1e9, 2) == 35.19


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_a_resnet_with_a_budget_of_5_percent_of_its_flops_costs_5_76(power: float) -> None:
    """Norms, activations and pooling come on top of the budget, whichever weights are gone."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    spartan.prune(model, 0.95, cost=Flops(IMAGE, value_power=power))
    count = flops(model, IMAGE)
    assert 100 * count.ratio == pytest.approx(5.76, abs=0.01)
    products = [layer for layer in count.layers if layer.kind in ("Conv2d", "Linear")]
    biases = 2 * 1000  # of the classifier
    budgeted = sum(x.sparse for x in products) - biases, sum(x.dense for x in products) - biases
    assert budgeted[0] / budgeted[1] == pytest.approx(0.05, abs=1e-5)


@pytest.mark.parametrize("side", [16, 32])
def test_a_vit_with_nine_tenths_of_its_weights_gone_costs_12_76(side: int) -> None:
    """Blocks of the encoder alone go, so that the whole model has a tenth of its weights left."""
    torch.manual_seed(0)
    model = torchvision.models.vit_b_16()
    nn.init.normal_(model.heads.head.weight)  # zero by default
    spartan.prune(model, 0.9, pattern=Block(side, side), include="encoder.layers.*", count="model")
    assert 100 * without_norms(flops(model, IMAGE)).ratio == pytest.approx(12.76, abs=0.01)
