"""At the end of a backward gradients are those for θ, on many processes as on one, or the step turns them."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.cases import Case, batch, shard, train, weights, whole
from tests.distributed.workers import on

CASE = Case("spartan")


def seen(how: str, micro: int, views: bool = False) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The gradients that clipping sees in each of some steps, and the weights in the end."""
    model: Any = CASE.model()
    model = (
        nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views) if how == "ddp" else shard(model, how)
    )
    s, o = CASE.sparsifier(model)
    list(train(model, s, o, how, range(6)))
    found = []
    for step in range(6, 10):
        o.zero_grad(set_to_none=not views)
        x, y = batch(step, how)
        n = len(x) // micro
        for i in range(micro):
            rows = slice(i * n, (i + 1) * n)
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) / micro).backward()
        grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        found.append({name: whole(g) for name, g in grads.items() if g is not None})
        o.step()
    return found, weights(model)


WAYS = [("ddp", 1, False), ("ddp", 2, False), ("ddp", 2, True), ("fsdp", 1, False), ("fsdp", 2, False)]


def compared(rank: int, expected: list[dict[str, Tensor]], ends: dict[str, Tensor]) -> list[str]:
    wrong = []
    for how, micro, views in WAYS:
        found, last = seen(how, micro, views)
        for step, (a, b) in enumerate(zip(expected, found, strict=True)):
            far = [n for n in a if not torch.allclose(a[n], b[n], rtol=1e-9, atol=1e-12)]
            if far:
                wrong.append(f"{how}, {micro} micro-batches, views {views}: {far} differ at step {step}")
        if any(not torch.allclose(ends[n], last[n], rtol=1e-9, atol=1e-12) for n in ends):
            wrong.append(f"{how}, {micro} micro-batches, views {views}: weights differ")
    return wrong


def test_what_clipping_sees_is_what_one_process_sees() -> None:
    assert on(2, compared, *seen("alone", 1)) == [[], []]


def unsynchronised(rank: int) -> list[bool]:
    """Under `no_sync` gradients stay those for w until the backward that reduces them."""
    model: Any = shard(CASE.model(), "ddp")
    s, o = CASE.sparsifier(model)
    list(train(model, s, o, "ddp", range(6)))
    fresh = []
    for step in range(6, 9):
        x, y = batch(step, "ddp")
        for i in range(2):
            with model.no_sync() if i == 0 else contextlib.nullcontext():
                nn.functional.cross_entropy(model(x), y).backward()
            fresh.append(s._run.gradients.fresh(0))
        o.step()
        o.zero_grad()
    return fresh


def test_under_no_sync_they_are_left_alone() -> None:
    assert on(2, unsynchronised) == [[True, False] * 3] * 2
