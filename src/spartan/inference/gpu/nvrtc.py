"""Compiles CUDA C++ for the device at run time, by the compiler that torch brings, and launches it at little host time.

Libraries are looked up at the first use. Where one is missing `available` is False, and layers of these kernels are not
offered: Triton's are.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Self

import torch
from torch import Tensor

from spartan.inference.cpu.ops import ACTIVATIONS
from spartan.inference.gpu import linear
from spartan.inference.gpu.few import FewTokensLinear

_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER, _EARLY = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION
MOST_SHARED = 227 << 10  # bytes of shared memory that a block of threads can have
_BUFFER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, …_SIZE
_MOST_CALLS = 64  # of a layer that are kept


class _Attribute(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """The compiler and the driver."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"), ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for this device; they need launches before the last one's end, and clusters."""
    if device.type != "cuda" or _libraries() is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _compile(name: str, options: tuple[str, ...]) -> bytes:
    libraries, files = _libraries(), resources.files("spartan.inference.gpu")
    assert libraries is not None
    compiler, program, size = libraries[0], ctypes.c_void_p(), ctypes.c_size_t()
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


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"{what}: the CUDA driver answers with error {result}")


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
        options = ["--gpu-architecture=sm_{}{}".format(*torch.cuda.get_device_capability(device)), "--std=c++17"]
        binary = _compile(source, (*options, *(f"-D{key}={value}" for key, value in macros.items())))
        libraries = _libraries()
        assert libraries is not None
        driver, module, self._function = libraries[1], ctypes.c_void_p(), ctypes.c_void_p()
        torch.cuda.current_stream(device)  # makes the device's context
        _check(driver.cuModuleLoadData(ctypes.byref(module), binary), name)
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), name)
        if shared > 48 << 10:
            _check(driver.cuFuncSetAttribute(self._function, _SHARED_MEMORY, shared), name)
        attributes = [_Attribute(_EARLY, 0, (1,)), _Attribute(_CLUSTER, 0, (cluster, 1, 1))]
        self._attributes = (_Attribute * 2)(*attributes)
        config = _Config((1, 1, 1), (threads, 1, 1), shared, None, self._attributes, 1 if cluster == 1 else 2)
        self._config, self._layout, self._name, self._device = config, layout, name, device
        self._launch = driver.cuLaunchKernelEx

    def prepare(self, grid: tuple[int, int], arguments: Sequence[int], output: int) -> "Launch":
        """A launch with these arguments; the first, and number `output`, are left open."""
        config, open_ = _Config.from_buffer_copy(self._config), list(arguments)
        config.grid[0], config.grid[1] = grid
        open_[0] = open_[output] = 0
        return Launch(self._launch, self._function, config, self._layout.pack(*open_), output, self._device, self._name)


class Launch:
    """A kernel with its arguments, but for the two that differ from call to call: where inputs and outputs lie."""

    def __init__(
        self,
        launch: Any,
        function: ctypes.c_void_p,
        config: _Config,
        packed: bytes,
        output: int,
        device: int,
        name: str,
    ) -> None:
        self._numbers = (ctypes.c_uint64 * (-(-len(packed) // 8))).from_buffer_copy(packed.ljust(len(packed) + 7))
        self._size, self._output = ctypes.c_size_t(len(packed)), output
        given = (_BUFFER, ctypes.addressof(self._numbers), _SIZE, ctypes.addressof(self._size), 0)
        self._config, self._extra = config, (ctypes.c_void_p * 5)(*given)
        self._arguments = (ctypes.byref(config), function, None, self._extra)
        self._launch, self._device, self._name, self._lock = launch, device, name, threading.Lock()

    def __call__(self, inputs: int, outputs: int) -> None:
        """Launch on torch's current stream of the device, which must be the current one."""
        with self._lock:
            self._numbers[0], self._numbers[self._output] = inputs, outputs
            self._config.stream = torch._C._cuda_getCurrentRawStream(self._device)
            result = self._launch(*self._arguments)
        if result:
            _check(result, self._name)


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


def is_here(device: int | None) -> bool:
    """Whether this CUDA device is the current one."""
    return torch._C._cuda_getDevice() == device


# What the kernels' modules have for a `CudaLinear`: the launch for tokens as rows (and whether they are aligned), buffers, sizes
# and an activation.
Prepare = Callable[[Tensor, bool, list[Tensor], list[int], str], Launch]


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

    What is launched for inputs of one shape is worked out once: a call takes the host little more than the driver does.
    """

    _prepare: Prepare
    # By shape, strides, type and device of the input: the launch, the output's shape, and whether inputs begin at 16 bytes.
    _calls: dict[Any, tuple[Launch, tuple[int, ...], bool]]

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        super().__init__(weight, bias, activation)
        self._calls = {}

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs], float32, bfloat16 or float16."""
        if torch.compiler.is_compiling():
            return super().forward(x)
        device = x.device
        known = self._calls.get((x.shape, x.stride(), x.dtype, device))
        if known is None or x.requires_grad or torch.is_autocast_enabled(device.type) or not is_here(device.index):
            return self._first(x)
        launch, shape, aligned = known
        at = x.data_ptr()
        if aligned and at % 16:
            return self._first(x)
        y = x.new_empty(shape)
        launch(at, y.data_ptr())
        return y

    def _first(self, x: Tensor) -> Tensor:
        """The output; and what such a call needs is noted down."""
        y, prepare = super().forward(x), type(self)._prepare
        if runs_on(x) and x.dtype == self.values.dtype and y.dtype == x.dtype and y.numel():
            rows, aligned = rows_of(x)
            if rows.data_ptr() == x.data_ptr() and x.device == self.values.device:
                if len(self._calls) >= _MOST_CALLS:
                    self._calls.clear()
                with linear.on(x.device.index):
                    launch = prepare(rows, aligned, self._operands(x.dtype), self._sizes, self.activation)
                self._calls[x.shape, x.stride(), x.dtype, x.device] = launch, tuple(y.shape), aligned
        return y

    def _settle(self) -> None:
        if self.values.is_cuda:
            torch.cuda.current_stream(self.values.device).synchronize()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._calls = {}
        self._settle()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._calls = {}
        self._settle()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_calls": {}}
