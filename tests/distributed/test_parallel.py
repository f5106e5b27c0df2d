"""Tensor parallelism, FSDP2 over it, and FSDP2 with replicas give what one process gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.distributed.cases import STEPS, Case, batch, weights
from tests.distributed.workers import on

CASES = [Case("spartan"), Case("st3"), Case("static"), Case("topkast", "block")]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(12, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


def build(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = Mlp().double()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if how == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    if how == "both":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
    if how == "replicas":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    return model


def train(case: Case, how: str) -> list[dict[str, Tensor]]:
    model = build(how)
    _, o = case.sparsifier(model)
    found = []
    for step in range(STEPS):
        x, y = batch(step, "fsdp" if how == "replicas" else "alone")
        nn.functional.cross_entropy(model(x), y).backward()
        o.step()
        o.zero_grad()
        found.append(weights(model))
    return found


def compare(rank: int, ways: list[str]) -> list[str]:
    found = []
    for case in CASES[: 2 if len(ways) == 1 else None]:
        expected = train(case, "alone")
        for how in ways:
            for step, (a, b) in enumerate(zip(expected, train(case, how), strict=True)):
                for name in a:
                    same = torch.equal(a[name] != 0, b[name] != 0)
                    if not same or float((a[name] - b[name]).abs().max()) > 1e-12:
                        found.append(f"{case} {how}: {name} at step {step}")
    return found[:4]


@pytest.mark.parametrize(
    ("world", "ways"), [(2, ["tensor"]), pytest.param(4, ["both", "replicas"], marks=pytest.mark.slow)]
)
def test_equals_one_process(world: int, ways: list[str]) -> None:
    for found in on(world, compare, ways):
        assert found == []
