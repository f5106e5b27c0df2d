"""Models of transformers, timm and torchvision, with their own ways of multiplying: exact budgets, block after block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import spartan
from spartan import NM, Block
from spartan.zoo import timm, torchvision
from tests.foreign import library

transformers = library("transformers")
SMALL = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}


def tokens(count: int = 2) -> list[dict[str, Tensor]]:
    found = []
    for seed in range(count):
        ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(seed))
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0]), 1)})
    return found


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_head=4, n_embd=32, **SMALL))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES, **SMALL))


def gemma() -> Any:
    """Layers of two kinds, with masks and positions of their own."""
    config = transformers.Gemma3TextConfig(
        num_key_value_heads=2, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2,
        **SIZES | {"num_hidden_layers": 4}, **SMALL,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def bert() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=2, **SIZES, **SMALL))


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, **SIZES, **SMALL
    )
    return transformers.MixtralForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, vocab_size=100
    )
    return transformers.T5ForConditionalGeneration(config)


TEXT = {
    "gpt2": (gpt2, 3),
    "llama": (llama, 3),
    "gemma": (gemma, 4),
    "bert": (bert, 3),
    "mixtral": (mixtral, 3),
    "t5": (t5, 4),
}


@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("name", TEXT)
def test_transformers(name: str, criterion: str) -> None:
    """Block after block equals the model as a whole, stage after stage."""
    build, count = TEXT[name]
    torch.manual_seed(0)
    model, batches = build().train(), tokens(4 if name == "mixtral" else 2)
    model = model if name == "mixtral" else model.double()  # the product that has all experts at once has no float64
    if name == "t5":
        batches = [{**batch, "decoder_input_ids": batch["input_ids"][:, :5]} for batch in batches]
    theirs = copy.deepcopy(model)
    options: dict[str, Any] = {"criterion": criterion, "calibration": batches}
    _, report = spartan.prune(model, 0.5, report=True, **options)
    assert report.why_whole == ""
    assert len(report.blocks) == count
    spartan.verify(model, 0.5, budget="uniform")
    assert all(layer.kept == layer.weights // 2 for layer in report.layers)
    stages: dict[str, list[str]] = {}
    for layer in report.layers:  # what comes before the first block is of its stage
        first = not layer.block and not set(stages) - {report.blocks[0]}
        stages.setdefault(report.blocks[0] if first else layer.block, []).append(layer.name)
    for stage in stages.values():
        spartan.prune(theirs, 0.5, include=stage, blocks=(), **options)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    if name in ("gpt2", "llama"):
        assert model.config.use_cache
        with torch.no_grad():
            model.generate(tokens()[0]["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("pattern", [NM(2, 4), Block(8, 8), Block(4, 1)], ids=str)
@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
def test_patterns_on_gpt2(pattern: Any, criterion: str) -> None:
    torch.manual_seed(0)
    model = gpt2()
    spartan.prune(model, 0.5, criterion=criterion, calibration=tokens(), pattern=pattern)
    spartan.verify(model, 0.5, pattern=pattern, budget="uniform")


def images(side: int = 32) -> list[Tensor]:
    return [torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def timm_model(name: str, **options: Any) -> Any:
    return timm().create_model(name, num_classes=10, **options)


def torchvision_vit() -> Any:
    return torchvision().models.VisionTransformer(32, 16, 3, 4, 32, 48, num_classes=10)


def torchvision_swin() -> Any:
    """Multiplies by the weights of layers that it never calls."""
    return torchvision().models.SwinTransformer([4, 4], 24, [2, 2], [2, 2], [4, 4], num_classes=10)


VISION = {
    "timm vit": (lambda: timm_model("vit_tiny_patch16_224", img_size=32, depth=3), 3),
    "timm beit": (lambda: timm_model("beit_base_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=4), 2),
    "timm resnet": (lambda: timm_model("resnet18"), 8),
    "timm convnext": (lambda: timm_model("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)), 4),
    "torchvision vit": (torchvision_vit, 3),
    "torchvision swin": (torchvision_swin, 4),
    "torchvision resnet": (lambda: torchvision().models.resnet18(num_classes=10), 8),
}


@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("name", VISION)
def test_vision(name: str, criterion: str) -> None:
    build, count = VISION[name]
    torch.manual_seed(0)
    model, batches = build(), images()
    # The large layers of a ResNet-18 take seconds, and are as the small ones.
    skip = ["layer[34].*"] if "resnet" in name and criterion == "sparsegpt" else []
    _, report = spartan.prune(model, 0.6, criterion=criterion, calibration=batches, exclude=skip, report=True)
    assert report.why_whole == ""
    assert len(report.blocks) == count - 4 * bool(skip)
    spartan.verify(model, 0.6, budget="uniform", exclude=skip)
    with torch.no_grad():
        assert torch.isfinite(model.eval()(batches[0])).all()


def test_albert_shares_its_layers() -> None:
    """One block that runs several times is no chain: the model is run as a whole, and all its runs count."""
    torch.manual_seed(0)
    model = transformers.AlbertModel(transformers.AlbertConfig(embedding_size=16, **SIZES, **SMALL))
    _, report = spartan.prune(model, 0.5, criterion="sparsegpt", calibration=tokens(), exclude="pooler.*", report=True)
    assert report.blocks == ()
    assert report.why_whole.startswith("no ModuleList")
    spartan.verify(model, 0.5, budget="uniform", exclude="pooler.*")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_s_base_is_not_pruned_but_for_its_adapters() -> None:
    """Adapters are what can be trained; the base is pruned before they are added."""
    peft = library("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    _, report = spartan.prune(model, 0.5, criterion="wanda", calibration=tokens(), report=True)
    assert all("lora_" in layer.name for layer in report.layers)
