"""Every CUDA kernel that is offered, compiled for Hopper and Blackwell: the compiler needs no device.

What the emulator takes (test_cuda_kernels.py) need not be what NVRTC and the assembler take.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from spartan.inference.cpu.ops import ACTIVATIONS
from spartan.inference.gpu import blocks, choice, gathers, nvrtc, singles, spread
from spartan.inference.gpu.blocks import BlockKernel
from spartan.inference.gpu.gathers import GatherKernel
from spartan.inference.gpu.nvrtc import CudaLinear
from spartan.inference.gpu.spread import SpreadKernel
from spartan.inference.runtime import DenseLinear

NO_SPILLS = ("--ptxas-options=--warn-on-spills", "--ptxas-options=--warning-as-error")
ARCHITECTURES = ("sm_90", "sm_100", "sm_120")
FEW = [*choice.BLOCKS, *choice.SPREADS, *choice.GATHERS]
MANY = choice.resident_kernels(768, choice.BLOCKS)
# These put up to 100 bytes a thread into memory, nearly all of it outside their inner loops.
SPILLING = [SpreadKernel(4, 8, 1, 3), GatherKernel(8, 2, 2, 1), BlockKernel(1, 8, 4, 128, 16, 4)]


def library() -> ctypes.CDLL | None:
    """NVRTC, of torch or of a package of its own."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("libnvrtc.so.*"))
    return ctypes.CDLL(str(files[-1])) if files else None


NVRTC = library()
pytestmark = pytest.mark.skipif(NVRTC is None and sys.platform != "linux", reason="NVRTC is there for Linux")


class Compiled:
    """`nvrtc.Function`, up to its machine code."""

    options: tuple[str, ...] = ()
    count = 0

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
        assert NVRTC is not None
        assert shared <= nvrtc.MOST_SHARED
        assert threads <= 1024
        assert cluster <= 8, "what every device takes"
        code = nvrtc.compiled(NVRTC, source, frozenset(macros.items()), *self.options)
        assert name.encode() in code
        Compiled.count += 1

    def prepare(self, grid: tuple[int, int], arguments: Sequence[int], output: int) -> None:
        """Nothing: there is no device."""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "Function", Compiled)
    for module in (blocks, singles, gathers, spread):
        for cached in ("_few", "_many", "_function"):
            if hasattr(module, cached):
                getattr(module, cached).cache_clear()


@functools.cache
def layer_of(kernel: choice.CudaKernel, inputs: int, activation: str) -> CudaLinear:
    """At 90% zeros."""
    torch.manual_seed(0)
    weight = (torch.randn(128, inputs) * (torch.rand(128, inputs) < 0.1)).bfloat16()
    made = choice.build(DenseLinear(weight, None, activation), kernel)
    assert isinstance(made, CudaLinear)
    return made


def compile_it(
    kernel: choice.CudaKernel,
    inputs: int,
    tokens: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    aligned: bool = True,
    activation: str = "none",
    architecture: str = "sm_90",
) -> None:
    """As calls with so many tokens would."""
    Compiled.options = (f"--gpu-architecture={architecture}", *(() if kernel in SPILLING else NO_SPILLS))
    layer = layer_of(kernel, inputs, activation)
    for n in tokens:
        x = torch.randn(n, inputs).to(dtype)
        type(layer)._prepare(x, aligned, layer._operands(dtype), layer._sizes, activation)


@pytest.mark.parametrize("kernel", [*FEW, *choice.SINGLES, *MANY], ids=str)
def test_without_spills(kernel: choice.CudaKernel, compiler: None) -> None:
    before = Compiled.count
    if kernel in MANY:
        compile_it(kernel, 768, [500])
        compile_it(kernel, 768, [500], torch.float16, aligned=False)
    else:
        tokens = [1] if kernel in choice.SINGLES else [1, 16, 32, 64] if kernel in choice.BLOCKS else [8, 16, 32]
        for inputs in (4096, 11008):
            compile_it(kernel, inputs, tokens)
        compile_it(kernel, 4096, tokens, torch.float16, aligned=False)
    assert Compiled.count > before


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_devices_and_activations(architecture: str, compiler: None) -> None:
    before = Compiled.count
    for kernel in (choice.BLOCKS[0], choice.SINGLES[0], choice.GATHERS[0], choice.SPREADS[0], MANY[0]):
        tokens = 500 if kernel in MANY else 1 if kernel in choice.SINGLES else 16
        for dtype, activation in zip([torch.bfloat16, torch.float16] * 3, ACTIVATIONS, strict=False):
            compile_it(kernel, 768, [tokens], dtype, activation=activation, architecture=architecture)
    assert Compiled.count - before == 5 * len(ACTIVATIONS)


def test_what_does_not_compile_says_why(compiler: None) -> None:
    assert NVRTC is not None
    with pytest.raises(RuntimeError, match=r"few_blocks.cu does not compile with .*sm_90: [^$]*\"WARPS\" is undefined"):
        nvrtc.compiled(NVRTC, "few_blocks", frozenset(), "--gpu-architecture=sm_90")
