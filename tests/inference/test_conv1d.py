"""The layers of GPT-2, whose weights stand as inputs × outputs, on sparse kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spartan
from spartan import Block
from spartan.inference.convert import accelerate, explain
from spartan.inference.runtime import DenseLinear
from tests.foreign import library

transformers = library("transformers")


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 48}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # a model as it is made gives about the same for every token
    return model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARTAN_CACHE", str(tmp_path))


@pytest.mark.parametrize("kernels", ["sparse", "auto"])
@pytest.mark.parametrize("pattern", [None, Block(8, 16)])
def test_gpt2_is_accelerated(pattern: Block | None, kernels: str) -> None:
    model = gpt2()
    spartan.prune(model, 0.9, pattern=pattern)
    x = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    fast = accelerate(model, kernels=kernels, example_inputs={"input_ids": x})
    with torch.no_grad():
        torch.testing.assert_close(fast(input_ids=x).logits, model(input_ids=x).logits, rtol=1e-4, atol=1e-4)
        ours, theirs = (m.generate(x, max_new_tokens=12, do_sample=False) for m in (fast, model))
    assert torch.equal(ours, theirs)
    layers = {line.layer: line.kernel for line in explain(fast)}
    names = {
        f"transformer.h.{i}.{name}" for i in (0, 1) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert names <= set(layers)
    if kernels == "sparse":
        assert all(layers[name] != "dense" for name in names)


def test_what_stays_as_it_is_is_told() -> None:
    """Layers with too few zeros, and those with hooks, which a kernel would not call."""
    model = gpt2()
    spartan.prune(model, 0.9, include="transformer.h.0.*")
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_: None)
    fast = accelerate(model, kernels="sparse")
    told = {line.layer: line for line in explain(fast)}
    assert (told["transformer.h.0.mlp.c_fc"].kernel, told["transformer.h.0.mlp.c_fc"].why) == (
        "dense",
        "as it was given",
    )
    assert told["transformer.h.1.mlp.c_fc"].kernel == "dense"
    assert not isinstance(fast.transformer.h[1].mlp.c_fc, DenseLinear)
    assert told["transformer.h.0.attn.c_attn"].kernel != "dense"
