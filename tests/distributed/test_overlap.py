"""Under DDP gradients travel while backward is still at work, just as those of a dense model do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from spartan import Sparsifier
from tests.distributed.workers import on

LAYERS, WIDTH, STEPS = 8, 64, 4


def events(rank: int, sparse: bool) -> list[list[str]]:
    """What happens in the backward pass of every step: gradients that are ready, buckets that set off."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    # Two layers to a bucket.
    model = DistributedDataParallel(net, bucket_cap_mb=1.8 * 4 * WIDTH * (WIDTH + 1) / 2**20)
    log: list[str] = []

    def sent(group, bucket):  # DDP reads annotations, and takes none that are strings
        log.append(f"bucket {bucket.index()} of {sum(p.numel() for p in bucket.parameters())}")
        return allreduce_hook(group, bucket)

    def ready(name: str, grad: Tensor) -> None:
        log.append(f"gradient of {name}")

    model.register_comm_hook(dist.group.WORLD, sent)
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda grad, name=name: ready(name, grad))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if sparse:
        Sparsifier(model, 0.9, STEPS, budget="erk", finetune=0.0).attach(optimizer)
    found = []
    for step in range(STEPS):
        torch.manual_seed(2 * step + rank)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        found.append(list(log))
        log.clear()
        optimizer.step()
        optimizer.zero_grad()
    return found


def both(rank: int) -> tuple[list[list[str]], list[list[str]]]:
    return events(rank, sparse=False), events(rank, sparse=True)


def test_the_first_bucket_does_not_wait_for_the_end_of_backward() -> None:
    for dense, sparse in on(2, both):
        assert sparse == dense
        for step in sparse[1:]:  # in the first step DDP has not seen the order of gradients
            buckets = [i for i, event in enumerate(step) if event.startswith("bucket")]
            last = step.index("gradient of 0.weight")
            assert len(buckets) == LAYERS // 2
            assert buckets[0] <= len(step) // 3 < last
            assert sum(i < last for i in buckets) >= len(buckets) - 1
