"""A small GPT-2, sentences for it, the Trainer around it, and the same run as a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spartan import Sparsifier
from tests.foreign import library

STEPS, SPARSITY, CLIP = 20, 0.8, 0.25


def gpt2(dropout: float = 0.0, seed: int = 0) -> Any:
    transformers = library("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=48, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(seed: int = 0) -> Any:
    transformers = library("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def sentences(n: int = 64) -> list[dict[str, Tensor]]:
    ids = torch.randint(48, (n, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": x, "labels": x} for x in ids]


class InOrder:
    """Nothing is shuffled, so that a plain loop sees the same batches."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(sentences())


def trainer(
    folder: Path,
    *,
    callbacks: list[Any] | None = None,
    model: Any = None,
    ordered: bool = True,
    optimizers: Any = None,
    **options: Any,
) -> Any:
    transformers = library("transformers")
    kind = type("OrderedTrainer", (InOrder, transformers.Trainer), {}) if ordered else transformers.Trainer
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "max_grad_norm": CLIP,
        "learning_rate": 1e-2, "lr_scheduler_type": "linear", "save_strategy": "no", "logging_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0, "optim": "adamw_torch",
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **(settings | options))
    more = {} if optimizers is None else {"optimizers": optimizers}
    return kind(
        gpt2() if model is None else model, arguments, train_dataset=sentences(), eval_dataset=sentences(8),
        callbacks=callbacks or [], **more,
    )  # fmt: skip


def plain_loop(steps: int = STEPS, **settings: Any) -> Any:
    """What the Trainer does with these arguments, written out."""
    transformers = library("transformers")
    model = gpt2()
    decayed = [p for n, p in model.named_parameters() if p.ndim >= 2]
    others = [p for n, p in model.named_parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}], 1e-2
    )
    schedule = transformers.get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    sparsifier = Sparsifier(model, SPARSITY, STEPS, **settings).attach(optimizer)
    rows = sentences()
    model.train()
    for step in range(steps):
        halves = [[rows[(4 * step + 2 * half + i) % 64] for i in range(2)] for half in range(2)]
        batches = [{key: torch.stack([row[key] for row in half]) for key in half[0]} for half in halves]
        tokens = sum(batch["labels"].numel() for batch in batches)  # as the Trainer counts them for this model
        for batch in batches:
            model(**batch, num_items_in_batch=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        model.zero_grad()
    return model, sparsifier


def kept(model: Any) -> int:
    """The weights of a model's blocks that are not zero; all in all they are 24,576."""
    return sum(int((p != 0).sum()) for n, p in model.named_parameters() if ".h." in n and p.ndim == 2)


KEPT = int(24576 * (1 - SPARSITY) + 1e-6)
