"""The GPU kernels for few tokens against float64: on a CUDA device where there is one, else in Triton's interpreter."""

from __future__ import annotations

import copy
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
from spartan.inference.few import ByTokens
from spartan.inference.gpu import choice, few, linear
from spartan.inference.gpu.few import (
    FewTokensLinear,
    ScatterKernel,
    ScatterLinear,
    SplitTileKernel,
    SplitTileLinear,
    pack_scattered,
    unpack_scattered,
)
from spartan.inference.gpu.tiles import Tiling
from spartan.inference.runtime import DenseLinear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(not linear.available(DEVICE), reason=f"no Triton here: {linear.status()}"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
# Of the largest output: TF32 is not used; the interpreter rounds to bfloat16 towards zero.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8.2e-3}
TILING = Tiling(16, 32, 16, 16)
KERNELS: list[ScatterKernel | SplitTileKernel] = [
    *(ScatterKernel(16, 16, splits, 4) for splits in (1, 3)),
    ScatterKernel(32, 64, 2, 4),
    *(SplitTileKernel(TILING, splits, 4, 2) for splits in (1, 3)),
    SplitTileKernel(Tiling(64, 64, 64, 64), 2, 4, 2),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("SPARTAN_CACHE", str(tmp_path))


def matrix(outputs: int, inputs: int, block: int, density: float) -> Tensor:
    """Random, with blocks left (cut off at the edges); the second row of blocks, where there is one, is empty."""
    keep = torch.rand(-(-outputs // block), -(-inputs // block)) < density
    keep[1:2] = False
    return (
        torch.randn(outputs, inputs) * keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:outputs, :inputs]
    )


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, kernel: ScatterKernel | SplitTileKernel, activation: str = "none"
) -> FewTokensLinear:
    """The layer, after a look at its output."""
    dense = DenseLinear(weight.to(DEVICE), None if bias is None else bias.to(DEVICE), activation)
    layer = choice.build(dense, kernel)
    assert isinstance(layer, FewTokensLinear)
    assert torch.equal(layer.weight.cpu(), weight)
    with torch.no_grad():
        got = layer(x.to(DEVICE)).cpu()
    z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    expected = ACTIVATIONS[activation][1](z)
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    if expected.numel():
        gap = (got.double() - expected).abs().max()
        assert gap <= TOLERANCE[x.dtype] * expected.abs().max().clamp(min=1.0), float(gap)
    return layer


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_odd_sizes(kernel: ScatterKernel | SplitTileKernel, dtype: torch.dtype) -> None:
    block = 1 if isinstance(kernel, ScatterKernel) else kernel.tiling.p
    for tokens, inputs, outputs in [(1, 1, 1), (1, 131, 70), (3, 67, 90), (17, 40, 20), (70, 35, 17)]:
        weight, bias = matrix(outputs, inputs, block, 0.3).to(dtype), torch.randn(outputs).to(dtype)
        check(torch.randn(tokens, inputs).to(dtype), weight, bias, kernel)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_activations_and_nan(kernel: ScatterKernel | SplitTileKernel, activation: str) -> None:
    weight = matrix(96, 64, 16, 0.3)
    layer = check(torch.randn(5, 64), weight, torch.randn(96), kernel, activation)
    nan = layer(torch.full((2, 64), torch.nan, device=DEVICE)).isnan()
    if isinstance(kernel, ScatterKernel):
        assert torch.equal(nan[0].cpu(), (weight != 0).any(1)), "NaN reaches what uses it, and nothing else"


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_extremes(kernel: ScatterKernel | SplitTileKernel) -> None:
    bias, one = torch.randn(130), torch.zeros(130, 96)
    one[77, 50] = 3.0
    for weight in (torch.zeros(130, 96), one):
        for tokens in (1, 9):
            check(torch.randn(tokens, 96), weight, bias, kernel, "relu")
    check(torch.randn(2, 40), torch.randn(33, 40), None, kernel)
    check(torch.randn(0, 96), one, bias, kernel)
    check(torch.randn(2, 0, 96), one, None, kernel)
    whole = torch.randn(4, 3, 192)
    for x in (
        whole[..., :96],
        whole[..., ::2],
        torch.randn(96),
        torch.randn(96, 7).T,
        torch.randn(1, 96).expand(5, 96),
    ):
        check(x, one, bias, kernel)


def test_packing() -> None:
    weight = matrix(100, 300, 1, 0.1)
    packed = pack_scattered(weight, 16)
    assert torch.equal(unpack_scattered(packed), weight)
    assert int((packed.values != 0).sum()) == int((weight != 0).sum())
    assert packed.values.numel() < 1.2 * int((weight != 0).sum()) + 16 * 40
    assert packed.columns.dtype == torch.uint16
    wide = torch.zeros(3, 70_000)
    wide[1, 69_999] = 1.0
    assert pack_scattered(wide, 16).columns.dtype == torch.int32
    assert torch.equal(unpack_scattered(pack_scattered(wide, 16)), wide)


@pytest.mark.parametrize("kernel", KERNELS[1::3], ids=str)
def test_operators_and_manners(kernel: ScatterKernel | SplitTileKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = check(torch.randn(3, 64), matrix(96, 64, 16, 0.4), torch.randn(96), kernel, "gelu").to(DEVICE)
    x = torch.randn(3, 7, 64, device=DEVICE)
    expected = layer(x)
    buffers = [getattr(layer, name) for name in layer._names]
    args = (x, buffers, layer._sizes, "gelu")
    torch.library.opcheck(layer._operator, args)
    assert torch.equal(layer._operator(*args), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for tokens in (5, 20):
            more = torch.randn(tokens, 64, device=DEVICE)
            assert torch.allclose(compiled(more), layer(more), atol=1e-6)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(layer.part(x, 32, 64), expected[..., 32:64])
    narrow = copy.deepcopy(layer).half()
    assert (narrow.values.dtype, narrow.bias.dtype) == (torch.float16, torch.float32)
    assert torch.allclose(narrow(x.half()).float(), expected, rtol=2e-3, atol=2e-2)
    assert torch.allclose(layer(x.bfloat16()).float(), expected, rtol=2e-2, atol=5e-2)
    monkeypatch.setattr(few, "_kernels", lambda: None)
    assert torch.allclose(layer(x), expected, atol=1e-5), "without Triton the dense product does it"
    with pytest.raises(RuntimeError, match="cannot be trained"):
        layer.train()


def decide(folder: Path, shape: str, winner: str) -> None:
    """Rewrite the times on disk so that such a kernel wins at this shape."""
    path = folder / "choices.json"
    cases = json.loads(path.read_text())
    for key, times in cases.items():
        if shape in key:
            cases[key] = {**times, next(name for name in times if name.startswith(winner)): 0.0}
    path.write_text(json.dumps(cases))


def test_what_is_timed_for_few_tokens(tmp_path: Path) -> None:
    scattered = spartan.prune(nn.Linear(64, 48), 0.9).weight.detach()
    assert all(isinstance(kernel, ScatterKernel) for kernel in choice.few_kernels(scattered, []))
    dense = spartan.prune(nn.Linear(64, 48), 0.5).weight.detach()
    assert choice.few_kernels(dense, []) == [], "half of the weights are too many"
    assert all(isinstance(k, SplitTileKernel) and k.tiling == TILING for k in choice.few_kernels(dense, [TILING]))
    layer = DenseLinear(scattered.bfloat16().to(DEVICE), None)
    choice.choose(layer, (1, 64), torch.bfloat16, "auto")
    decide(tmp_path, "(1, 64)", "scatter")
    kernel, why = choice.choose(layer, (1, 64), torch.bfloat16, "auto")
    assert isinstance(kernel, ScatterKernel)
    assert "90.0% zeros, input 1×64: scatter" in why
    for shape, dtype in (((65, 64), torch.bfloat16), ((1, 64), torch.float32)):
        assert choice.choose(layer, shape, dtype, "auto")[0] is None, "too many tokens, or not of the type"


def test_kernels_for_single_weights_are_offered_around_four_fifths_of_zeros() -> None:
    """Random places seldom are exactly 80% zeros: a little fewer must not be left to other kernels."""
    torch.manual_seed(0)
    weight = torch.randn(256, 256) * (torch.rand(256, 256) >= 0.795)
    assert choice.cuda_kernels(weight, 0, 1) == choice.SINGLES
    assert choice.SPREADS[0] in choice.cuda_kernels(weight, 0, 16)
    assert not choice.cuda_kernels(torch.ones(256, 256), 0, 1)


@torch.no_grad()
def test_a_converted_model_takes_kernels_by_the_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_on_gpu", lambda tensor: True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).bfloat16().to(DEVICE)
    spartan.prune(model, 0.75, pattern=Block(32, 32))
    x = torch.randn(80, 64, device=DEVICE).bfloat16()
    convert.accelerate(model, "sparse", example_inputs=x, tokens=[1])  # measures
    decide(tmp_path, "(1, 64)", "split tiles")
    fast = convert.accelerate(model, "sparse", example_inputs=x, tokens=[1])
    assert isinstance(fast[0], ByTokens)
    one, many = fast[0].layers
    assert isinstance(one, SplitTileLinear)
    assert isinstance(many, linear.TileLinear)
    assert fast[0].limits == [8]
    for tokens in (1, 8, 9, 80):
        assert torch.allclose(fast(x[:tokens]), model(x[:tokens]), rtol=2e-2, atol=2e-2)


def test_layers_are_of_their_classes() -> None:
    layer = DenseLinear(matrix(32, 32, 16, 0.5).to(DEVICE), None)
    assert isinstance(choice.build(layer, KERNELS[0]), ScatterLinear)
    assert isinstance(choice.build(layer, KERNELS[3]), SplitTileLinear)
