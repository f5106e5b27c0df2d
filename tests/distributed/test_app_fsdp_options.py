"""What a recipe may ask for besides, in shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spartan import Params
from spartan.app.train.config import from_dict
from spartan.app.train.parallel import ShardedModel
from spartan.app.train.processes import Processes
from spartan.app.train.setup import build_sparsifier
from tests.distributed.launching import launch, weights
from tests.distributed.test_app_fsdp import FSDP, HERE, LEARNS, Residual, same, train
from tests.distributed.workers import on

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "more",
    [
        ("cost=flops", "value_power=0.5"),
        ("pattern=channel:in", "exclude=[stem.weight,head.weight]"),  # whole columns: shards lie along the inputs
        ("pattern=[16,2]", "exclude=[stem.weight,neck.weight,head.weight]"),
        ("method=movement",),  # learned scores
        ("optimizer.name=adamw", "optimizer.lr=0.01"),
        ("channels_last=true", "mixup=0.2", "micro_batch=32"),
    ],
)
def test_the_same_as_on_one_process(tmp_path: Path, more: tuple[str, ...]) -> None:
    launch(tmp_path / "one", 1, *train(*LEARNS, *more))
    launch(tmp_path / "two", 2, *train(*LEARNS, *FSDP, *more))
    same(tmp_path / "two" / "run", tmp_path / "one" / "run", 1e-12)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("model", [f"{HERE}:single", "digits-cnn"])
def test_half_precision_keeps_the_budget(tmp_path: Path, amp: str, model: str) -> None:
    launch(tmp_path, 2, *train(*LEARNS, *FSDP, f"amp={amp}", f"model={model}"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["nonzero"] == int(0.2 * summary["parameters"] + 1e-9)
    assert {w.dtype for w in weights(tmp_path / "run").values()} <= {torch.float32, torch.int64}
    assert summary["top1"] > 0.3


class Compiled(ShardedModel):
    """As on a GPU: each block's forward is compiled."""

    compiled = property(lambda self: True, lambda self, value: None)


def with_and_without_compiling(rank: int) -> list[dict[str, Tensor]]:
    found = []
    for kind in (ShardedModel, Compiled):
        torch.manual_seed(0)
        config = from_dict({"parallel": "fsdp2", "sparsity": 0.8})
        placed = kind(config, Residual(10).double(), Processes(rank, 2, rank), 2, torch.device("cpu"))
        sparsifier = build_sparsifier(config, placed.model, Params(), 6)
        optimizer = torch.optim.SGD(placed.model.parameters(), lr=0.1, momentum=0.9)
        sparsifier.attach(optimizer)
        numbers = torch.Generator().manual_seed(rank)
        for i in range(12):
            x, y = torch.randn(8, 1, 8, 8, generator=numbers), torch.randint(10, (8,), generator=numbers)
            with placed.gradient_sync(last=i % 2 == 1):
                nn.functional.cross_entropy(placed.forward(x), y).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        sparsifier.finalize()
        whole = placed.gathered_model(lambda: Residual(10).double())
        found.append({} if whole is None else whole.state_dict())
    return found


def test_blocks_can_be_compiled() -> None:
    (plain, compiled), (nothing, _) = on(2, with_and_without_compiling, timeout=300)
    assert nothing == {}
    for name, weight in plain.items():
        assert torch.equal(weight != 0, compiled[name] != 0), name
        assert (weight - compiled[name]).abs().max() < 1e-12, name
