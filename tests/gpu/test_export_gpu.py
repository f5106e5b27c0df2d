"""Sparse models on a CUDA device: converted, compiled, captured, and the same as their dense versions."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spartan
from spartan import NM, Block
from spartan.inference.convert import accelerate, explain
from spartan.inference.gpu import choice
from spartan.inference.gpu.linear import SemiStructuredLinear, TileLinear
from spartan.inference.runtime import DenseLinear
from spartan.inference.stand_ins import Attention, PatchConv
from tests.waiting import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CLOSE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("SPARTAN_CACHE", str(tmp_path))


def close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    scale = float(expected.float().abs().max())
    assert scale > 1e-3, "a constant would hide everything"
    gap = float((got.float() - expected.float()).abs().max())
    assert gap <= CLOSE[expected.dtype] * scale, (gap, scale)


def vit(block: int, dtype: torch.dtype) -> nn.Module:
    """timm's ViT-Ti/16 at 75% in blocks, with a head that says something."""
    from spartan.zoo import timm

    model: nn.Module = timm().create_model("vit_tiny_patch16_224", num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    exclude = ["patch_embed*", "head*"]
    spartan.prune(model, 0.75, pattern=Block(block, block), budget="uniform", exclude=exclude)
    return model.to("cuda", dtype).eval()


@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("block", [16, 32, 64])
@torch.inference_mode()
def test_vision_transformer(block: int, dtype: torch.dtype) -> None:
    model, x = vit(block, dtype), torch.randn(3, 3, 224, 224, device="cuda", dtype=dtype)
    fast = accelerate(model, "sparse", example_inputs=x)
    sparse = [module for module in fast.modules() if isinstance(module, TileLinear)]
    assert len(sparse) == 4 * 12
    assert sum(module.activation == "gelu" for module in sparse) == 12
    reference = copy.deepcopy(model).double()(x.double()).to(dtype)
    close(fast(x), reference)
    for images in (1, 5):
        close(fast(x[:1].expand(images, -1, -1, -1)), reference[:1].expand(images, -1))
    lines = {line.layer: line for line in explain(fast)}
    assert lines["blocks.0.mlp.fc1"].kernel.startswith("tiles")
    assert "75.0% zeros, input 3×197×192" in lines["blocks.0.mlp.fc1"].why


@torch.inference_mode()
def test_auto_takes_what_is_measured_to_win() -> None:
    model, x = vit(64, torch.bfloat16), torch.randn(64, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    fast = accelerate(model, example_inputs=x)
    close(fast(x), model(x))
    sparse = any(isinstance(module, TileLinear) for module in fast.modules())
    for line in explain(fast):
        if line.layer.startswith("blocks") and sparse:
            assert "ms" in line.why
            fastest = line.why.partition(": ")[2].split(" ms")[0]
            assert fastest.startswith(line.kernel), line
        elif not sparse:
            assert "launched sooner" in line.why, line


@torch.inference_mode()
def test_the_first_layer_of_a_transformer_is_a_product() -> None:
    conv = nn.Conv2d(3, 768, 16, stride=16).cuda().bfloat16().eval()
    x = torch.randn(64, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    fast = accelerate(nn.Sequential(conv), "sparse", example_inputs=x)
    assert isinstance(fast[0], PatchConv), explain(fast)
    close(fast(x), conv(x))
    assert "patches" in explain(fast)[0].why


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_and_captured() -> None:
    model, x = vit(32, torch.bfloat16), torch.randn(4, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    fast = accelerate(model, "sparse", device="cuda", example_inputs=x)
    expected = fast(x)
    compiled = torch.compile(fast, fullgraph=True)
    close(compiled(x), expected)
    run = choice.graph_of(lambda: fast(x))
    other = torch.randn_like(x)
    want = fast(other)
    x.copy_(other)
    assert torch.equal(run(), want), "a replay reads the input's new values"
    torch.compiler.reset()
    reduced = torch.compile(fast, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        close(reduced(x).clone(), want)


@torch.inference_mode()
def test_a_layer_does_not_wait_for_the_device() -> None:
    layer: nn.Module = spartan.prune(nn.Linear(256, 512), 0.9, pattern=Block(32, 32)).cuda().half()
    x = torch.randn(100, 256, device="cuda").half()
    fast = accelerate(layer, "sparse", example_inputs=x)
    assert isinstance(fast, TileLinear)
    fast(x)
    with no_waiting():
        fast(x)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_every_kernel_that_may_be_chosen(block: int) -> None:
    weight = spartan.prune(nn.Linear(768, 768), 0.9, pattern=Block(block, block)).weight.detach()
    layer = DenseLinear(weight.cuda().bfloat16(), torch.randn(768, device="cuda").bfloat16(), "gelu")
    x = torch.randn(1000, 768, device="cuda").bfloat16()
    tilings = [tiling for tiling, _ in choice.candidates(layer.weight)]
    for kernel in choice.tile_kernels(tilings, choice.LAUNCHES, 2):
        close(choice.build(layer, kernel)(x), layer(x))


@torch.inference_mode()
def test_attention_by_torch() -> None:
    attention: nn.Module = nn.MultiheadAttention(128, 4, batch_first=True).cuda().half().eval()
    spartan.prune(attention, 0.75, pattern=Block(32, 32), budget="uniform")
    x, y = (torch.randn(2, n, 128, device="cuda").half() for n in (9, 20))
    fast = accelerate(attention, "sparse")
    assert isinstance(fast, Attention)
    assert isinstance(fast.in_proj, TileLinear)
    for q, k, v in ((x, x, x), (x, y, y)):
        close(fast(q, k, v, need_weights=False)[0], attention(q, k, v, need_weights=False)[0])
    encoder = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).cuda().half().eval()
    spartan.prune(encoder, 0.75, pattern=Block(32, 32), budget="uniform")
    quick = accelerate(encoder, "sparse")
    assert sum(isinstance(m, TileLinear) for m in quick.modules()) == 4
    close(quick(x), encoder(x))


@torch.inference_mode()
def test_what_no_kernel_suits_stays_as_it_is() -> None:
    encoder = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).cuda().half().eval()
    spartan.prune(encoder, 0.8, budget="uniform")  # scattered: no blocks to skip
    x = torch.randn(2, 9, 128, device="cuda").half()
    fast = accelerate(encoder, example_inputs=x)
    assert type(fast.self_attn) is nn.MultiheadAttention
    assert fast.activation_relu_or_gelu == encoder.activation_relu_or_gelu != 0
    close(fast(x), encoder(x))
    assert {line.kernel for line in explain(fast)} == {"dense"}
    assert "too scattered" in explain(fast)[0].why
    conv = nn.Sequential(spartan.prune(nn.Conv2d(8, 16, 3), 0.9), nn.BatchNorm2d(16), nn.ReLU()).cuda().eval()
    image = torch.randn(2, 8, 12, 12, device="cuda")
    quick = accelerate(conv, "sparse", example_inputs=image)
    close(quick(image), conv(image))
    assert explain(quick)[0].why == "no sparse convolution for CUDA devices"


@pytest.mark.filterwarnings("default")  # torch calls 2:4 tensors a prototype
@torch.inference_mode()
def test_two_of_four() -> None:
    layer = spartan.prune(nn.Linear(256, 256), 0.5, pattern=NM(2, 4)).cuda().half()
    x = torch.randn(64, 256, device="cuda").half()
    semi = SemiStructuredLinear(layer.weight, layer.bias, "gelu")
    close(semi(x), F.gelu(layer(x)))
    close(copy.deepcopy(semi)(x), F.gelu(layer(x)))
    line = explain(accelerate(layer, example_inputs=x))[0]
    assert line.kernel in ("2:4", "dense")
    assert "2:4" in line.why or "failed" in line.why
