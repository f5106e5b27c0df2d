"""The CPU kernels against float64, on odd sizes, for every instruction set this processor has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spartan.inference.cpu import build, library, ops
from spartan.inference.cpu.ops import pack, stored, unpack

needs_kernels = pytest.mark.skipif(library.library() is None, reason=f"no compiled kernels here: {library.status()}")
ISAS = {"portable": 0, "avx2": 1, "avx512": 2}
# Of the largest output; bfloat16 rounds it to 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4.1e-3}


@pytest.fixture(params=list(ISAS))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels = library.library()
    assert kernels is not None
    if not kernels.spartan_use_isa(ISAS[request.param]):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    kernels.spartan_use_isa(-1)


def matrix(outputs: int, inputs: int, h: int, w: int, density: float) -> Tensor:
    """Random, with blocks of h × w left (cut off at the edges); the first and the last rows of blocks are empty."""
    keep = torch.rand(-(-outputs // h), -(-inputs // w)) < density
    keep[0] = keep[-1] = False
    return torch.randn(outputs, inputs) * keep.repeat_interleave(h, 0).repeat_interleave(w, 1)[:outputs, :inputs]


def padded(bias: Tensor, h: int) -> Tensor:
    return F.pad(bias, (0, -len(bias) % h))


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == expected.shape
    gap = (got.double() - expected).abs().max()
    assert gap <= TOLERANCE[dtype] * expected.abs().max().clamp(min=1.0), float(gap)


def linear(x: Tensor, weight: Tensor, bias: Tensor, kind: str, h: int, g: int, activation: str) -> Tensor:
    packed = pack(weight, h, g)
    return ops.linear(kind, x, packed, ops.linear_places(kind, packed), padded(bias, h), activation)


ROWS = [("rows", h, g) for h in (8, 16, 32, 64) for g in (1, 4, 8)]
LANES = [("lanes", h, 1) for h in (1, 2, 3, 4, 8, 12, 16, 64)]


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("kind", "h", "g"), ROWS + LANES)
def test_linear(kind: str, h: int, g: int, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    for tokens, inputs, outputs in [(1, 1, 1), (7, 33, 67), (29, 130, 200), (133, 70, 129)]:
        weight, bias = matrix(outputs, inputs, h, g, 0.3), torch.randn(outputs)
        x = torch.randn(tokens, inputs).to(dtype)
        expected = F.linear(x.double(), weight.double(), bias.double())
        close(linear(x, weight, bias, kind, h, g, "none"), expected, dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("activation", list(ops.ACTIVATIONS))
@pytest.mark.parametrize(("kind", "h", "g"), [("rows", 16, 8), ("lanes", 1, 1)])
def test_activations(kind: str, h: int, g: int, activation: str, dtype: torch.dtype, isa: str) -> None:
    """From far below zero to far above; the last column lets the weight pass x through."""
    x = torch.linspace(-30, 30, 601).reshape(-1, 1).to(dtype)
    weight, bias = torch.ones(17, 1), torch.zeros(17)
    got = linear(x, weight, bias, kind, h, g, activation)
    expected = ops.ACTIVATIONS[activation][1](x.double()).expand(-1, 17)
    bound = 4e-7 if dtype == torch.float32 else 2**-8
    assert ((got.double() - expected).abs() <= bound * expected.abs().clamp(min=1.0)).all()


CONVS = [
    # images, channels, height, width, outputs, kernel, stride, padding, dilation, groups, h
    (1, 3, 9, 11, 5, (3, 3), (1, 1), (1, 1), (1, 1), 1, 1),
    (2, 5, 7, 9, 11, (3, 3), (2, 2), (1, 1), (1, 1), 1, 1),
    (2, 3, 23, 17, 8, (7, 7), (2, 2), (3, 3), (1, 1), 1, 2),
    (1, 6, 13, 8, 12, (3, 3), (1, 1), (2, 2), (2, 2), 2, 2),
    (3, 8, 16, 16, 24, (1, 1), (1, 1), (0, 0), (1, 1), 1, 8),
    (2, 8, 7, 7, 20, (1, 1), (1, 1), (0, 0), (1, 1), 1, 16),
    (2, 8, 14, 14, 19, (1, 1), (2, 2), (0, 0), (1, 1), 1, 4),
    (1, 8, 9, 9, 24, (5, 5), (3, 3), (2, 2), (1, 1), 1, 12),
    (1, 4, 17, 23, 8, (3, 1), (2, 1), (1, 0), (1, 1), 4, 1),
    (1, 2, 5, 200, 70, (1, 3), (1, 2), (0, 3), (2, 2), 1, 64),
]


@needs_kernels
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", CONVS, ids=lambda c: "-".join(map(str, c)).replace(" ", ""))
def test_conv(case: tuple, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    images, channels, height, width, outputs, kernel, stride, padding, dilation, groups, h = case
    conv = ops.Conv(kernel, stride, padding, dilation, groups, channels)
    columns = channels // groups * kernel[0] * kernel[1]
    weight, bias = matrix(outputs, columns, h, 1, 0.4), torch.randn(outputs)
    packed, x = pack(weight, h, 1), torch.randn(images, channels, height, width).to(dtype)
    layout = ops.lay_out_conv(conv, packed, height, width, dtype)
    residual = torch.randn(images, outputs, *layout.out_size).to(dtype)
    for activation in ops.ACTIVATIONS:
        for more in (None, residual):
            got = ops.conv2d(x, packed, layout, padded(bias, h), activation, more)
            again = None if more is None else more.double()
            shaped = weight.double().reshape(outputs, -1, *kernel)
            close(got, ops.conv_torch(x.double(), conv, shaped, bias.double(), activation, again), dtype)


@needs_kernels
@pytest.mark.parametrize(("kind", "h", "g"), [("rows", 16, 8), ("rows", 64, 1), ("lanes", 1, 1), ("lanes", 8, 1)])
def test_edges(kind: str, h: int, g: int, isa: str) -> None:
    x, bias = torch.randn(19, 40), torch.randn(50)
    assert torch.equal(linear(x, torch.zeros(50, 40), bias, kind, h, g, "none"), bias.expand(19, 50)), "all zero"
    one = torch.zeros(50, 40)
    one[17, 33] = 2.0
    close(linear(x, one, bias, kind, h, g, "none"), F.linear(x.double(), one.double(), bias.double()), torch.float32)
    assert linear(x[:0], one, bias, kind, h, g, "none").shape == (0, 50)
    dense = torch.randn(50, 40)
    close(
        linear(x, dense, bias, kind, h, g, "none"), F.linear(x.double(), dense.double(), bias.double()), torch.float32
    )
    batched = linear(x[:18].reshape(3, 6, 40), dense, bias, kind, h, g, "relu")
    assert torch.equal(batched, linear(x[:18].contiguous(), dense, bias, kind, h, g, "relu").reshape(3, 6, 50))


@needs_kernels
def test_nan_reaches_the_groups_that_use_it(isa: str) -> None:
    weight, x = torch.zeros(4, 8), torch.ones(3, 8)
    weight[0, 0], x[1, 0] = 1.0, torch.nan
    got = linear(x, weight, torch.zeros(4), "lanes", 2, 1, "none")
    assert got.isnan().nonzero().tolist() == [[1, 0], [1, 1]]


@needs_kernels
def test_nan_reaches_the_outputs_that_use_it(isa: str) -> None:
    weight = torch.zeros(4, 8)
    weight[0, 0] = weight[1, 1] = weight[3, 0] = 1.0
    x = torch.ones(3, 8)
    x[1, 0] = torch.nan
    for activation in ops.ACTIVATIONS:
        got = linear(x, weight, torch.zeros(4), "lanes", 1, 1, activation)
        assert got.isnan().nonzero().tolist() == [[1, 0], [1, 3]], activation
        assert linear(x.bfloat16(), weight, torch.zeros(4), "lanes", 1, 1, activation).isnan().sum() == 2


@needs_kernels
def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    weight, bias, x = matrix(300, 200, 16, 8, 0.2), torch.randn(300), torch.randn(150, 200)
    image, kernel = torch.randn(5, 8, 20, 20), matrix(64, 72, 1, 1, 0.2)
    conv = ops.Conv((3, 3), (1, 1), (1, 1), (1, 1), 1, 8)
    packed = pack(kernel, 1, 1)
    layout = ops.lay_out_conv(conv, packed, 20, 20, torch.float32)
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(
                [linear(x, weight, bias, kind, h, g, "gelu") for kind, h, g in (("rows", 16, 8), ("lanes", 1, 1))]
                + [ops.conv2d(image, packed, layout, torch.zeros(64), "relu")]
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_kernels
def test_threads_without_openmp() -> None:
    """As on systems where torch brings no OpenMP that the library knows."""
    code = (
        "import torch; from spartan.inference.cpu import library, ops; from spartan.inference.cpu.ops import pack\n"
        "library.library().spartan_use_openmp(None, None); torch.set_num_threads(3)\n"
        "w, x = torch.randn(64, 64), torch.randn(100, 64)\n"
        "packed = pack(w, 16, 8)\n"
        "y = ops.linear('rows', x, packed, packed.runs, torch.zeros(64), 'none')\n"
        "assert torch.allclose(y, x @ w.T, atol=1e-4)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(("h", "g"), [(1, 1), (3, 2), (16, 8), (64, 4)])
def test_pack_and_unpack(h: int, g: int) -> None:
    weight = matrix(50, 37, h, g, 0.3)
    packed = pack(weight, h, g)
    assert torch.equal(unpack(packed), weight)
    assert packed.values.numel() == stored(weight, h, g)
    blocks = F.pad(weight, (0, -37 % g, 0, -50 % h)).reshape(-(-50 // h), h, -(-37 // g), g).abs().sum((1, 3)) > 0
    assert packed.starts.diff().tolist() == blocks.sum(1).tolist()
    assert packed.runs.tolist() == blocks.nonzero()[:, 1].tolist()


def test_the_torch_forms() -> None:
    """The plain-torch forms are what the layers run without a compiler; they must not need one."""
    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(5, 8)
    assert torch.equal(ops.linear_torch(x, weight, bias, "relu"), F.relu(F.linear(x, weight, bias)))
    conv, image = ops.Conv((2, 2), (2, 2), (1, 1), (1, 1), 1, 2), torch.randn(1, 2, 6, 6)
    weight = weight.reshape(6, 2, 2, 2)
    expected = F.gelu(F.conv2d(image, weight, bias, 2, 1))
    assert torch.equal(ops.conv_torch(image, conv, weight, bias, "gelu"), expected)


@pytest.mark.skipif(build.compiler() is None, reason="no compiler")
def test_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "folder" / "kernels.so"
    build.compile_library(target)
    assert library._open(target).spartan_version() == library.VERSION
    assert [p.name for p in target.parent.iterdir()] == ["kernels.so"]
    false = shutil.which("false")
    assert false is not None
    monkeypatch.setenv("CXX", false)
    with pytest.raises(RuntimeError, match="failed"):
        build.compile_library(tmp_path / "other.so")


def test_without_a_compiler(tmp_path: Path) -> None:
    """No library, no compiler: layers run in plain torch and say so."""
    code = (
        "import torch, spartan; from spartan.inference.convert import accelerate, explain\n"
        "from spartan.inference.cpu import library\n"
        "library.PACKAGED = library.PACKAGED.with_name('absent')\n"
        "from torch import nn\n"
        "model = spartan.prune(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 8)), .9)\n"
        "x = torch.randn(2, 4, 6, 6)\n"
        "for kernels in ('auto', 'sparse'):\n"
        "    fast = accelerate(model, kernels, example_inputs=x)\n"
        "    assert torch.allclose(fast(x), model(x), atol=1e-5)\n"
        "    assert all('no C++ compiler' in line.why for line in explain(fast)), explain(fast)\n"
        "print(library.status())"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "SPARTAN_CACHE": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plain torch: no C++ compiler found")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists() or library.library() is None, reason="no kernels, or not Linux")
def test_the_best_kernels_for_this_processor_are_taken() -> None:
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    needed = {
        "avx512": {"fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx2": {"fma", "avx2"},
        "portable": set(),
    }
    assert library.status().split()[2] == next(isa for isa, flag in needed.items() if flag <= flags)


@needs_kernels
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_program_that_checks_other_machines(tmp_path: Path) -> None:
    """docs/releases.md runs it under qemu; here it is known to tell a good library, and that it needs one."""
    source, program = Path(__file__).parent / "linear_without_python.c", tmp_path / "program"
    subprocess.run(["cc", "-O1", str(source), "-ldl", "-lm", "-o", str(program)], check=True, timeout=60)
    kernels = library.library()
    assert kernels is not None
    done = subprocess.run([str(program), kernels._name], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("of float64")) == (0, 2), done.stdout
    assert subprocess.run([str(program)], capture_output=True, timeout=60).returncode == 2


def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"'{sys.executable}' -m ziglang c++")
    assert build.compiler() == [sys.executable, "-m", "ziglang", "c++"]
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")
    assert build.machine() == "aarch64"


def wheel(copy: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel from a copy of the sources."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(copy)]
    whole = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-m", *command], env=whole, capture_output=True, text=True, timeout=300)


def test_a_release_is_not_built_without_kernels(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "CXX": "", "SPARTAN_REQUIRE_KERNELS": "1"}
    done = wheel(tmp_path / "copy", tmp_path, **nothing)
    assert done.returncode == 1
    assert "SPARTAN_REQUIRE_KERNELS=1, but the CPU kernels do not compile: no C++ compiler found" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "no compiler"])
def test_wheel(compiler: bool, tmp_path: Path) -> None:
    """With a compiler the wheel carries the library, for any Python; without one it is a pure wheel."""
    if compiler and build.compiler() is None:
        pytest.skip("no compiler")
    done = wheel(tmp_path / "copy", tmp_path, **({} if compiler else {"PATH": str(tmp_path), "CXX": ""}))
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(made).namelist()
    assert ("spartan/inference/cpu/_kernels.so" in names) == compiler
    assert "spartan/inference/cpu/kernels.cpp" in names
    assert "py3-none-" in made.name
    assert made.name.endswith("any.whl") != compiler
