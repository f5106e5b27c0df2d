"""LoRA on a sparse model, and a sparsifier on a model with LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spartan
from tests.foreign import library
from tests.integrations.language import SPARSITY, gpt2, trainer

peft = library("peft")
transformers = library("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def sparse_base() -> Any:
    return spartan.prune(gpt2(), SPARSITY, budget="uniform")


def adapted(model: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights="gaussian")
    return peft.get_peft_model(model, config)


def bases(model: Any) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if "base_layer.weight" in n}


def test_a_sparse_base_keeps_its_zeros_and_gets_them_back_after_a_merge(tmp_path: Path) -> None:
    base = sparse_base()
    base.save_pretrained(tmp_path / "base")
    model = adapted(base)
    before = {n: p.detach().clone() for n, p in bases(model).items()}
    trainer(tmp_path, model=model, max_steps=4).train()
    assert all(torch.equal(p, before[n]) for n, p in bases(model).items())
    model.save_pretrained(tmp_path / "adapter")

    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(opened, tmp_path / "adapter").merge_and_unload()
    with pytest.raises(RuntimeError, match="fewer zeros than asked for"):
        spartan.verify(merged, SPARSITY)
    like = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    spartan.verify(spartan.remask(merged, like=like), SPARSITY)
    merged.save_pretrained(tmp_path / "merged")
    spartan.verify(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), SPARSITY)
    # A merged model is an ordinary one, of which nobody has to ask anything.
    spartan.Sparsifier.from_sparse(merged.requires_grad_(True))


def test_a_callback_asks_what_is_meant(tmp_path: Path) -> None:
    from spartan.integrations.transformers import SpartanCallback

    found = trainer(tmp_path, model=adapted(gpt2()), callbacks=[SpartanCallback(SPARSITY)])
    with pytest.raises(ValueError, match=r"beside the weights of 4 layers .*include='\*lora_\*' for the adapters"):
        found.train()


def test_the_adapters_are_meant(tmp_path: Path) -> None:
    from spartan.integrations.transformers import SpartanCallback

    model = adapted(gpt2())
    before = {n: p.detach().clone() for n, p in bases(model).items()}
    trainer(tmp_path, model=model, callbacks=[SpartanCallback(SPARSITY, include="*lora_*", budget="uniform")]).train()
    zeros = [float((p == 0).float().mean()) for n, p in model.named_parameters() if "lora_" in n]
    assert min(zeros) >= SPARSITY
    assert all(torch.equal(p, before[n]) for n, p in bases(model).items())


def test_the_base_is_meant(tmp_path: Path) -> None:
    from spartan.integrations.transformers import SpartanCallback

    model = adapted(gpt2())
    for parameter in bases(model).values():
        parameter.requires_grad_(True)
    trainer(tmp_path, model=model, callbacks=[SpartanCallback(SPARSITY, include="*base_layer.weight")]).train()
    weights = list(bases(model).values())
    assert sum(int((p != 0).sum()) for p in weights) == int(sum(p.numel() for p in weights) * (1 - SPARSITY) + 1e-6)
    assert all(p.all() for n, p in model.named_parameters() if "lora_A" in n)
