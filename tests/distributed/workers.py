"""Real processes for the tests: one start runs many cases, since starting takes seconds."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[..., Any]


def on(world: int, work: Work, *args: Any, timeout: float = 60.0, backend: str = "gloo") -> list[Any]:
    """What `work(rank, *args)` returned on each of `world` processes, joined by gloo; the first error is raised."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # A server that has imported everything once, and has never run autograd, forks the workers.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "tests.distributed.cases"])
        processes = [
            context.Process(target=_worker, args=(rank, world, port, folder, timeout, backend, work, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
        found = []
        for rank in range(world):
            path = Path(folder) / f"{rank}.pt"
            assert path.exists(), f"process {rank} of {world} ended without a word"
            found.append(torch.load(path, weights_only=False))
    errors = [x["error"] for x in found if "error" in x]
    assert not errors, "\n".join(errors)
    return [x["result"] for x in found]


def _worker(
    rank: int, world: int, port: int, folder: str, timeout: float, backend: str, work: Work, args: tuple[Any, ...]
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    try:
        result = {"result": work(rank, *args)}
    except Exception:
        result = {"error": f"process {rank} of {world}:\n{traceback.format_exc()}"}
    torch.save(result, Path(folder) / f"{rank}.pt")
    if "error" not in result:
        dist.destroy_process_group()
