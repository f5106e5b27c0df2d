"""What does the work of one group faster than plain torch, in place and without tensors as large as its weights.

Where a run asks many groups for the same, `put` and what follows it may run only after all have been asked: who calls
them from `write_fast` or `transform_fast` must not look at parameters or gradients afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual


class Engine(ABC):
    """Masks, weights and gradients of one group, from its dense weights θ to the parameters of the model."""

    # Whether other scores than those of θ can be ranked on the device as well.
    ranks_anything: ClassVar[bool] = False
    # Whether a team may launch its kernels together with those of other groups.
    joins: ClassVar[bool] = False
    # Whether a missing gradient may be taken as zeros that are written to; else it is made only if it is not zero.
    fills_in: ClassVar[bool] = True

    @abstractmethod
    def has(self, thetas: Sequence[Tensor]) -> bool:
        """Whether these are the dense weights that it reads, and not something computed from them."""

    def scores(self) -> list[Tensor] | None:
        """u of every unit as it is seen here, where plain torch may round it otherwise."""
        return None

    @abstractmethod
    def choose(self, k: float, beta: float | None) -> tuple[Threshold, Dual | None]:
        """The threshold of the units of largest magnitude that fit k, and with a β the soft mask."""

    @abstractmethod
    def restore(self, threshold: Threshold, dual: Dual | None) -> tuple[Threshold, Dual | None]:
        """Go on from masks that were saved."""

    @abstractmethod
    def put(self) -> None:
        """θ into the parameters."""

    @abstractmethod
    def take(self) -> None:
        """θ from the parameters."""

    @abstractmethod
    def project(self, soft: bool) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters."""

    @abstractmethod
    def through_mask(self, grads: Sequence[Tensor | None]) -> None:
        """Gradients through the soft mask, in place."""

    @abstractmethod
    def where_kept(self, grads: Sequence[Tensor | None]) -> None:
        """Gradients zero where not kept, in place."""

    def project_stored(self, masks: Sequence[Tensor]) -> bool:
        """w = [kept] ⊙ θ into the parameters, from masks of bools as methods keep them; False where it cannot."""
        return False

    def where_stored(self, grads: Sequence[Tensor | None], masks: Sequence[Tensor]) -> bool:
        """Gradients zero where such masks are, in place; False where it cannot."""
        return False

    @abstractmethod
    def check(self, grads: Sequence[Tensor | None]) -> None:
        """Name the first gradient that is not finite, and take them all away if there is one."""


class Rounded(torch.autograd.Function):
    """The same numbers as another computation rounds them, with the gradient of this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: Tensor) -> Tensor:
        """`like`."""
        return like.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """That of x."""
        return grads[0], None
