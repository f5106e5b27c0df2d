"""The Trainer of transformers on a small GPT-2: accumulation, clipping, its own checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from spartan import Sparsifier, verify

pytest.importorskip("tests.torchvision_cpu")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 24


def run(folder: Path, method: str | None, resume: Path | None = None) -> tuple[Any, Sparsifier | None, list[float]]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sparsifier = Sparsifier(model, 0.8, STEPS, method).attach(optimizer) if method else None
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=STEPS, max_grad_norm=0.5,
        save_steps=8, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / STEPS)
    examples = [{"input_ids": x, "labels": x} for x in ids]
    trainer = transformers.Trainer(model, arguments, train_dataset=examples, optimizers=(optimizer, schedule))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return model, sparsifier, [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("method", ["spartan", "rigl"])
def test_sparse_and_resumed(method: str, tmp_path: Path) -> None:
    model, sparsifier, _ = run(tmp_path, method)
    again, its_sparsifier, _ = run(tmp_path, method, tmp_path / "checkpoint-8")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    for each in (sparsifier, its_sparsifier):
        assert each is not None
        assert each.stats.step == STEPS
        each.finalize()
    verify(model, 0.8)


def test_dense_is_as_without_us(tmp_path: Path) -> None:
    assert run(tmp_path / "a", "dense")[2] == run(tmp_path / "b", None)[2]
