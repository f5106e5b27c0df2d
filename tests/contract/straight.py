"""One value in the forward pass, the gradient of another in the backward pass."""

from typing import Any

import torch
from torch import Tensor


class Straight(torch.autograd.Function):
    """One value in the forward pass, the gradient of another in the backward pass.

    Exact, where x + (value − x).detach() would round.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        """`value`."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """That of x."""
        return grads[0], None


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value` in the forward pass, the gradient of x in the backward pass."""
    return Straight.apply(x, value)
