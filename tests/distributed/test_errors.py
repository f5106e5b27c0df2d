"""What goes wrong on one process is said by all, and nobody waits for ever."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spartan import Block, Sparsifier
from tests.distributed.cases import Case, batch, shard, train
from tests.distributed.workers import on


def message(work) -> str:
    try:
        work()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def sharded(method: str = "spartan") -> tuple[Any, Sparsifier, Any]:
    case = Case(method)
    model = shard(case.model(), "fsdp")
    return (model, *case.sparsifier(model))


def one_bad_entry(rank: int) -> str:
    """NaN in one entry of one shard."""
    model, s, o = sharded()
    x, y = batch(0, "fsdp")
    nn.functional.cross_entropy(model(x), y).backward()
    if rank == 1:
        model.second.weight.grad.to_local()[0, 0] = float("nan")
    found = message(o.step)
    o.zero_grad()
    list(train(model, s, o, "fsdp", range(2)))  # and training may go on
    return found


def one_bad_weight(rank: int) -> str:
    """An update that overflows in one shard."""
    model, _, o = sharded("imp")
    x, y = batch(0, "fsdp")
    nn.functional.cross_entropy(model(x), y).backward()
    if rank == 1:
        model.first.weight.grad.to_local()[0, 0] = 1e30
    o.param_groups[0]["lr"] = 1e10
    return message(o.step)


def replicas(rank: int) -> str:
    """NaN in one process's batch reaches all through DDP, also one that was accumulated without sync."""
    case = Case("spartan")
    model: Any = shard(case.model(), "ddp")
    _, o = case.sparsifier(model)
    x, y = batch(0, "ddp")
    with model.no_sync():
        nn.functional.cross_entropy(model(x * (float("nan") if rank == 1 else 1.0)), y).backward()
    nn.functional.cross_entropy(model(x), y).backward()
    return message(o.step)


def changed(rank: int) -> str:
    """A weight that only one process finds changed."""
    model, _, _ = sharded()
    with torch.no_grad():
        model.head.weight.to_local().add_(1.0 if rank == 0 else 0.0)
    x, y = batch(0, "fsdp")
    return message(lambda: nn.functional.cross_entropy(model(x), y).backward())


def cut_block(rank: int) -> str:
    """Blocks of 4 rows on shards of 3."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4 * 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return message(lambda: Sparsifier(model, 0.5, 10, pattern=Block(4, 4)))


def settings(rank: int) -> str:
    """Arguments that are not the same everywhere, under DDP and in shards; alone, a process may have its own."""
    found = []
    for how in ("ddp", "fsdp"):
        for mine in (
            {"sparsity": 0.5 + 0.1 * rank}, {"total_steps": 10 + rank}, {"method": ("spartan", "imp")[rank]},
            {"include": ["first.*", "second.*"][: 2 - rank]}, {"pattern": (None, Block(1, 2))[rank]},
            {"cost": ({"*": 1.0}, None)[rank]}, {"min_density": 0.01 * rank}, {"warmup": (None, 0.1)[rank]},
        ):  # fmt: skip
            model = shard(Case("spartan").model(), how)
            given: dict[str, Any] = {"sparsity": 0.5, "total_steps": 10} | mine
            found.append(message(lambda model=model, given=given: Sparsifier(model, **given)))
    Sparsifier(Case("spartan").model(), 0.5 + 0.1 * rank, 10)
    return "\n".join(found)


def everything(rank: int) -> dict[str, str]:
    return {f.__name__: f(rank) for f in (one_bad_entry, one_bad_weight, replicas, changed, cut_block, settings)}


def test_every_process_raises_the_same_error() -> None:
    first, second = on(2, everything)
    assert first == second
    assert "the gradient of second.weight holds NaN or infinite values at step 0" in first["one_bad_entry"]
    assert "first.weight would hold NaN or infinite weights" in first["one_bad_weight"]
    assert "the gradient of first.weight holds NaN" in first["replicas"]
    assert "head.weight was changed outside the optimizer step" in first["changed"]
    assert "the border of a shard cuts a unit of Block(h=4, w=4) in 1.weight" in first["cut_block"]
    assert "exclude=['1.weight']" in first["cut_block"]
    told = first["settings"].split("\n")
    assert told[:8] == told[8:]
    assert told[0] == (
        "sparsity=0.5 in process 0 and sparsity=0.6 in process 1, which train one model: build the sparsifier with the same "
        "arguments in every process"
    )
    names = ("sparsity", "total_steps", "method", "include", "pattern", "cost", "min_density", "warmup")
    assert [line.partition("=")[0] for line in told[:8]] == list(names)


def never_arrives(rank: int) -> str:
    model, _, o = sharded()
    x, y = batch(0, "fsdp")
    nn.functional.cross_entropy(model(x), y).backward()
    if rank == 1:
        time.sleep(6)
        return ""
    return message(o.step)


def never_builds(rank: int) -> str:
    model = shard(Case("spartan").model(), "ddp")
    if rank == 1:
        time.sleep(5)
        return ""
    return message(lambda: Sparsifier(model, 0.5, 10))


def test_a_sparsifier_that_one_process_does_not_build_is_a_time_out() -> None:
    first, _ = on(2, never_builds, timeout=3.0)
    assert "not all of them came" in first
    assert "every process must make (Sparsifier()" in first


def test_a_process_that_never_arrives_is_a_time_out() -> None:
    first, _ = on(2, never_arrives, timeout=3.0)
    assert "the sparsifier waited for 2 processes" in first
    assert "time-out of torch.distributed.init_process_group" in first
