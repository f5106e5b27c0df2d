"""Compiles CUDA C++ for the device at run time, by the compiler that torch brings.

Where that, or the driver, is missing `available` is False, and layers of these kernels are not offered: Triton's are.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Self

import torch
from torch import Tensor

from spartan.inference.cpu.ops import ACTIVATIONS
from spartan.inference.gpu import linear
from spartan.inference.gpu.driver import Prepared, check, libraries
from spartan.inference.gpu.few import FewTokensLinear

_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MOST_SHARED = 227 << 10  # bytes of shared memory that a block of threads can have


@functools.cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for this device; they need launches before the last one's end, and clusters."""
    if device.type != "cuda" or libraries() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def compiled(compiler: ctypes.CDLL, name: str, macros: frozenset[tuple[str, int]], *options: str) -> bytes:
    """The machine code of a file beside this one, given without its ending, by NVRTC; this needs no device.

    Args:
        compiler: NVRTC's library.
        name: of the file.
        macros: constants, and what they are.
        options: for the compiler; the architecture must be among them, as `--gpu-architecture=sm_90`.
    """
    files, program, size = resources.files("spartan.inference.gpu"), ctypes.c_void_p(), ctypes.c_size_t()
    options = ("--std=c++17", *options, *(f"-D{key}={value}" for key, value in sorted(macros)))
    source = b"".join(files.joinpath(f"{part}.cu").read_bytes() for part in ("ptx", "common", name))
    compiler.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if compiler.nvrtcCompileProgram(program, len(options), given):
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name}.cu does not compile with {' '.join(options)}: {log.value.decode()[:2000]}")
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, binary)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


class Function:
    """A compiled kernel.

    Args:
        source: a file beside this one, without its ending.
        name: of the kernel in it.
        layout: of the kernel's one argument, a structure.
        macros: constants for the compiler.
        device: the CUDA device's index, which must be the current one.
        threads: of a block.
        shared: bytes of dynamic shared memory.
        cluster: blocks of a cluster, along the grid's first side.
    """

    def __init__(
        self,
        source: str,
        name: str,
        layout: struct.Struct,
        macros: Mapping[str, int],
        device: int,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        found = libraries()
        assert found is not None
        architecture = "--gpu-architecture=sm_{}{}".format(*torch.cuda.get_device_capability(device))
        binary = compiled(found[0], source, frozenset(macros.items()), architecture)
        driver, module, self._function = found[1], ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream(device)  # makes the device's context
        check(driver.cuModuleLoadData(ctypes.byref(module), binary), name)
        check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), name)
        if shared > 48 << 10:
            check(driver.cuFuncSetAttribute(self._function, _SHARED_MEMORY, shared), name)
        self._layout, self._threads, self._shared, self._cluster = layout, threads, shared, cluster
        self._device = device

    def prepare(self, grid: tuple[int, int], arguments: Sequence[int], output: int) -> Prepared:
        """A launch with these arguments; the first, and number `output`, are left open."""
        return Prepared(
            self._function.value,
            grid,
            self._threads,
            self._shared,
            self._layout.pack(*arguments),
            (0,),
            (0, 8 * output),
            self._device,
            cluster=self._cluster,
            early=True,
        )


def macros_of(half: bool, aligned: bool, activation: str) -> dict[str, int]:
    """The constants of common.cu."""
    return {"HALF": int(half), "ALIGNED": int(aligned), "ACT": ACTIVATIONS[activation][0]}


def rows_of(x: Tensor) -> tuple[Tensor, bool]:
    """The tokens as rows, and whether these begin at 16 bytes and have a multiple of 16 columns."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0) % 8 == 0 and rows.shape[1] % 16 == 0 and rows.data_ptr() % 16 == 0


def runs_on(x: Tensor) -> bool:
    """Whether the kernels take this input."""
    return x.dtype != torch.float32 and available(x.device)


# What the kernels' modules have for a `CudaLinear`: what to launch for tokens as rows (and whether these are aligned),
# buffers, sizes and an activation.
Prepare = Callable[[Tensor, bool, list[Tensor], list[int], str], Prepared]


def run(prepare: Prepare, x: Tensor, buffers: list[Tensor], sizes: list[int], activation: str) -> Tensor:
    """The output of a kernel that takes x; `sizes` begin with the number of outputs."""
    y = x.new_empty(*x.shape[:-1], sizes[0])
    if y.numel() == 0:
        return y
    given, aligned = rows_of(x)
    with linear.on(x.device.index):
        prepare(given, aligned, buffers, sizes, activation)(given.data_ptr(), y.data_ptr())
    return y


class CudaLinear(FewTokensLinear):
    """A layer on one of these kernels.

    They read the weight while the kernel before them may still be running. So the device is waited for whenever a weight
    has been written.
    """

    _prepare: Prepare

    def _prepared(self, x: Tensor) -> tuple[Prepared, bool] | None:
        if not runs_on(x):
            return None
        rows, aligned = rows_of(x)
        if rows.data_ptr() != x.data_ptr():
            return None
        prepare = type(self)._prepare
        return prepare(rows, aligned, self._operands(x.dtype), self._sizes, self.activation), aligned

    def _settle(self) -> None:
        if self.values.is_cuda:
            torch.cuda.current_stream(self.values.device).synchronize()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._settle()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._settle()
