"""Launches compiled kernels by the CUDA driver, at little host time.

Libraries are looked up at the first use; without them `libraries` is None.
"""

import ctypes
import functools
import threading
from collections.abc import Sequence

import torch

_CLUSTER, _EARLY = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION
_ALIGNMENT = 64  # of what the arguments are packed into: descriptors want it


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
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """The compiler and the driver."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"), ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def check(result: int, what: str) -> None:
    """Raise RuntimeError unless the driver's answer is 0."""
    if result:
        raise RuntimeError(f"{what}: the CUDA driver answers with error {result}")


def is_here(device: int | None) -> bool:
    """Whether this CUDA device is the current one."""
    return torch._C._cuda_getDevice() == device


class Prepared:
    """A kernel with its arguments, but for the two that differ from call to call: where inputs and outputs lie.

    Args:
        function: the kernel's handle.
        grid: blocks of threads, along two sides.
        threads: of a block.
        shared: bytes of dynamic shared memory.
        packed: the arguments, one after the other.
        begins: where in `packed` each of them begins.
        places: where in `packed` the address of the inputs goes, and that of the outputs.
        device: the CUDA device's index.
        cluster: blocks of a cluster, along the grid's first side.
        early: whether it may begin before the kernel ahead of it is done.
        described: whether an address goes not there, but into the descriptor (CUtensorMap) that lies there.
    """

    def __init__(
        self,
        function: int | None,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        packed: bytes,
        begins: Sequence[int],
        places: tuple[int, int],
        device: int,
        *,
        cluster: int = 1,
        early: bool = False,
        described: tuple[bool, bool] = (False, False),
    ) -> None:
        found = libraries()
        assert found is not None
        self._memory = ctypes.create_string_buffer(len(packed) + _ALIGNMENT)
        begin = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        ctypes.memmove(begin, packed, len(packed))
        self._arguments = (ctypes.c_void_p * len(begins))(*(begin + at for at in begins))
        wanted = [_Attribute(_EARLY, 0, (1,))] * early + [_Attribute(_CLUSTER, 0, (cluster, 1, 1))] * (cluster > 1)
        self._attributes = (_Attribute * len(wanted))(*wanted)
        self._config = _Config((*grid, 1), (threads, 1, 1), shared, None, self._attributes, len(wanted))
        self._given = (ctypes.byref(self._config), ctypes.c_void_p(function), self._arguments, None)
        self._addresses = [ctypes.c_uint64.from_address(begin + place) for place in places]
        self._descriptors = [ctypes.c_void_p(begin + place) for place in places]
        self._described, self._device = described, device
        self._launch, self._replace = found[1].cuLaunchKernelEx, found[1].cuTensorMapReplaceAddress
        self._stream, self._lock = torch._C._cuda_getCurrentRawStream, threading.Lock()

    def __call__(self, inputs: int, outputs: int) -> None:
        """Launch on torch's current stream of the device, which must be the current one."""
        with self._lock:
            for i, at in enumerate((inputs, outputs)):
                if self._described[i]:
                    check(self._replace(self._descriptors[i], ctypes.c_void_p(at)), "a descriptor")
                else:
                    self._addresses[i].value = at
            self._config.stream = self._stream(self._device)
            result = self._launch(*self._given)
        if result:
            check(result, "a launch")
