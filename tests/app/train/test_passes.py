"""The training loop makes the passes that a method asks for: ProbMask's K samples, each over the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spartan.app.train.config import load_recipe
from spartan.app.train.loop import Trainer

RECIPE = ["epochs=4", "batch_size=128", "method=probmask", "warmup=0.3", "finetune=0.5", "sparsity=0.8"]


def forwards(trainer: Trainer, out: Path) -> list[tuple[int, Tensor, Tensor]]:
    """At every forward pass of a run: the step, the batch, and what one weight held."""
    seen: list[tuple[int, Tensor, Tensor]] = []
    weight = next(p for p in trainer.model.parameters() if p.ndim == 4)

    def look(module: Any, inputs: Any) -> None:
        if torch.is_grad_enabled():
            seen.append((trainer.step, inputs[0].clone(), weight.detach().clone()))

    trainer.model.register_forward_pre_hook(look)
    out.mkdir()
    trainer.fit(out, quiet=True)
    return seen


@pytest.mark.parametrize(("micro", "samples"), [(128, 2), (32, 2), (64, 3), (128, 1)])
def test_every_pass_is_over_the_same_batch_with_masks_of_its_own(tmp_path: Path, micro: int, samples: int) -> None:
    trainer = Trainer(load_recipe("digits", [*RECIPE, f"micro_batch={micro}", f"method_args.samples={samples}"]))
    freeze, n = trainer.sparsifier._run.at.freeze_step, 128 // micro
    seen = forwards(trainer, tmp_path / "run")
    for step in range(trainer.total_steps):
        mine = [(x, w) for at, x, w in seen if at == step]
        passes = [mine[i : i + n] for i in range(0, len(mine), n)]
        assert len(passes) == (samples if step < freeze else 1)
        for first in passes[1:]:
            assert all(torch.equal(a, b) for (a, _), (b, _) in zip(passes[0], first, strict=True)), "the same images"
        for each in passes:
            assert all(torch.equal(each[0][1], w) for _, w in each), "one sample for all micro-batches of a pass"
        if 3 < step < freeze:  # at first everything is kept for certain
            assert not any(torch.equal(passes[0][0][1], other[0][1]) for other in passes[1:])


def test_other_methods_have_one(tmp_path: Path) -> None:
    trainer = Trainer(load_recipe("digits", [*RECIPE, "method=imp", "epochs=1"]))
    seen = forwards(trainer, tmp_path / "run")
    assert [step for step, _, _ in seen] == list(range(trainer.total_steps))
