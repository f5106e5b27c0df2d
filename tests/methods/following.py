"""A run beside its reference, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from spartan import Sparsifier
from tests.contract.cases import batch


def follow(
    model: nn.Module,
    sparsifier: Sparsifier,
    expected: Sequence[dict[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    zeros: bool = False,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """At every step compare the weights with those expected, tell the step and the masks, then train.

    Nothing that is not kept may be other than zero; with `zeros` nothing that is kept may be zero.
    """
    assert len(expected) >= 30
    sparsifier.attach(optimizer)
    for t, weights in enumerate(expected):
        masks = sparsifier.masks()
        for name, w in weights.items():
            found = model.get_parameter(name).detach()
            torch.testing.assert_close(found, w, rtol=0, atol=1e-10, msg=f"step {t}, {name}")
            assert not found[~masks[name]].any()
            assert not zeros or found[masks[name]].all()
        yield t, masks
        x, y = batch(t)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
