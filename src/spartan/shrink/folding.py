"""Hands constants that are cut out over to what stays: to a bias, or to the weights of another constant.

Exact: with x_c the constants that go, W x + b = W' x' + (b + Σ_c W_c x_c) for what a bias can say; and where it cannot,
because there is none or because a convolution's padding puts zeros beside the constant, W_c x_c = (W_c x_c / x_k) x_k for
a constant x_k that stays and is padded in the same way.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import Node

from spartan.shrink.axes import Ties, WeightedSum


@torch.no_grad()
def fold(ties: Ties, leaves: Mapping[Node, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that take constants over, by name, with these in them; in their old sizes."""
    changed: dict[str, Tensor] = {}
    for reading in (rule for rule in ties.rules if isinstance(rule, WeightedSum)):
        gone = reading.constants_read() & ~reading.inputs.kept
        if not bool(gone.any()):
            continue
        name = leaves[reading.bias_node if reading.into_bias else reading.weight_node]
        old = changed.get(name, tensors[name]).detach()
        new = changed[name] = old.clone()
        if reading.into_bias:
            new += _by_output(reading, gone).to(new)
        else:
            sizes = torch.where(reading.inputs.kept & ~reading.varies, reading.constant.abs(), 0)
            carrier = int(sizes.argmax())
            ratios = torch.where(gone, reading.constant / reading.constant[carrier], 0)
            columns = reading.turned(new)  # a view of it
            added = torch.tensordot(columns.double(), ratios.to(columns.device), ([1], [0]))
            columns[:, carrier] += added.to(new)
    return changed


def _by_output(reading: WeightedSum, gone: Tensor) -> Tensor:
    """What the constants that go add to each output."""
    weight = reading.turned(reading.weight).double()
    sums = weight.reshape(*weight.shape[:2], -1).sum(2).unflatten(0, (reading.groups, -1))
    constants = torch.where(gone, reading.constant, 0).to(sums).reshape(reading.groups, -1)
    return torch.einsum("gi,goi->go", constants, sums).reshape(-1)
