"""LoRA on a sparse base, with peft: trained, merged and masked again, the base's zeros are there exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spartan
from spartan import NM
from tests.foreign import library
from tests.prune.test_libraries import llama, tokens


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("pattern", [None, NM(2, 4)], ids=str)
def test_a_merge_is_masked_again(pattern: Any, tmp_path: Path) -> None:
    peft = library("peft")
    torch.manual_seed(0)
    base = llama()
    options: dict[str, Any] = {"pattern": pattern, "budget": "uniform"}
    spartan.prune(base, 0.5, criterion="sparsegpt", calibration=tokens(), **options)
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    spartan.save(base, tmp_path / "base.safetensors")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(**tokens()[0], labels=tokens()[0]["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    merged = model.merge_and_unload()
    with pytest.raises(RuntimeError, match="fewer zeros than asked for"):
        spartan.verify(merged, 0.5, **options)
    full = {name: p.detach().clone() for name, p in merged.named_parameters()}
    spartan.remask(merged, like=tmp_path / "base.safetensors")
    for name, p in merged.named_parameters():
        if p.ndim > 1:
            assert torch.equal(p == 0, before[name] == 0)
        assert torch.equal(p, torch.where(before[name] == 0, 0.0, full[name]) if p.ndim > 1 else full[name])
    spartan.verify(merged, 0.5, **options)
