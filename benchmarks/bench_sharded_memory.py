"""Bytes that each process keeps for its weights, θ and optimizer under FSDP2, on 1, 2 and 4 processes (gloo, CPU).

python benchmarks/bench_sharded_memory.py
"""

from __future__ import annotations

import os
import socket
from multiprocessing import Manager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from spartan import Sparsifier
from spartan.distributed import local

STEPS = 10
WIDTH = 512


def size(tensors: list[Tensor]) -> int:
    return sum(local(t).numel() * t.element_size() for t in tensors)


def worker(rank: int, world: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sparsifier = Sparsifier(model, 0.9, STEPS).attach(optimizer)
    found = {}
    for step in range(STEPS):
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, STEPS - 1):
            weights = sparsifier._run.weights
            theta = [x for part in weights.solving for x in part.theta.views]
            theta += [x for part in weights.frozen for x in (*part.thetas, *part.masks, *part.places)]
            moments = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
            found["first" if step == 0 else "last"] = (
                size(list(model.parameters())),
                size(theta),
                size(moments),
                sparsifier.stats.bytes_sent,
            )
    results[rank] = found
    dist.destroy_process_group()


def main() -> None:
    rows = []
    for world in (1, 2, 4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with Manager() as manager:
            results = manager.dict()
            spawn(worker, args=(world, port, results), nprocs=world)
            rows.append((world, dict(results)))
    print(f"4 Linears of {WIDTH} × {WIDTH}, float32, Adam, Spartan at 90%; the largest of all processes, in KiB")
    print("processes  when         weights        θ  optimizer    bytes sent for masks")
    for world, found in rows:
        for when in ("first", "last"):
            weights, theta, moments, sent = (max(r[when][i] for r in found.values()) for i in range(4))
            where = "step 1" if when == "first" else "finetune"
            print(f"{world:9}  {where:9} {weights / 1024:10.0f} {theta / 1024:8.0f} {moments / 1024:10.0f} {sent:23}")


if __name__ == "__main__":
    main()
