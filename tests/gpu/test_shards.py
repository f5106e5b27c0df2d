"""Weights in shards on a CUDA device: FSDP2 on one process over NCCL, and two processes that share the device over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from spartan import Block, Sparsifier
from spartan.solvers.forms import VJP, Form, Mask
from spartan.solvers.torch import TorchSolver
from tests.distributed.cases import whole
from tests.distributed.workers import on
from tests.solvers.building import build, problem_of
from tests.waiting import check_no_step_waits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def trained(sharded: bool, pattern: Any) -> tuple[nn.Module, Sparsifier, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32)).cuda()
    if sharded:
        mesh = init_device_mesh("cuda", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(model, 0.9, 100, "spartan", pattern=pattern, warmup=0.0, finetune=0.2).attach(optimizer)
    return model, sparsifier, optimizer


def one_process(rank: int) -> list[str]:
    """What is wrong with FSDP2 on one process."""
    from spartan.solvers.triton.shards import InShards

    wrong, rng = [], torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 64, generator=rng).cuda(), torch.randint(32, (16,), generator=rng).cuda()
    for pattern in (None, Block(8, 8)):
        model, sparsifier, optimizer = trained(True, pattern)
        plain, of_plain, optimizer_plain = trained(False, pattern)
        (part,) = sparsifier._run.weights.parts
        if part.name != "triton" or isinstance(part, InShards):
            wrong.append(f"{pattern} runs by {type(part).__name__}")
        for _ in range(10):
            for forward, step in ((model, optimizer), (plain, optimizer_plain)):
                nn.functional.cross_entropy(forward(x), y).backward()
                step.step()
                step.zero_grad()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            if not torch.equal(a == 0, whole(b) == 0) or not torch.allclose(a, whole(b), rtol=1e-4, atol=1e-6):
                wrong.append(f"{pattern}: weights of {tuple(a.shape)} differ")
        if sparsifier.stats.cost != of_plain.stats.cost:
            wrong.append(f"{pattern}: {sparsifier.stats} is not {of_plain.stats}")
        if pattern is None:
            check_no_step_waits(model, optimizer, x, y)
    return wrong


def test_one_process_over_nccl() -> None:
    assert on(1, one_process, backend="nccl") == [[]]


def two_processes(rank: int) -> list[str]:
    """What is wrong with thresholds, weights and gradients by kernels on two processes, against plain torch on one."""
    from spartan.solvers.triton.shards import ShardedSingles

    torch.cuda.set_device(0)
    mesh, wrong = init_device_mesh("cuda", (dist.get_world_size(),)), []
    torch.cuda.set_device(0)
    for dtype, owners in ((torch.float32, [0, 0, 0]), (torch.bfloat16, [0, 1, 0])):
        torch.manual_seed(0)
        values = [torch.randn(shape).to(dtype).cuda() for shape in ((301, 77), (3, 1000), (640, 512))]
        for x in values:
            x[::7] = 0.5  # ties across shards

        def shard(x: Tensor) -> Tensor:
            mine = x.chunk(dist.get_world_size())[rank].clone()
            return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())

        settings: dict[str, Any] = {"owners": owners, "prices": [1.0, 0.3, 2.0]}
        plain = build(TorchSolver, problem_of(values, **settings))
        fast = build(ShardedSingles, problem_of([shard(x) for x in values], **settings))
        for part, beta in ((0.2, 4.0), (0.21, 4.4), (0.21, 5.0), (0.5, 5.0)):
            k = [part * segment.total for segment in plain.problem.segments]
            grads = [torch.randn_like(x) for x in values]
            form = Form(Mask.SOFT, VJP.THROUGH)
            for solver in (plain, fast):
                solver.solve(k, [beta] * len(k))
                solver.write(form)
            turned = fast.turn(form, [x.chunk(dist.get_world_size())[rank].clone() for x in grads])
            expected = plain.turn(form, [g.clone() for g in grads])
            where = zip(fast.problem.places, plain.problem.slices, strict=True)
            kept = [place.cut_out(plain.kept(form)[s]) for place, s in where]
            if not torch.equal(torch.cat(kept), fast.kept(form)):
                wrong.append(f"{dtype}, {part}, {beta}: masks differ")
            rtol, atol = (1e-3, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
            for a, b in zip(expected, turned, strict=True):
                assert a is not None
                assert b is not None
                if not torch.allclose(a.chunk(dist.get_world_size())[rank], b, rtol, atol):
                    wrong.append(f"{dtype}, {part}, {beta}: gradients differ")
    return wrong


def test_two_processes_that_share_a_device() -> None:
    for wrong in on(2, two_processes):
        assert wrong == []
