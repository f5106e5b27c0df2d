"""The GPU kernel against float64, on odd sizes: on a CUDA device where there is one, else in Triton's interpreter."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spartan
from spartan import Block
from spartan.inference import convert
from spartan.inference.cpu.ops import ACTIVATIONS
from spartan.inference.gpu import choice, linear
from spartan.inference.gpu.linear import LOADS, DeviceLinear, Launch, SemiStructuredLinear, TileLinear, two_of_four
from spartan.inference.gpu.tiles import Tiling, blocks_of, deal, group_rows, pack, unpack
from spartan.inference.runtime import DenseLinear
from spartan.inference.stand_ins import Attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(not linear.available(DEVICE), reason=f"no Triton here: {linear.status()}"),
    # A sigmoid far from zero, in the interpreter: 1 / (1 + ∞) is the 0 that it should be.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
# Of the largest output: TF32 is not used; the interpreter rounds to bfloat16 towards zero.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8.2e-3}
LAUNCH = Launch(64, 4, 2, 64, "async")
BLOCKS = [(p, q) for p in (16, 32, 64) for q in (16, 32, 64)]


def matrix(outputs: int, inputs: int, p: int, q: int, density: float = 0.4) -> Tensor:
    """Random, with blocks of p × q left (cut off at the edges); the second row of blocks, where there is one, is empty."""
    keep = torch.rand(-(-outputs // p), -(-inputs // q)) < density
    keep[1:2] = False
    return torch.randn(outputs, inputs) * keep.repeat_interleave(p, 0).repeat_interleave(q, 1)[:outputs, :inputs]


def check(
    x: Tensor, weight: Tensor, bias: Tensor, tiling: Tiling, launch: Launch = LAUNCH, activation: str = "none"
) -> TileLinear:
    """The layer, after a look at its output."""
    layer = TileLinear(weight.to(DEVICE), bias.to(DEVICE), tiling, launch, activation)
    assert torch.equal(layer.weight.cpu(), weight)
    with torch.no_grad():
        got = layer(x.to(DEVICE)).cpu()
    expected = ACTIVATIONS[activation][1](F.linear(x.double(), weight.double(), bias.double()))
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    if expected.numel():
        gap = (got.double() - expected).abs().max()
        assert gap <= TOLERANCE[x.dtype] * expected.abs().max().clamp(min=1.0), float(gap)
    return layer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("SPARTAN_CACHE", str(tmp_path))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("p", "q"), BLOCKS)
def test_blocks(p: int, q: int, dtype: torch.dtype) -> None:
    for tokens, inputs, outputs in [(1, 1, 1), (67, 96, 112), (129, 131, 200)]:
        weight, bias = matrix(outputs, inputs, p, q).to(dtype), torch.randn(outputs).to(dtype)
        check(torch.randn(tokens, inputs).to(dtype), weight, bias, Tiling(p, q, p, q))


@pytest.mark.parametrize("tiling", choice.TILINGS, ids=str)
def test_every_tiling_that_is_tried(tiling: Tiling) -> None:
    weight, bias = matrix(208, 176, tiling.p, tiling.q), torch.randn(208)
    for loads in LOADS:
        check(torch.randn(70, 176), weight, bias, tiling, Launch(64, 4, 2, 64, loads))


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations(activation: str, dtype: torch.dtype, loads: str) -> None:
    weight, bias = matrix(96, 64, 32, 32).to(dtype), torch.randn(96).to(dtype)
    check(torch.randn(33, 64).to(dtype), weight, bias, Tiling(32, 32, 32, 32), Launch(64, 4, 3, 64, loads), activation)
    layer = TileLinear(weight.to(DEVICE), None, Tiling(32, 32, 32, 32), LAUNCH, activation)
    nan = layer(torch.full((2, 64), torch.nan, dtype=dtype, device=DEVICE)).isnan()
    assert torch.equal(nan[0].cpu(), (weight != 0).any(1)), "NaN reaches what uses it, and nothing else"


@pytest.mark.parametrize("span", [16, 64, 512, 4096])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_tokens_and_spans(tokens: int, span: int) -> None:
    weight, bias = matrix(320, 96, 16, 16, 0.2), torch.randn(320)
    layer = check(torch.randn(tokens, 96), weight, bias, Tiling(16, 32, 16, 16), Launch(64, 4, 2, span, "async"))
    assert layer.starts.numel() - 1 == max(1, -(-(layer.outs.shape[0] - layer.empties) // (span // 16)))


@pytest.mark.parametrize("tiling", [Tiling(16, 64, 16, 16), Tiling(64, 64, 64, 64), Tiling(64, 32, 32, 32)], ids=str)
def test_extremes(tiling: Tiling) -> None:
    bias = torch.randn(130)
    for weight in (torch.zeros(130, 96), torch.randn(130, 96), torch.eye(130, 96)):
        check(torch.randn(9, 96), weight, bias, tiling, activation="relu")
    assert TileLinear(torch.zeros(130, 96), bias, tiling, LAUNCH).empties == -(-130 // tiling.outputs)
    check(torch.randn(0, 96), torch.randn(130, 96), bias, tiling)
    check(torch.randn(2, 0, 96), torch.randn(130, 96), bias, tiling)


def test_inputs_of_any_layout() -> None:
    weight, bias, tiling = matrix(64, 48, 16, 16), torch.randn(64), Tiling(16, 16, 16, 16)
    whole = torch.randn(4, 10, 96)
    for x in (
        whole[..., :48],
        whole[..., 3:51],
        whole[::2, 1:, :48],
        whole[..., ::2],
        torch.randn(48, 7).T,
        torch.randn(48),
        torch.randn(10, 4, 48).transpose(0, 1),
        torch.randn(1, 48).expand(5, 48),
    ):
        for loads in LOADS:
            check(x, weight, bias, tiling, Launch(64, 4, 2, 64, loads))


def test_packing_is_exact_and_balanced() -> None:
    weight = spartan.prune(nn.Linear(768, 1024), 0.9, pattern=Block(32, 32)).weight.detach()
    kept = int(blocks_of(weight != 0, 32, 32).sum())
    for tiling in (Tiling(32, 32, 32, 32), Tiling(32, 64, 32, 32), Tiling(64, 64, 32, 32), Tiling(128, 64, 16, 16)):
        tiles = pack(weight, tiling, 4)
        assert torch.equal(unpack(tiles), weight)
    tiles = pack(weight, Tiling(32, 32, 32, 32), 4)
    assert len(tiles.weight) == kept == int(tiles.starts[-1])
    steps = tiles.starts.diff()
    assert len(steps) == 8
    assert int(steps.max() - steps.min()) <= 2
    assert sorted(tiles.outs.flatten().tolist()) == list(range(32))


def test_rows_with_the_same_blocks_meet() -> None:
    kinds = torch.rand(4, 24) < 0.2
    keep = kinds[torch.randperm(32) % 4]
    groups = group_rows(keep, 8)
    assert sorted(groups.flatten().tolist()) == list(range(32))
    assert int(keep[groups].any(1).sum()) == int(kinds.sum())
    assert group_rows(keep[:30], 8).max() == 30, "a row beyond the last fills up"
    assert deal([0, 0], 3) == [[], [], []]


def test_the_operator() -> None:
    layer = TileLinear(matrix(96, 64, 32, 32).to(DEVICE), None, Tiling(32, 32, 32, 32), LAUNCH, "gelu")
    x = torch.randn(3, 7, 64, device=DEVICE)
    buffers = [layer.tiles, layer.ins, layer.last, layer.outs, layer.starts, layer.bias]
    args = (x, buffers, [96, layer.empties, 32, 32, 32, 32], layer._launch, "gelu")
    torch.library.opcheck(linear.tile_linear, args)
    assert torch.equal(linear.tile_linear(*args), layer(x))


def test_compiles_into_one_graph() -> None:
    model = nn.Sequential(
        TileLinear(matrix(96, 64, 32, 32).to(DEVICE), None, Tiling(32, 32, 32, 32), LAUNCH, "gelu"), nn.LayerNorm(96)
    ).to(DEVICE)
    compiled = torch.compile(model.eval(), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for tokens in (5, 70):
            x = torch.randn(tokens, 64, device=DEVICE)
            assert torch.allclose(compiled(x), model(x), atol=1e-6)


def test_manners() -> None:
    weight, bias = matrix(96, 64, 32, 32).to(DEVICE), torch.randn(96, device=DEVICE)
    layer = TileLinear(weight, bias, Tiling(32, 32, 32, 32), LAUNCH, "relu")
    x = torch.randn(5, 64, device=DEVICE)
    expected = layer(x)
    assert isinstance(layer, DeviceLinear)
    assert (layer.inputs, layer.outputs) == (64, 96)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(layer.part(x, 32, 64), expected[:, 32:64])
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(layer)
    for buffer in twin.buffers():
        buffer.zero_()
    twin.load_state_dict(torch.load(file))
    assert torch.equal(twin(x), expected)
    narrow = copy.deepcopy(layer).half()
    assert narrow.bias.dtype == torch.float32
    assert torch.allclose(narrow(x.half()).float(), expected, atol=1e-2)
    assert torch.allclose(layer(x.bfloat16()).float(), expected, rtol=2e-2, atol=5e-2)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert "tiles 32×32, async 64 tokens" in repr(layer)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        layer.train()
    with pytest.raises(RuntimeError, match="no gradients"):
        layer(x.requires_grad_())
    with pytest.raises(ValueError, match="takes float32, bfloat16 and float16, not torch.float64"):
        layer(x.detach().double())
    with pytest.raises(ValueError, match="dimension -1 must be 64"):
        layer(torch.randn(2, 63, device=DEVICE))
    with pytest.raises(ValueError, match="activation='tanh'"):
        TileLinear(weight, bias, Tiling(32, 32, 32, 32), LAUNCH, "tanh")
    for sizes in ((8, 16, 8, 16), (32, 32, 64, 32), (48, 32, 16, 16)):
        with pytest.raises(ValueError, match="must be 16, 32, 64 or 128"):
            Tiling(*sizes)


def test_without_the_kernel_the_dense_product_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TileLinear(matrix(96, 64, 32, 32).to(DEVICE), None, Tiling(32, 32, 32, 32), LAUNCH, "gelu")
    x = torch.randn(5, 64, device=DEVICE)
    expected = layer(x)
    monkeypatch.setattr(linear, "_kernel", lambda: None)
    assert torch.allclose(layer(x), expected, atol=1e-5)
    dense = DenseLinear(torch.zeros(64, 64, device=DEVICE), None)
    kernel, why = choice.choose(dense, (8, 64), torch.float32, "auto")
    assert kernel is None
    assert "Triton is not installed" in why


@pytest.mark.parametrize(
    ("pattern", "p", "q"), [(Block(64, 64), 64, 64), (Block(32, 32), 32, 32), (Block(16, 16), 16, 16)], ids=str
)
def test_candidates_follow_the_pattern(pattern: Block, p: int, q: int) -> None:
    weight = spartan.prune(nn.Linear(768, 768), 0.9, pattern=pattern).weight.detach()
    (first, share), *_ = choice.candidates(weight)
    assert (first.p, first.q) == (p, q)
    assert 0.09 <= share <= 0.4
    scattered = spartan.prune(nn.Linear(256, 256), 0.9)
    layer = DenseLinear(scattered.weight.to(DEVICE), None)
    assert choice.choose(layer, (8, 256), torch.float32, "auto") == (
        None,
        "90.0% zeros: too few, or too scattered for any kernel",
    )


def test_the_choice_is_measured_once_and_kept(tmp_path: Path) -> None:
    weight = spartan.prune(nn.Linear(128, 128), 0.75, pattern=Block(32, 32)).weight.detach().to(DEVICE)
    layer = DenseLinear(weight, None, "relu")
    kernel, why = choice.choose(layer, (20, 128), torch.float32, "sparse")
    assert isinstance(kernel, choice.TileKernel)
    assert "75.0% zeros, input 20×128: tiles" in why
    ((key, times),) = json.loads((tmp_path / "choices.json").read_text()).items()
    assert "(20, 128)" in key
    assert "dense" not in times
    x = torch.randn(20, 128, device=DEVICE)
    assert torch.allclose(choice.build(layer, kernel)(x), layer(x), atol=1e-4)
    # What is on disk is what counts: a made-up winner wins; names that are no longer known do not count.
    loser = max(times, key=times.get)
    (tmp_path / "choices.json").write_text(json.dumps({key: {**times, loser: 0.0}}))
    assert str(choice.choose(layer, (20, 128), torch.float32, "sparse")[0]) == loser
    (tmp_path / "choices.json").write_text(json.dumps({key: {"tiles of old": 0.0}}))
    assert choice.choose(layer, (20, 128), torch.float32, "sparse")[0] is not None


def test_a_kernel_that_fails_or_is_wrong_is_left_out() -> None:
    layer = DenseLinear(torch.randn(64, 64, device=DEVICE), None)
    broken = choice.TileKernel(Tiling(32, 32, 32, 32), Launch(48, 4, 2, 64, "async"))  # 48 is no power of two
    times = choice.measure(layer, (8, 64), torch.float32, {"broken": broken, "2:4": "2:4", "dense": None})
    assert times["broken"] == float("inf")
    assert times["2:4"] == float("inf"), "the weight is not 2:4"
    assert 0 < times["dense"] < float("inf")
    with pytest.raises(ArithmeticError, match="differs from the dense one's by"):
        choice.close(torch.ones(3), torch.zeros(3))
    with pytest.raises(ArithmeticError):
        choice.close(torch.full((3,), torch.nan), torch.ones(3))


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion as for a CUDA device, whose kernels the interpreter then runs."""
    monkeypatch.setattr(convert, "_on_gpu", lambda tensor: True)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("block", [16, 32])
@torch.no_grad()
def test_a_converted_vision_transformer(block: int) -> None:
    from spartan.zoo import timm

    model = timm().create_model("vit_tiny_patch16_224", img_size=32, embed_dim=64, depth=2, num_heads=2, num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    pattern = Block(block, block)
    spartan.prune(model, 0.75, pattern=pattern, budget="uniform", exclude=["patch_embed*", "head*"])
    model, x = model.eval().to(DEVICE), torch.randn(3, 3, 32, 32, device=DEVICE)
    fast = convert.accelerate(model, "sparse", example_inputs=x)
    assert torch.allclose(fast(x), model(x), atol=1e-4)
    sparse = {name: m for name, m in fast.named_modules() if isinstance(m, TileLinear)}
    assert len(sparse) == 4 * 2
    assert sparse["blocks.0.mlp.fc1"].activation == "gelu"
    lines = {line.layer: line for line in convert.explain(fast)}
    assert lines["blocks.0.attn.qkv"].kernel.startswith("tiles")
    assert "75.0% zeros, input 3×5×64" in lines["blocks.0.attn.qkv"].why


@pytest.mark.usefixtures("as_on_gpu")
@torch.no_grad()
def test_converted_attention() -> None:
    attention: nn.Module = nn.MultiheadAttention(64, 4, batch_first=True)
    spartan.prune(attention, 0.5, pattern=Block(32, 32))
    x, y = torch.randn(2, 9, 64, device=DEVICE), torch.randn(2, 5, 64, device=DEVICE)
    attention = attention.to(DEVICE).eval()
    fast = convert.accelerate(attention, "sparse", example_inputs=(x, x, x))
    assert isinstance(fast, Attention)
    assert isinstance(fast.in_proj, TileLinear)
    for q, k in ((x, x), (x, y)):
        assert torch.allclose(fast(q, k, k)[0], attention(q, k, k)[0], atol=1e-5)


@pytest.mark.usefixtures("as_on_gpu")
@torch.no_grad()
def test_what_no_kernel_suits_stays_as_it_is() -> None:
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(DEVICE).eval()
    spartan.prune(encoder, 0.8, budget="uniform")  # scattered: no blocks to skip
    x = torch.randn(2, 9, 64, device=DEVICE)
    fast = convert.accelerate(encoder, example_inputs=x)
    assert type(fast.self_attn) is nn.MultiheadAttention
    assert fast.activation_relu_or_gelu == encoder.activation_relu_or_gelu != 0
    assert torch.allclose(fast(x), encoder(x), atol=1e-5)
    lines = convert.explain(fast)
    assert {line.kernel for line in lines} == {"dense"}
    assert "too scattered" in lines[0].why
    spartan.prune(encoder, 0.75, pattern=Block(32, 32))
    fast = convert.accelerate(encoder, "sparse", example_inputs=x)
    assert fast.activation_relu_or_gelu == 0, "the fused path would unpack every weight"
    assert sum(isinstance(m, TileLinear) for m in fast.modules()) == 4
    assert torch.allclose(fast(x), encoder(x), atol=1e-4)
    conv = nn.Sequential(spartan.prune(nn.Conv2d(8, 16, 3), 0.9), nn.BatchNorm2d(16), nn.MaxPool2d(2)).to(DEVICE).eval()
    image = torch.randn(2, 8, 12, 12, device=DEVICE)
    quick = convert.accelerate(conv, "sparse", example_inputs=image)
    assert torch.allclose(quick(image), conv(image), atol=1e-5)
    assert type(quick[2]) is nn.MaxPool2d
    assert convert.explain(quick)[0].why == "no sparse convolution for CUDA devices"


def test_launches_fit() -> None:
    for launch in choice.LAUNCHES:
        assert launch.loads in LOADS
        assert launch.loads != "tma" or not choice.fits(Tiling(64, 64, 32, 32), launch, 2)
    assert any(choice.fits(t, launch, 2) for t in choice.TILINGS for launch in choice.LAUNCHES)
    assert not choice.fits(Tiling(128, 64, 64, 64), Launch(128, 4, 3, 512, "async"), 2), "128 sums a thread"
    for tiling in choice.TILINGS:
        assert choice.tile_kernels([tiling], choice.LAUNCHES, 2), "something to time for every tiling"


def test_semi_structured_away_from_its_device() -> None:
    weight = torch.randn(64, 64) * torch.tensor([1.0, 0, 0, 1]).repeat(16)
    layer = SemiStructuredLinear(weight, None, "silu")
    x = torch.randn(3, 64)
    assert torch.allclose(layer(x), F.silu(F.linear(x, weight)), atol=1e-6)
    assert torch.equal(copy.deepcopy(layer).weight, weight)
    assert not two_of_four(torch.ones(2, 4))
    assert not two_of_four(torch.zeros(2, 6))
    with pytest.raises(ValueError, match="at most two may differ"):
        SemiStructuredLinear(torch.ones(4, 4), None)
