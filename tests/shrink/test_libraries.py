"""Models of torchvision, timm and transformers: dead channels, heads and columns are gone, and outputs equal."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan import Channel, Heads
from spartan.narrow import NarrowAttention
from spartan.shrink import shrink
from spartan.shrink.report import ShrinkReport
from spartan.zoo import build_model, timm, torchvision
from tests.shrink.nets import largest_difference, seeded_model
from tests.shrink.test_attention import kill_heads

transformers = pytest.importorskip("transformers")


def narrowed(model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> tuple[Any, ShrinkReport]:
    """The narrower model and the report; no part was refused, and outputs are equal to 1e-5."""
    smaller, report = shrink(model, inputs, report=True)
    assert report.refused == ()
    assert report.after < report.before
    with torch.no_grad():
        if isinstance(inputs, dict):
            assert largest_difference(model(**inputs)[0], smaller(**inputs)[0]) < 1e-5
        else:
            assert largest_difference(model(inputs), smaller(inputs)) < 1e-5
    return smaller, report


def pruned(model: Any, sparsity: float, **options: Any) -> Any:
    torch.manual_seed(0)
    return spartan.prune(seeded_model(model), sparsity, pattern=Channel(), budget="uniform", **options)


def test_resnet18_of_torchvision() -> None:
    torch.manual_seed(0)
    model = pruned(torchvision().models.resnet18(num_classes=10), 0.6, exclude=("fc.weight", "conv1.weight"))
    smaller, report = narrowed(model, torch.randn(1, 3, 64, 64))
    assert report.after < 0.45 * report.before
    # Every block's inner channels: those that are not zero, and one for the constants.
    for (_, old), (name, new) in zip(model.named_modules(), smaller.named_modules(), strict=True):
        if name.startswith("layer") and name.endswith("conv1"):
            alive = int(old.weight.flatten(1).any(1).sum())
            assert new.out_channels - alive in (0, 1)
    x = torch.randn(2, 3, 96, 80)  # another size
    with torch.no_grad():
        assert largest_difference(model(x), smaller(x)) < 1e-5
    assert all("reads what they are part of" in told.why or "constant" in told.why for told in report.stays)


def test_mobilenet_and_timm_s_resnet() -> None:
    x = torch.randn(1, 3, 64, 64)
    smaller, report = narrowed(pruned(torchvision().models.mobilenet_v2(num_classes=10), 0.5, exclude="classifier*"), x)
    assert any("not at the borders" in told.why for told in report.stays)
    depthwise = [m for m in smaller.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert all(m.groups == m.in_channels == m.out_channels == len(m.weight) for m in depthwise)
    assert sum(m.groups for m in depthwise) < 7000
    narrowed(pruned(timm().create_model("resnet18", num_classes=10), 0.6, exclude="fc.weight"), x)


def test_convnext_of_timm() -> None:
    model = pruned(
        timm().create_model("convnext_atto", num_classes=10, depths=(1, 1, 2, 1)), 0.6, include="*.fc1.weight"
    )
    smaller, _ = narrowed(model, torch.randn(1, 3, 64, 64))
    sizes = {(len(m.fc1.weight) / m.fc2.weight.shape[0]) for m in smaller.modules() if hasattr(m, "fc1")}
    assert max(sizes) < 1.7  # of 4


@pytest.mark.parametrize("library", ["timm", "torchvision", "ours"])
def test_vision_transformers(library: str) -> None:
    torch.manual_seed(0)
    if library == "timm":
        model = timm().create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
        heads, attention, mlp = 3, "*.qkv.weight", "*.mlp.fc1.weight"
    elif library == "torchvision":
        model = torchvision().models.VisionTransformer(32, 16, 2, 4, 64, 128, num_classes=10)
        nn.init.normal_(model.heads.head.weight)
        heads, attention, mlp = 4, "*.in_proj_weight", "*.mlp.0.weight"
    else:
        model = build_model("vit-2-192-8", 10, (3, 32, 32))
        heads, attention, mlp = 3, "*.qkv.weight", "*.mlp.0.weight"
    seeded_model(model)
    spartan.prune(model, 0.5, pattern=Heads(heads), include=attention)
    spartan.prune(model, 0.75, pattern=Channel(), include=mlp)
    smaller, report = narrowed(model, torch.randn(2, 3, 32, 32))
    alive = sum(
        int(p.unflatten(0, (3, heads, -1)).flatten(2).any(2).any(0).sum())
        for name, p in model.named_parameters()
        if name.endswith(("qkv.weight", "in_proj_weight"))
    )
    rows = sum(len(p) for name, p in smaller.named_parameters() if name.endswith(("qkv.weight", "in_proj_weight")))
    assert rows == alive * 3 * (16 if library == "torchvision" else 64)
    if library == "torchvision":
        assert any(isinstance(m, NarrowAttention) for m in smaller.modules())
    assert report.after < 0.75 * report.before


IDS = {"input_ids": torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))}
SMALL = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_llama_of_transformers() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes, **SMALL))
    seeded_model(model)
    for layer in model.model.layers:
        kill_heads(layer.self_attn.o_proj.weight, 1, 8, 0, 1, 5, dim=1)  # those of one head of keys, and one more
    spartan.prune(model, 0.5, pattern=Channel(), include="*.gate_proj.weight", budget="uniform")
    smaller, report = narrowed(model, IDS)
    layer = smaller.model.layers[0]
    assert tuple(layer.self_attn.q_proj.weight.shape) == (48, 64)
    assert tuple(layer.self_attn.k_proj.weight.shape) == (24, 64)
    assert tuple(layer.mlp.down_proj.weight.shape) == (64, 48)
    assert {told.name for told in report.stays} == {f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)}
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        texts = [m.generate(**IDS, max_new_tokens=8, do_sample=False) for m in (model, smaller)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gpt2_of_transformers(implementation: str) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, **SMALL, attn_implementation=implementation)
    model = seeded_model(transformers.GPT2LMHeadModel(config))
    for layer in model.transformer.h:
        kill_heads(layer.attn.c_attn.weight, 3, 4, 1, 3, dim=1)
    spartan.prune(model, 0.5, pattern=Channel(), include="*.mlp.c_fc.weight", budget="uniform")
    smaller, _ = narrowed(model, IDS)
    layer = smaller.transformer.h[0]
    assert (layer.attn.split_size, layer.attn.c_attn.nf, tuple(layer.attn.c_proj.weight.shape)) == (32, 96, (32, 64))
    assert (layer.mlp.c_fc.nf, layer.mlp.c_proj.nx) == (128, 128)


def test_bert_of_transformers() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = seeded_model(transformers.BertModel(transformers.BertConfig(**sizes, **SMALL)))
    for layer in model.encoder.layer:
        kill_heads(layer.attention.self.value.weight, 1, 4, 0, 3)
    spartan.prune(model, 0.5, pattern=Channel(), include="*.intermediate.dense.weight", budget="uniform")
    smaller, _ = narrowed(model, {**IDS, "attention_mask": torch.ones(2, 9, dtype=torch.long)})
    layer = smaller.encoder.layer[0]
    assert tuple(layer.attention.self.query.weight.shape) == (32, 64)
    assert tuple(layer.attention.output.dense.weight.shape) == (64, 32)
    assert layer.intermediate.dense.out_features == layer.output.dense.in_features == 48
