"""Compiles CUDA C++ for the device at run time, by the compiler that torch brings, and launches it at little host time.

Everything is looked up at the first use; where a library is missing or the source does not compile, `available` is False
and callers take their Triton kernels.
"""

import ctypes
import functools
import struct
from collections.abc import Mapping
from importlib import resources

import torch

_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER, _EARLY = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]  # noqa: RUF012


class _Config(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """The compiler and the driver."""
    if torch.version.cuda is None or torch.version.hip is not None:
        return None
    try:
        return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"), ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for this device: one with tensor cores for bfloat16 and asynchronous launches."""
    if device.type != "cuda" or _libraries() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _compile(source: bytes, options: tuple[str, ...]) -> bytes:
    libraries = _libraries()
    assert libraries is not None
    compiler, program = libraries[0], ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source, b"few.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed, size = compiler.nvrtcCompileProgram(program, len(options), given), ctypes.c_size_t()
    if failed:
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"few.cu does not compile with {' '.join(options)}: {log.value.decode()[:2000]}")
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, binary)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"{what}: the CUDA driver answers with error {result}")


class Function:
    """A compiled kernel, of which only the arguments, the grid and the stream differ from call to call.

    Args:
        name: of the kernel in few.cu.
        device: the CUDA device's index, which must be the current one.
        macros: constants for the compiler.
        threads: of a block.
        shared: bytes of dynamic shared memory.
        cluster: blocks of a cluster, along the grid's first side.
    """

    def __init__(self, name: str, device: int, macros: Mapping[str, int], threads: int, shared: int, cluster: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        source = resources.files("spartan.inference.gpu").joinpath("few.cu").read_bytes()
        options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
        binary = _compile(source, (*options, *(f"-D{key}={value}" for key, value in macros.items())))
        libraries = _libraries()
        assert libraries is not None
        driver, module = libraries[1], ctypes.c_void_p()
        self._kept = binary
        self._function = ctypes.c_void_p()
        torch.cuda.current_stream(device)  # makes the device's context
        _check(driver.cuModuleLoadData(ctypes.byref(module), binary), name)
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), name)
        if shared > 48 << 10:
            _check(driver.cuFuncSetAttribute(self._function, _SHARED_MEMORY, shared), name)
        self._name, self._device = name, device
        self._launch = driver.cuLaunchKernelEx
        attributes = [_Attribute(_EARLY, 0, (ctypes.c_uint * 16)(1))]
        if cluster > 1:
            attributes.append(_Attribute(_CLUSTER, 0, (ctypes.c_uint * 16)(cluster, 1, 1)))
        self._attributes = (_Attribute * len(attributes))(*attributes)
        self._block, self._shared = (ctypes.c_uint * 3)(threads, 1, 1), shared

    def __call__(self, grid: tuple[int, int], layout: struct.Struct, *arguments: int) -> None:
        """Launch on torch's current stream; `layout` says how the arguments lie in the kernel's one structure."""
        packed = layout.pack(*arguments)
        size = ctypes.c_size_t(len(packed))
        extra = (ctypes.c_void_p * 5)(1, ctypes.cast(packed, ctypes.c_void_p).value, 2, ctypes.addressof(size), 0)
        config = _Config(
            (*grid, 1), self._block, self._shared, torch._C._cuda_getCurrentRawStream(self._device),
            self._attributes, len(self._attributes),
        )  # fmt: skip
        result = self._launch(ctypes.byref(config), self._function, None, extra)
        if result:
            _check(result, self._name)
