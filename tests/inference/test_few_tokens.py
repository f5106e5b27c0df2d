"""The CPU kernels for one token or a few against float64, and the choice of a kernel by the number of tokens."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spartan
from spartan import Block
from spartan.gpt import GPT
from spartan.inference.convert import accelerate, explain
from spartan.inference.cpu import choice, library, ops
from spartan.inference.cpu.ops import pack
from spartan.inference.cpu.walk import MOST_INPUTS, MOST_TOKENS, pack_walk, unpack_walk, walk
from spartan.inference.few import ByTokens, WalkLinear
from spartan.inference.runtime import DenseLinear, SparseLinear

needs_kernels = pytest.mark.skipif(library.library() is None, reason=f"no compiled kernels here: {library.status()}")
ISAS = {"portable": 0, "avx2": 1, "avx512": 2}
# Of the largest output; bfloat16 rounds it to 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4.1e-3}
TOKENS = (1, 2, 3, 4, 8, 9, 16, 21)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    library.library()  # compiled into the usual cache; the times go into this one
    monkeypatch.setenv("SPARTAN_CACHE", str(tmp_path))


@pytest.fixture(params=list(ISAS))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels = library.library()
    assert kernels is not None
    if not kernels.spartan_use_isa(ISAS[request.param]):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    kernels.spartan_use_isa(-1)


def scattered(outputs: int, inputs: int, density: float) -> Tensor:
    """Random single weights; the second row and, where there are many, the rows of the second group are empty."""
    weight = torch.randn(outputs, inputs) * (torch.rand(outputs, inputs) < density)
    weight[1:2] = weight[16:32] = 0
    return weight


def multiply(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "none") -> Tensor:
    packed = pack_walk(weight)
    return walk(x, packed, F.pad(bias, (0, -len(bias) % 16))[packed.rows.long()], activation)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == expected.shape
    gap = (got.double() - expected).abs().max()
    assert gap <= TOLERANCE[dtype] * expected.abs().max().clamp(min=1.0), float(gap)


@needs_kernels
@pytest.mark.parametrize("values", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("density", [0.01, 0.1, 0.4])
def test_walk(density: float, dtype: torch.dtype, values: torch.dtype, isa: str) -> None:
    for inputs, outputs in [(1, 1), (33, 67), (300, 40), (1301, 150)]:
        weight, bias = scattered(outputs, inputs, density).to(values), torch.randn(outputs)
        for tokens in TOKENS:
            x = torch.randn(tokens, inputs).to(dtype)
            expected = F.linear(x.double(), weight.double(), bias.double())
            close(multiply(x, weight, bias), expected, dtype)


@needs_kernels
@pytest.mark.parametrize("tokens", TOKENS)
def test_walk_edges(tokens: int, isa: str) -> None:
    x, bias = torch.randn(tokens, 400), torch.randn(50)
    assert torch.equal(multiply(x, torch.zeros(50, 400), bias), bias.expand(tokens, 50)), "all zero"
    one = torch.zeros(50, 400)
    one[17, 333] = 2.0
    close(multiply(x, one, bias), F.linear(x.double(), one.double(), bias.double()), torch.float32)
    assert multiply(x[:0], one, bias).shape == (0, 50)
    dense = torch.randn(50, 400)
    close(multiply(x, dense, bias), F.linear(x.double(), dense.double(), bias.double()), torch.float32)
    batched = multiply(x.reshape(1, tokens, 400), dense, bias, "relu")
    assert torch.equal(batched[0], multiply(x, dense, bias, "relu"))


@needs_kernels
@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize("activation", list(ops.ACTIVATIONS))
def test_activations(activation: str, tokens: int, isa: str) -> None:
    weight, bias = torch.zeros(37, 70), torch.linspace(-30, 30, 37)
    x = torch.randn(tokens, 70)
    expected = ops.ACTIVATIONS[activation][1](bias.double()).expand(tokens, 37)
    got = multiply(x, weight, bias, activation)
    assert ((got.double() - expected).abs() <= 4e-7 * expected.abs().clamp(min=1.0)).all()


@needs_kernels
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("density", [0.01, 0.2])
def test_nan_reaches_the_outputs_that_use_it(density: float, tokens: int, isa: str) -> None:
    """Whatever fills the slots up: rows of very different lengths leave much to fill."""
    weight = scattered(70, 500, density) * (torch.rand(70, 1) < 0.7)
    x = torch.ones(tokens, 500)
    x[-1, ::7] = torch.nan
    used = (weight[:, ::7] != 0).any(1)
    got = multiply(x, weight, torch.zeros(70)).isnan()
    assert torch.equal(got[-1], used)
    assert not got[:-1].any()


@needs_kernels
def test_packing() -> None:
    weight = scattered(300, 1000, 0.1)
    packed = pack_walk(weight)
    kept = int((weight != 0).sum())
    assert torch.equal(unpack_walk(packed), weight)
    assert int((packed.values != 0).sum()) == kept
    assert packed.values.numel() < 1.5 * kept, "rows of like length go together"
    assert sorted(packed.rows.tolist()) == list(range(304))
    assert packed.rows[:128].max() < 128, "rows stay among their neighbours"
    half = pack_walk(weight.bfloat16())
    assert half.values.dtype == torch.bfloat16
    assert torch.equal(unpack_walk(half), weight.bfloat16())
    with pytest.raises(
        ValueError, match=f"a weight of {MOST_INPUTS + 1} inputs; this kernel takes up to {MOST_INPUTS}"
    ):
        pack_walk(torch.zeros(1, MOST_INPUTS + 1))
    assert torch.equal(unpack_walk(pack_walk(torch.zeros(3, 5))), torch.zeros(3, 5))


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("h", "g"), [(8, 1), (8, 8), (16, 4), (32, 8), (64, 1)])
def test_blocks_of_bfloat16_weights(h: int, g: int, dtype: torch.dtype, isa: str) -> None:
    for tokens in (1, 2, 3, 7, 29):
        keep = (torch.rand(-(-130 // h), -(-67 // g)) < 0.3).repeat_interleave(h, 0).repeat_interleave(g, 1)
        weight = (torch.randn(130, 67) * keep[:130, :67]).bfloat16()
        packed, bias = pack(weight, h, g, half=True), torch.randn(130)
        assert packed.values.dtype == torch.bfloat16
        x = torch.randn(tokens, 67).to(dtype)
        got = ops.linear("rows", x, packed, packed.runs, F.pad(bias, (0, -130 % h)), "none")
        close(got, F.linear(x.double(), weight.double(), bias.double()), dtype)


@needs_kernels
def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    weight, bias, x = scattered(700, 300, 0.1), torch.randn(700), torch.randn(16, 300)
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([multiply(x[:tokens], weight, bias, "gelu") for tokens in TOKENS[:-1]])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_kernels
def test_the_layer() -> None:
    plain = spartan.prune(nn.Linear(130, 70), 0.9)
    layer = WalkLinear(plain.weight, plain.bias, "relu")
    x = torch.randn(3, 130)
    expected = F.relu(plain(x)).detach()
    assert torch.allclose(layer(x), expected, atol=1e-5)
    assert torch.equal(layer.weight, plain.weight)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(layer.part(x, 10, 35), layer(x)[:, 10:35])
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(layer)
    for buffer in twin.buffers():
        buffer.zero_()
    twin.load_state_dict(torch.load(file))
    assert torch.equal(twin(x), layer(x))
    narrow = copy.deepcopy(layer).bfloat16()
    assert narrow.values.dtype == torch.bfloat16
    assert narrow.bias.dtype == torch.float32
    assert torch.allclose(
        narrow(x), F.relu(F.linear(x, plain.weight.bfloat16().float(), narrow_bias(plain))), atol=1e-5
    )
    assert narrow.float().values.dtype == torch.float32
    with pytest.raises(ValueError, match="takes float32 and bfloat16, not torch.float64"):
        layer(x.double())
    with pytest.raises(RuntimeError, match="cannot be trained"):
        layer.train()


def narrow_bias(plain: nn.Linear) -> Tensor:
    return plain.bias.detach().bfloat16().float()


@needs_kernels
def test_rows_keep_the_type_of_the_weight() -> None:
    weight = torch.randn(64, 64) * torch.eye(4).repeat_interleave(16, 0).repeat_interleave(16, 1)
    rows, lanes = (SparseLinear(weight.bfloat16(), None, kernel) for kernel in (("rows", 16, 8), ("lanes", 1, 1)))
    assert (rows.values.dtype, lanes.values.dtype) == (torch.bfloat16, torch.float32)
    assert rows.float().values.dtype == torch.float32
    assert lanes.bfloat16().values.dtype == torch.float32
    assert rows.bfloat16().values.dtype == torch.bfloat16


@needs_kernels
def test_without_the_library_the_dense_product_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = spartan.prune(nn.Linear(130, 70), 0.9)
    layer, x = WalkLinear(plain.weight, plain.bias), torch.randn(3, 130)
    expected = layer(x)
    monkeypatch.setattr("spartan.inference.few.library", lambda: None)
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_the_number_of_tokens_decides() -> None:
    weight = torch.randn(8, 4)
    one, some, many = (DenseLinear(weight * factor, None) for factor in (1, 2, 3))
    one.most_tokens = 2  # type: ignore[assignment]
    layer = ByTokens([(1, one), (16, some), (256, many)])
    assert layer.limits == [2, 64]
    for tokens, factor in ((1, 1), (2, 1), (3, 2), (64, 2), (65, 3), (4000, 3)):
        x = torch.randn(tokens, 4)
        assert torch.equal(layer(x), F.linear(x, weight * factor))
        assert torch.equal(layer.part(x, 2, 5), F.linear(x, weight[2:5] * factor))
    assert torch.equal(layer.weight, weight * 3)
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(5, 4)
    assert torch.equal(compiled(x), layer(x))


@needs_kernels
def test_few_tokens_get_their_kernel() -> None:
    layer = DenseLinear(spartan.prune(nn.Linear(96, 80), 0.9).weight, None)
    assert choice.candidates(layer, tokens=MOST_TOKENS)[0][0] == choice.WALK
    assert choice.WALK not in [kernel for kernel, _ in choice.candidates(layer, tokens=MOST_TOKENS + 1)]
    assert choice.WALK not in [kernel for kernel, _ in choice.candidates(layer)]


def decide(tmp_path: Path, one: str, many: str) -> None:
    """Rewrite the times on disk so that these kernels win at one token and at more."""
    path = tmp_path / "choices.json"
    cases = json.loads(path.read_text())
    for key, times in cases.items():
        winner = one if "(1, " in key and "(1, 40, " not in key else many
        name = next(name for name in times if name.startswith(winner))
        cases[key] = {**times, name: 0.0}
    path.write_text(json.dumps(cases))


@needs_kernels
@torch.no_grad()
def test_a_decoder_reads_prompts_and_tokens_with_kernels_of_their_own(tmp_path: Path) -> None:
    model = GPT(context=64, layers=2, width=64, heads=2).eval()
    spartan.prune(model, 0.9, budget="uniform", exclude=["tokens*", "positions*", "head*"])
    prompt = torch.randint(256, (1, 40))
    accelerate(model, example_inputs=prompt)  # measures
    decide(tmp_path, one="walk", many="dense")
    fast = accelerate(model, example_inputs=prompt)
    layers = [layer for layer in fast.modules() if isinstance(layer, ByTokens)]
    assert len(layers) == 8
    assert layers[0].kernel == "walk 16 up to 6 tokens, dense"
    assert isinstance(layers[0].layers[0], WalkLinear)
    lines = [line for line in explain(fast) if "walk" in line.kernel]
    assert len(lines) == 8, "one line for a layer"
    assert "input 1×64" in lines[0].why
    assert "input 1×40×64" in lines[0].why
    assert torch.equal(fast.generate(prompt, 12, temperature=0), model.generate(prompt, 12, temperature=0))
    decide(tmp_path, one="walk", many="lanes 1")
    other = accelerate(model, "auto", example_inputs=prompt, tokens=())
    assert not [layer for layer in other.modules() if isinstance(layer, ByTokens)], "nothing else was asked for"


@needs_kernels
@torch.no_grad()
def test_one_kernel_for_all_is_one_layer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU())
    spartan.prune(model, 0.75, pattern=Block(16, 16))
    x = torch.randn(40, 128)
    accelerate(model, example_inputs=x, tokens=[1])
    decide(tmp_path, one="rows", many="rows")
    fast = accelerate(model, example_inputs=x, tokens=[1])
    assert isinstance(fast[0], SparseLinear)
    assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert torch.allclose(fast(x[:1]), model(x[:1]), atol=1e-5)
    for bad in ([0], [True], [2.0]):
        with pytest.raises(ValueError, match="tokens=.*whole numbers of at least 1"):
            accelerate(model, tokens=bad)  # type: ignore[arg-type]


class MaybeShifted(nn.Module):
    """Takes an argument without a default that may be None, as blocks with a cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, shift: Tensor | None) -> Tensor:
        x = F.relu(self.up(x))
        return self.down(x if shift is None else x + shift)


class Caller(nn.Module):
    """Calls it both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MaybeShifted()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x, None)
        return self.inner(x, torch.ones(64)) if len(x) > 1 else x


@torch.no_grad()
def test_what_may_be_none_is_not_traced() -> None:
    model = spartan.prune(Caller(), 0.9)
    x = torch.randn(4, 32)
    fast = accelerate(model, "sparse", example_inputs=x[:1])
    assert isinstance(fast.inner, MaybeShifted), "not its trace, which knows one side of the condition alone"
    for some in (x[:1], x):
        assert torch.allclose(fast(some), model(some), atol=1e-5)


def clang() -> str | None:
    """A compiler of clang's kind: what macOS and docs/releases.md build with."""
    if found := shutil.which("clang++"):
        return found
    return f"{sys.executable} -m ziglang c++" if importlib.util.find_spec("ziglang") else None


@needs_kernels
@pytest.mark.slow
@pytest.mark.skipif(clang() is None, reason="needs clang++ on the path, or the package ziglang")
def test_another_compiler(tmp_path: Path) -> None:
    """clang takes an address for aligned where its type says so, and gcc did not: the first build by it crashed."""
    code = (
        "import torch\n"
        "from spartan.inference.cpu import library\n"
        "from spartan.inference.cpu.walk import pack_walk, walk\n"
        "kernels, weight = library.library(), torch.randn(67, 131) * (torch.rand(67, 131) < 0.2)\n"
        "for isa in (0, 1, 2):\n"
        "    if kernels.spartan_use_isa(isa):\n"
        "        for tokens in range(1, 20):\n"
        "            x = torch.randn(tokens, 131)\n"
        "            assert torch.allclose(walk(x, pack_walk(weight), torch.zeros(80), 'none'), x @ weight.T, atol=1e-4)\n"
    )
    given = {"CXX": str(clang()), "SPARTAN_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert list(tmp_path.glob("kernels-*.so")), "compiled by it, not the package's own"
