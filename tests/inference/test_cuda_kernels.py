"""The CUDA kernels against float64: on a device where there is one, else their source on a CPU, by cuda_on_cpu.h."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import hashlib
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spartan.inference.cpu.ops import ACTIVATIONS
from spartan.inference.gpu import blocks, choice, gathers, linear, nvrtc, singles, spread
from spartan.inference.gpu.blocks import BlockKernel, BlockLinear, pack_blocks, unpack_blocks
from spartan.inference.gpu.gathers import GatherKernel, GatherLinear, pack_gathers, unpack_gathers
from spartan.inference.gpu.linear import DeviceLinear
from spartan.inference.gpu.nvrtc import CudaLinear
from spartan.inference.gpu.singles import SingleKernel, SingleLinear, pack_singles, unpack_singles
from spartan.inference.gpu.spread import SpreadKernel, SpreadLinear, pack_spread, unpack_spread
from spartan.inference.runtime import DenseLinear

HERE = Path(__file__).parent
SOURCES = Path(blocks.__file__).parent
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ON_DEVICE = nvrtc.available(DEVICE)
# Of the largest output, one rounding of it and those of the exponential.
TOLERANCE = {torch.bfloat16: 4.2e-3, torch.float16: 6e-4}
DTYPES = [torch.bfloat16, torch.float16] if ON_DEVICE else [torch.bfloat16]
KERNELS: list[choice.CudaKernel] = [
    BlockKernel(1, 2, 4),
    BlockKernel(2, 4, 2),
    BlockKernel(1, 2, 4, 16, 2, 4),
    BlockKernel(2, 1, 2, 32, 3, 2),
    SingleKernel(1, 4, 2),
    SingleKernel(2, 2, 4),
    GatherKernel(1, 2, 1, 1),
    GatherKernel(2, 3, 2, 2),
    SpreadKernel(4, 2, 1, 2),
    SpreadKernel(3, 1, 2),
]
SIZES = [(1, 1, 1), (1, 131, 70), (3, 67, 90), (17, 48, 20), (70, 96, 33)]  # tokens, inputs, outputs


class Emulated:
    """`nvrtc.Function`, on a CPU."""

    folder: Path

    def __init__(
        self,
        source: str,
        name: str,
        layout: struct.Struct,
        macros: Mapping[str, int],
        device: int | None,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        kernel = (SOURCES / f"{source}.cu").read_text()
        arguments = kernel.split("struct ")[1].split(" {")[0]
        text = f'#include "{HERE / "cuda_on_cpu.h"}"\n{(SOURCES / "common.cu").read_text()}\n{kernel}\n'
        text += f"""extern "C" void run(const void* packed, int x, int y) {{
            emulate<{arguments}>([]({arguments} p) {{ {name}(p); }}, packed, x, y, {threads}, {shared}, {cluster});
        }}"""
        flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", *(f"-D{k}={v}" for k, v in macros.items())]
        built = self.folder / f"{hashlib.sha256((text + str(flags)).encode()).hexdigest()[:16]}.so"
        if not built.exists():
            command = ["g++", *flags, "-x", "c++", "-", "-o", str(built)]
            subprocess.run(command, input=text.encode(), check=True)
        self._run, self._layout = ctypes.CDLL(str(built)).run, layout

    def prepare(self, grid: tuple[int, int], arguments: Sequence[int], output: int) -> Callable[[int, int], None]:
        def launch(inputs: int, outputs: int) -> None:
            given = [inputs, *arguments[1:output], outputs, *arguments[output + 1 :]]
            self._run(self._layout.pack(*given), *grid)

        return launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def emulator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, wherever they can run: a device, or a CPU with a compiler."""
    torch.manual_seed(0)
    if ON_DEVICE:
        return
    if shutil.which("g++") is None:
        pytest.skip("no CUDA device of sm_90 and no g++ here")
    Emulated.folder = folder
    monkeypatch.setattr(nvrtc, "Function", Emulated)
    monkeypatch.setattr(nvrtc, "available", lambda device: True)
    monkeypatch.setattr(linear, "is_here", lambda device: True)
    monkeypatch.setattr(linear, "on", lambda device: contextlib.nullcontext())
    for module in (blocks, singles, gathers, spread):
        for cached in ("_few", "_many", "_function"):
            if hasattr(module, cached):
                getattr(module, cached).cache_clear()


def matrix(outputs: int, inputs: int, block: int, density: float) -> Tensor:
    """Random, with blocks left (cut off at the edges); the second row of blocks, where there is one, is empty."""
    keep = torch.rand(-(-outputs // block), -(-inputs // block)) < density
    keep[1:2] = False
    mask = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:outputs, :inputs]
    return torch.randn(outputs, inputs) * mask


def block_of(kernel: choice.CudaKernel) -> int:
    return 16 if isinstance(kernel, BlockKernel) else 1


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, kernel: choice.CudaKernel, activation: str = "none"
) -> CudaLinear:
    """The layer, after a look at its output."""
    dense = DenseLinear(weight.to(DEVICE), None if bias is None else bias.to(DEVICE), activation)
    layer = choice.build(dense, kernel)
    assert isinstance(layer, CudaLinear)
    assert torch.equal(layer.weight.cpu(), weight)
    with torch.no_grad():
        got = layer(x.to(DEVICE)).cpu()
        assert torch.equal(layer(x.to(DEVICE)).cpu(), got) or bool(got.isnan().any()), "a call that was noted down"
    z = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    expected = ACTIVATIONS[activation][1](z)
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    if expected.numel():
        gap = (got.double() - expected).abs().max()
        assert gap <= TOLERANCE[x.dtype] * expected.abs().max().clamp(min=1.0), float(gap)
    return layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_odd_sizes(kernel: choice.CudaKernel, dtype: torch.dtype, emulator: None) -> None:
    for tokens, inputs, outputs in SIZES:
        weight = matrix(outputs, inputs, block_of(kernel), 0.3).to(dtype)
        check(torch.randn(tokens, inputs).to(dtype), weight, torch.randn(outputs).to(dtype), kernel)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[2], KERNELS[4], KERNELS[6], KERNELS[8]], ids=str)
def test_activations(kernel: choice.CudaKernel, activation: str, emulator: None) -> None:
    weight, x = matrix(40, 64, block_of(kernel), 0.3).bfloat16(), torch.randn(66, 64).bfloat16()
    check(x[:2], weight, torch.randn(40).bfloat16(), kernel, activation)
    if getattr(kernel, "tokens", 0):
        check(x, weight, torch.randn(40).bfloat16(), kernel, activation)


@pytest.mark.parametrize("kernel", KERNELS[::2], ids=str)
def test_extremes(kernel: choice.CudaKernel, emulator: None) -> None:
    bias, one, full = torch.randn(40).bfloat16(), torch.zeros(40, 96).bfloat16(), torch.randn(20, 32).bfloat16()
    one[33, 90] = 3.0
    for weight in (torch.zeros_like(one), one):
        check(torch.randn(2, 96).bfloat16(), weight, bias, kernel, "relu")
    check(torch.randn(3, 32).bfloat16(), full, None, kernel)
    for shape in ((0, 96), (2, 0, 96)):
        check(torch.randn(shape).bfloat16(), one, bias, kernel)
    whole = torch.randn(2, 3, 192).bfloat16()
    for x in (whole[..., :96], whole[..., ::2], whole[0, 0, :96], torch.randn(96, 5).bfloat16().T, whole[0, :, 1:97]):
        check(x, one, bias, kernel)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_nan_stays_where_it_is_used(kernel: choice.CudaKernel, emulator: None) -> None:
    weight = torch.zeros(64, 96).bfloat16()
    weight[5, 7] = 1.0
    layer = check(torch.randn(2, 96).bfloat16(), weight, None, kernel)
    x = torch.ones(3, 96, device=DEVICE).bfloat16()
    x[1, 7] = torch.nan
    wrong = layer(x).isnan().cpu()
    assert bool(wrong[1, 5])
    assert not bool(wrong[0].any() | wrong[2].any()), "another token has nothing to do with it"
    if isinstance(kernel, SingleKernel):
        assert int(wrong.sum()) == 1
    elif isinstance(kernel, BlockKernel):
        assert not bool(wrong[1, 16 * kernel.rows :].any()), "nor has another strip"


def test_long_gaps(emulator: None) -> None:
    weight = torch.zeros(3, 3000).bfloat16()
    weight[0, [0, 254, 510, 766, 2999]] = torch.tensor([1.0, 2, 3, 4, 5]).bfloat16()
    weight[2, 2999] = 7.0
    for kernel in (SingleKernel(1, 3, 2), GatherKernel(1, 2, 1, 1)):
        check(torch.randn(2, 3000).bfloat16(), weight, None, kernel)


@pytest.mark.parametrize(
    ("outputs", "inputs", "density"), [(70, 131, 0.3), (40, 5000, 0.004), (33, 40, 1.0), (5, 9, 0.0)]
)
def test_packing(outputs: int, inputs: int, density: float) -> None:
    weight = matrix(outputs, inputs, 1, density)
    for rows in (1, 2, 4):
        assert torch.equal(unpack_blocks(pack_blocks(weight, rows)), weight)
    for shares in (1, 3, 16):
        assert torch.equal(unpack_singles(pack_singles(weight, SingleKernel(1, shares, 4))), weight)
        for windows in (1, 3):
            packed = pack_gathers(weight, GatherKernel(2, shares, 1, windows))
            assert torch.equal(unpack_gathers(packed, windows), weight)
    for rows, splits in ((1, 1), (3, 3), (4, 2)):
        assert torch.equal(unpack_spread(pack_spread(weight, rows, splits), rows), weight)


def test_bytes_of_single_weights() -> None:
    weight = matrix(512, 4096, 1, 0.1).bfloat16()
    kept = int((weight != 0).sum())
    for layer, most in (
        (SingleLinear(weight, None, SingleKernel(1, 16, 4)), 3.3),
        (GatherLinear(weight, None, GatherKernel(4, 4, 1, 1)), 4.4),
        (SpreadLinear(weight, None, SpreadKernel(4, 8, 1)), 4.4),
    ):
        stored = sum(buffer.nbytes for name, buffer in layer.named_buffers() if name != "bias")
        assert stored < most * kept


@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[4], KERNELS[6], KERNELS[8]], ids=str)
def test_operators_and_manners(kernel: choice.CudaKernel, emulator: None) -> None:
    weight = matrix(48, 64, block_of(kernel), 0.4).bfloat16()
    layer = check(torch.randn(3, 64).bfloat16(), weight, torch.randn(48).bfloat16(), kernel, "gelu").to(DEVICE)
    x = torch.randn(3, 2, 64, device=DEVICE).bfloat16()
    expected = layer(x)
    buffers = [getattr(layer, name) for name in layer._names]
    args: Any = (x, buffers, layer._sizes, "gelu")
    torch.library.opcheck(layer._operator, args)
    assert torch.equal(layer._operator(*args), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for tokens in (2, 5):
            more = torch.randn(tokens, 64, device=DEVICE).bfloat16()
            assert torch.equal(compiled(more), layer(more))
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    other = copy.deepcopy(layer)
    other(x)
    doubled = {name: 2 * t if name in ("values", "bias") else t for name, t in layer.state_dict().items()}
    for assign in (False, True):
        other.load_state_dict(doubled, assign=assign)
        assert torch.equal(other.weight, 2 * layer.weight)
        assert not torch.equal(other(x), expected), "the new weight is what is read"
        other = copy.deepcopy(layer)
    assert torch.equal(layer.part(x, 32, 48), expected[..., 32:48])
    wide = copy.deepcopy(layer).float()
    assert torch.allclose(wide(x.float()), expected.float(), rtol=2e-2, atol=2e-2), (
        "float32 goes through the dense product"
    )
    with pytest.raises(RuntimeError, match="cannot be trained"):
        layer.train()


def in_turn(layers: list[DeviceLinear], x: Tensor) -> Tensor:
    return torch.stack([layer(x) for layer in layers])


@pytest.mark.skipif(not ON_DEVICE, reason="no CUDA device of sm_90")
@pytest.mark.parametrize("kernel", [*choice.BLOCKS, *choice.SINGLES, *choice.GATHERS, *choice.SPREADS], ids=str)
def test_large_layers_in_a_graph(kernel: choice.CudaKernel, emulator: None) -> None:
    for inputs, outputs in ((4096, 1024), (11008, 512)):
        weight = matrix(outputs, inputs, block_of(kernel), 0.1).bfloat16()
        layers = [choice.build(DenseLinear(weight.to(DEVICE), None), kernel) for _ in range(3)]
        for tokens in (1, 5, 16, 40, 64):
            x = torch.randn(tokens, inputs).bfloat16()
            check(x, weight, None, kernel)
            given = x.to(DEVICE)
            replay = choice.graph_of(functools.partial(in_turn, layers, given))
            first = replay().clone()
            assert torch.equal(replay(), first), "the same sums every time"
            assert torch.equal(first[0], layers[0](given))


@pytest.mark.skipif(not ON_DEVICE, reason="no CUDA device of sm_90")
def test_a_chain_of_early_launches_waits_for_its_inputs() -> None:
    weight = matrix(1024, 1024, 16, 0.3) / 16
    dense = DenseLinear(weight.bfloat16().to(DEVICE), None)
    layer, x = choice.build(dense, choice.BLOCKS[0]), torch.randn(1, 1024, device=DEVICE).bfloat16()

    def chain() -> Tensor:
        y = x
        for _ in range(50):
            y = layer(y)
            y = y / y.norm()
            y = layer(layer(y))
        return y

    expected = chain()
    replay = choice.graph_of(chain)
    for _ in range(5):
        assert torch.equal(replay(), expected)


def test_what_is_offered() -> None:
    scattered = torch.randn(64, 256) * (torch.rand(64, 256) < 0.1)
    assert choice.cuda_kernels(scattered, 0, 1) == choice.SINGLES
    assert choice.cuda_kernels(scattered, 0, 16) == choice.SPREADS + choice.GATHERS
    assert choice.cuda_kernels(scattered, 0, 65) == []
    assert choice.cuda_kernels(torch.randn(64, 256), 0, 1) == [], "too many weights"
    assert choice.cuda_kernels(scattered[:, :1].expand(64, 1 << 16), 0, 1) == [], "too many inputs"
    small = choice.cuda_kernels(scattered, 16, 1)
    assert small
    assert all(isinstance(kernel, BlockKernel) and kernel.rows == 1 for kernel in small)
    assert len(choice.cuda_kernels(scattered, 64, 1)) > len(small)
    many = choice.cuda_kernels(scattered, 16, 500)
    assert many
    assert all(isinstance(kernel, BlockKernel) and kernel.tokens for kernel in many)
    assert isinstance(choice.build(DenseLinear(scattered.bfloat16(), None), many[0]), BlockLinear)
    assert choice.cuda_kernels(scattered[:1].expand(1, 256).repeat(1, 64), 16, 500) == []
