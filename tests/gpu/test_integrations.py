"""The callback in the Trainer on a CUDA device: loss scaling, bf16, two kinds of decoders; and FSDP2 on one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import spartan
from tests.distributed.workers import on
from tests.foreign import library
from tests.integrations.language import SPARSITY, STEPS, gpt2, llama, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


def run(folder: Path, model: Any, resume: str | None = None, **options: Any) -> tuple[Any, Any]:
    from spartan.integrations.transformers import SpartanCallback

    mine = SpartanCallback(SPARSITY)
    found = trainer(folder, model=model, use_cpu=False, save_strategy="steps", save_steps=10, **options)
    found.add_callback(mine)
    found.train(resume_from_checkpoint=resume)
    return found, mine


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", [gpt2, llama])
def test_mixed_precision(kind: Any, precision: str, tmp_path: Path) -> None:
    library("transformers")
    options: dict[str, Any] = {precision: True}
    found, mine = run(tmp_path, kind(), **options)
    # A scaler begins high, and skips steps until it has come down.
    assert STEPS - (8 if precision == "fp16" else 0) <= mine.sparsifier.stats.step <= STEPS
    found.save_model(str(tmp_path / "final"))
    opened = type(found.model).from_pretrained(tmp_path / "final")
    spartan.verify(opened, SPARSITY)
    again, _ = run(tmp_path, kind(seed=1), f"{tmp_path}/checkpoint-10", **options)
    spartan.verify(again.model, SPARSITY)


def one_process(rank: int, folder: str) -> bool:
    """FSDP2 by accelerate, over NCCL: saved, resumed, exact."""
    # What `accelerate launch` and torchrun tell a process: without it accelerate takes itself to be alone, without shards.
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="1")
    from tests.loops.small import SPARSITY, STEPS, loader, net

    accelerate = library("accelerate")
    from spartan.integrations.accelerate import attach

    def loop(save: bool) -> Any:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        plugin = accelerate.utils.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
        accelerator = accelerate.Accelerator(fsdp_plugin=plugin)
        assert accelerator.distributed_type == accelerate.utils.DistributedType.FSDP
        model: Any = net()
        if not save:
            for p in model.parameters():
                torch.nn.init.constant_(p, 0.1)  # all that is right is in the checkpoint
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
        sparsifier = attach(accelerator, model, optimizer, SPARSITY, STEPS)
        if not save:
            accelerator.load_state(folder)
        for epoch in range(0 if save else 1, STEPS // 16):
            for x, y in batches:
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
            if save and epoch == 0:
                accelerator.save_state(folder)
        assert sparsifier.stats.step == STEPS
        sparsifier.finalize()
        spartan.verify(model, SPARSITY)
        return [p.full_tensor().detach() for p in model.parameters()]

    return all(torch.equal(a, b) for a, b in zip(loop(True), loop(False), strict=True))


def test_shards_of_accelerate(tmp_path: Path) -> None:
    assert on(1, one_process, str(tmp_path), backend="nccl") == [True]
