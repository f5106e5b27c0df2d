"""Models in shards for the step benchmark: a process group, and FSDP2 around every block and the rest."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def start(device: str, rank: int, ranks: int, meeting: str | None) -> None:
    """Join the group: one process over NCCL or, on a CPU, gloo. Several share a device, over gloo: NCCL refuses that."""
    if device == "cuda":
        torch.cuda.set_device(0)
    place = meeting or meeting_place()
    backend = "nccl" if device == "cuda" and ranks == 1 else "gloo"
    dist.init_process_group(backend, init_method=f"file://{place}", rank=rank, world_size=ranks)
    atexit.register(dist.destroy_process_group)


def meeting_place() -> str:
    """A file by which processes find one another."""
    return str(Path(tempfile.mkdtemp()) / f"group-{os.getpid()}")


def blocks_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the blocks of a model are: the module that holds each, and its name there."""
    kinds = {"Bottleneck", "EncoderBlock", "WideBlock"}
    return [
        (holder, name)
        for holder in list(model.modules())
        for name, block in holder.named_children()
        if type(block).__name__ in kinds
    ]


def sharded(model: nn.Module, device: str, bf16: bool, compiled: bool) -> nn.Module:
    """The model as FSDP2's users have it: every block compiled and sharded by itself, then what is left."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = policy if bf16 else MixedPrecisionPolicy()
    for holder, name in blocks_of(model):
        block = holder.get_submodule(name)
        if compiled:
            block = torch.compile(block, dynamic=False)  # type: ignore[assignment]  # blocks differ, batches do not
            holder.register_module(name, block)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def let_blocks_differ() -> None:
    """Have the compiler make a version of a block's code for every shape of blocks; eight are its limit."""
    torch._dynamo.config.recompile_limit = 64
