"""The ways to train that DDP and FSDP2 offer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import spartan
from spartan import Flops, Sparsifier, prune
from tests.distributed.cases import STEPS, Case, batch, run, shard, train, weights, whole
from tests.distributed.workers import on

CASE = Case("spartan")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    close = all(float((a[n] - b[n]).abs().max()) <= 1e-12 for n in a)
    return close and all(torch.equal(a[n] != 0, b[n] != 0) for n in a)


def accumulated(rank: int, how: str) -> bool:
    """Two halves of a process's batch, the first without synchronisation, are one batch."""
    expected = run(CASE, "alone")[0][-1]
    model: Any = shard(CASE.model(), how)
    _, o = CASE.sparsifier(model)
    for step in range(STEPS):
        x, y = batch(step, how)
        n = len(x) // 2
        for i, half in enumerate((slice(0, n), slice(n, None))):
            if how == "ddp":
                model.require_backward_grad_sync = i == 1  # what no_sync() does
            else:
                model.set_requires_gradient_sync(i == 1)
            (nn.functional.cross_entropy(model(x[half]), y[half]) / 2).backward()
        o.step()
        o.zero_grad()
    return same(expected, weights(model))


def accumulated_in_a_closure(rank: int) -> bool:
    """The same, where the step is given the second half as a closure, as Lightning does."""
    expected = run(CASE, "alone")[0][-1]
    model: Any = shard(CASE.model(), "ddp")
    _, o = CASE.sparsifier(model)
    for step in range(STEPS):
        x, y = batch(step, "ddp")
        n = len(x) // 2

        def half(x: Tensor = x[n:], y: Tensor = y[n:]) -> float:
            loss = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
            return loss.item()

        with model.no_sync():
            half(x[:n], y[:n])
        o.step(half)
        o.zero_grad()
    return same(expected, weights(model))


def static_graph(rank: int) -> bool:
    expected = run(CASE, "alone")[0][-1]
    model = DistributedDataParallel(CASE.model(), static_graph=True)
    s, o = CASE.sparsifier(model)
    return same(expected, list(train(model, s, o, "ddp"))[-1])


def compiled(rank: int) -> bool:
    expected = run(CASE, "alone")[0][-1]
    model = DistributedDataParallel(CASE.model())
    s, o = CASE.sparsifier(model)
    fast: Any = torch.compile(model, backend="aot_eager")
    return same(expected, [w for _ in train(fast, s, o, "ddp") for w in (weights(model),)][-1])


def uneven_inputs(rank: int) -> bool:
    """Process 1 has one batch less. Nobody may go on without it: refused at the first backward, or ended together."""
    model: Any = shard(CASE.model(), "ddp")
    s, o = CASE.sparsifier(model)
    before, told = weights(model), []
    for how in ({}, {"throw_on_early_termination": True}):
        try:
            with model.join(**how):
                list(train(model, s, o, "ddp", range(4 - rank)))
        except RuntimeError as error:
            told.append(str(error))
        if not how:
            o.zero_grad()
            refused = same(before, weights(model)) and s.stats.step == 0
    dist.barrier()
    return refused and "DDP's join" in told[0] and len(told) == 2 and "join" not in told[1] and s.stats.step == 3


def options(rank: int, **kwargs: Any) -> bool:
    return same(run(CASE, "alone")[0][-1], run(CASE, "fsdp", **kwargs)[0][-1])


def after_evaluation(rank: int) -> bool:
    """A forward pass without gradients leaves FSDP2's root with whole weights: they must not hide the shards."""
    expected = run(CASE, "alone")[0][-1]
    model: Any = shard(CASE.model(), "fsdp", reshard_after_forward=False)
    s, o = CASE.sparsifier(model)
    for step in range(STEPS):
        x, y = batch(step, "fsdp")
        with torch.no_grad():
            model(x)
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            model(x)
        o.step()
        o.zero_grad()
        with torch.no_grad():
            model(x)
        s.stats  # noqa: B018
    s.load_state_dict(s.state_dict())
    return same(expected, weights(model))


def half_precision(rank: int, backend: str) -> bool:
    """float32 shards, bf16 computation, torch.compile: exactly the asked number of weights in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 33), nn.ReLU(), nn.Linear(33, 16))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    s = Sparsifier(model, 0.9, STEPS)
    o = torch.optim.AdamW(model.parameters(), lr=1e-2)
    s.attach(o)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = torch.compile(model, backend=backend)
        for step in range(STEPS):
            x, _ = batch(step, "fsdp")
            loss = fast(x.float()).float().square().mean()
            loss.backward()
            s.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            o.step()
            o.zero_grad()
    s.finalize()
    kept = sum(int((whole(p) != 0).sum()) for n, p in model.named_parameters() if n.endswith("weight"))
    total = 12 * 33 + 33 * 16
    return bool(torch.isfinite(loss)) and kept == int(total * 0.1 + 1e-9)


def insured(rank: int) -> bool:
    """Should a process find another threshold than process 0, it takes that of process 0."""
    model: Any = shard(CASE.model(), "ddp")
    s, o = CASE.sparsifier(model)
    list(train(model, s, o, "ddp", range(5)))
    (solver,) = s._run.weights.solving
    solver.theta.views[0].add_(1e-9 * rank)
    list(train(model, s, o, "ddp", range(5, 6)))
    mine = torch.cat((solver.a.value, solver.dual.center, solver.dual.offset))
    first = mine.clone()
    dist.broadcast(first, 0)
    alone = solver.select(solver.k, solver.scores())
    return torch.equal(mine, first) and bool(alone.value != solver.a.value) == (rank == 1)


def bytes_sent(method: str, width: int) -> list[int]:
    """For the masks of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    s = Sparsifier(model, 0.9, STEPS, method)
    o = torch.optim.SGD(model.parameters(), lr=0.1)
    s.attach(o)
    found = []
    for step in range(STEPS):
        model(batch(step, "fsdp")[0].float()).square().mean().backward()
        o.step()
        o.zero_grad()
        found.append(s.stats.bytes_sent)
    return found


def little_is_sent(method: str) -> bool:
    """The same for a model and one a hundred times as large, up to passes and ties, and never more than 64 KiB."""
    small, large = bytes_sent(method, 32), bytes_sent(method, 3200)
    little = all(0 < n <= 65536 for n in small + large) and max(large) <= max(small) + 4096
    return little and (method == "paced" or large[-1] < 256)  # where masks are fixed in the end: flags only


def one_shot(rank: int) -> bool:
    """Pruning, with a FLOP cost that was counted before sharding."""
    example = torch.zeros(1, 12, dtype=torch.float64)
    model, expected = CASE.model(), CASE.model()
    costs = Flops(example).table(model)
    prune(expected, 0.6, cost=Flops(example))
    prune(shard(model, "fsdp"), 0.6, cost=costs)
    return same(weights(expected), weights(model))


def refused(rank: int) -> bool:
    """FLOPs cannot be counted by a process that holds a part of each layer."""
    try:
        prune(shard(CASE.model(), "fsdp"), 0.6, cost=Flops(torch.zeros(1, 12, dtype=torch.float64)))
    except ValueError as error:
        return "Count before sharding" in str(error)
    return False


def masks(rank: int) -> bool:
    """Masks and the histogram of all shards."""
    (_, one), (_, many) = run(CASE, "alone"), run(CASE, "fsdp")
    kept = all(torch.equal(keep, whole(many.masks()[name])) for name, keep in one.masks().items())
    return kept and one.mask_histogram() == many.mask_histogram()


def created_state(how: str) -> tuple[bool, dict[str, Tensor]]:
    """torch.distributed.checkpoint makes a step of its own to have state, which is none of ours; then all goes on."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model: Any = shard(CASE.model(), how)
    s, o = CASE.sparsifier(model)
    before, dense = weights(model), {n: whole(x["theta"]).clone() for n, x in s.state_dict()["weights"].items()}
    found = get_state_dict(model, o)
    set_state_dict(model, o, model_state_dict=found[0], optim_state_dict=found[1])
    after = {n: whole(x["theta"]) for n, x in s.state_dict()["weights"].items()}
    untouched = s.stats.step == 0 and all(torch.equal(dense[n], after[n]) for n in dense)
    untouched = untouched and all(torch.equal(x, before[n]) for n, x in weights(model).items())
    return untouched, list(train(model, s, o, how))[-1]


def created_states(rank: int) -> bool:
    (first, alone), *others = (created_state(how) for how in ("alone", "ddp", "fsdp"))
    return first and all(good and same(alone, found) for good, found in others)


def counted(rank: int) -> bool:
    """The zeros of all shards, and the average of θ in shards."""
    expected, alone = run(CASE, "alone")
    found = {}
    for how in ("ddp", "fsdp"):
        model: Any = shard(CASE.model(), how)
        s, o = CASE.sparsifier(model)
        average = s.ema(0.0)  # the present θ
        list(train(model, s, o, how))
        with average.applied():
            projected = weights(model)
        kept = [layer.kept for layer in s.layers()]
        found[how] = same(expected[-1], projected) and s.stats.zeros == alone.stats.zeros
        found[how] = found[how] and kept == [layer.kept for layer in alone.layers()]
    return all(found.values())


def followed(rank: int) -> bool:
    """An average of the model inside DDP is as one process has it."""
    found = []
    for how in ("alone", "ddp"):
        model: Any = shard(CASE.model(), how)
        averaged = AveragedModel(model.module if how == "ddp" else model)
        s, o = CASE.sparsifier(model)
        s.follow(averaged)
        for _ in train(model, s, o, how):
            averaged.update_parameters(model)
        s.finalize()
        spartan.verify(averaged.module, 0.7)
        found.append(weights(averaged.module))
    return same(*found)


def often(rank: int) -> dict[str, bool]:
    return {
        "created state": created_states(rank),
        "counted": counted(rank),
        "followed": followed(rank),
        "fsdp accumulates": accumulated(rank, "fsdp"),
        "ddp accumulates in a closure": accumulated_in_a_closure(rank),
        "uneven inputs": uneven_inputs(rank),
        "insured": insured(rank),
        "bytes": little_is_sent("spartan"),
        "bytes with looks": little_is_sent("paced"),
        "pruning": one_shot(rank),
        "FLOPs": refused(rank),
        "bf16 and compile": half_precision(rank, "aot_eager"),
    }


def seldom(rank: int) -> dict[str, bool]:
    return {
        "ddp accumulates": accumulated(rank, "ddp"),
        "static graph": static_graph(rank),
        "compiled ddp": compiled(rank),
        "resharded": options(rank, reshard_after_forward=True),
        "cpu offload": options(rank, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "after evaluation": after_evaluation(rank),
        "masks": masks(rank),
    }


@pytest.mark.parametrize("ways", [often, pytest.param(seldom, marks=pytest.mark.slow)])
def test_every_way_to_train(ways: Callable[[int], dict[str, bool]]) -> None:
    for found in on(2, ways):
        assert [name for name, good in found.items() if not good] == []


@pytest.mark.slow
def test_bf16_with_inductor() -> None:
    assert on(2, half_precision, "inductor") == [True, True]
