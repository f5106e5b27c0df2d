"""Launches of kernels that Triton has compiled, without Triton, whose own launch looks at every argument of every call.

What the kernel is given, and in what order, is read off its PTX. Where that is not what is expected, as another version of
Triton may have another way, there is no such launch, and Triton's own is used.
"""

import ctypes
import re
import struct
from collections.abc import Sequence
from typing import Any

import torch

from spartan.inference.gpu.driver import Prepared, libraries

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)[^,\n]*?(?:\[(\d+)\])?\s*(?:,|\n|$)")
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_MAP_SIZE, _SCRATCH = 128, 2
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_…
_WIDE_READS = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


def _described(descriptor: Any, about: dict[str, Any]) -> bytes:
    """The descriptor that Triton would make, of two dimensions."""
    found = libraries()
    if found is None or about["fp4_padded"] or about.get("is_im2col") or descriptor.padding == "nan":
        raise ValueError("a descriptor of another kind")
    base, (rows, columns), size = descriptor.base, descriptor.shape, descriptor.base.element_size()
    memory = ctypes.create_string_buffer(2 * _MAP_SIZE)
    at = -(-ctypes.addressof(memory) // 64) * 64
    failed = found[1].cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _TYPES[base.dtype],
        2,
        ctypes.c_void_p(base.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(descriptor.strides[0] * size),
        (ctypes.c_uint32 * 2)(*reversed(about["block_size"])),
        (ctypes.c_uint32 * 2)(1, 1),
        *(0, about["swizzle"], _WIDE_READS, 0),
    )
    if failed:
        raise ValueError(f"cuTensorMapEncodeTiled answers with error {failed}")
    return ctypes.string_at(at, _MAP_SIZE)


def _parameters(ptx: str) -> list[tuple[str, int, int]]:
    """Type, alignment and bytes of each."""
    head = ptx[ptx.index(".entry") :]
    head = head[head.index("(") + 1 : head.index(")")]
    sizes = {"u64": 8, "u32": 4, "b8": 1}
    return [
        (kind, int(alignment or sizes[kind]), sizes[kind] * int(count or 1))
        for alignment, kind, count in _PARAMETER.findall(head)
    ]


def _packed(arguments: Sequence[Any], made: Any) -> tuple[bytes, list[int], list[int]]:
    """The arguments as the kernel takes them, where each begins, and which of these are the first of each given one."""
    about: list[dict[str, Any]] = list(made.metadata.tensordesc_meta or [])
    values: list[int | bytes] = []
    firsts: list[int] = []
    for argument in arguments:
        firsts.append(len(values))
        if isinstance(argument, int):
            values.append(argument)
        elif isinstance(argument, torch.Tensor):
            values.append(argument.data_ptr())
        else:  # a descriptor
            values += [_described(argument, about.pop(0)), *argument.shape, *argument.strides]
    values += [0] * _SCRATCH
    parameters = _parameters(made.asm["ptx"])
    if (
        len(parameters) != len(values)
        or about
        or made.metadata.global_scratch_size
        or made.metadata.profile_scratch_size
    ):
        raise ValueError("the kernel takes other arguments")
    packed, begins = b"", []
    for (kind, alignment, size), value in zip(parameters, values, strict=True):
        bits = value if isinstance(value, bytes) else struct.pack("Q" if size == 8 else "i", value)
        if isinstance(value, bytes) != (kind == "b8") or len(bits) != size:
            raise ValueError("an argument is of another type")
        packed += bytes(-len(packed) % alignment)
        begins.append(len(packed))
        packed += bits
    return packed, begins, firsts


def launch_of(
    made: Any, programs: int, arguments: Sequence[Any], inputs: int, outputs: int, device: int
) -> Prepared | None:
    """The launch of what Triton compiled, if it can be had.

    Args:
        made: what a launch by Triton returned.
        programs: how many.
        arguments: those that are no constants: tensors, integers, and descriptors of two dimensions.
        inputs, outputs: which of them are other ones at every call.
        device: the CUDA device's index.
    """
    try:
        packed, begins, firsts = _packed(arguments, made)
        threads = _THREADS.search(made.asm["ptx"])
        if threads is None or made.metadata.num_ctas != 1 or made.metadata.launch_cooperative_grid:
            return None
        kinds = tuple(not isinstance(arguments[i], torch.Tensor) for i in (inputs, outputs))
        return Prepared(
            made.function,
            (programs, 1),
            int(threads[1]),
            made.metadata.shared,
            packed,
            begins,
            (begins[firsts[inputs]], begins[firsts[outputs]]),
            device,
            described=(kinds[0], kinds[1]),
        )
    except (AttributeError, KeyError, TypeError, ValueError, struct.error, AssertionError):
        return None  # another Triton
