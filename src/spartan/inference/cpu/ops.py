"""Packs sparse weights for the CPU and multiplies by them: with the compiled kernels, and in plain torch without.

Rows are taken h at a time. An *entry* of a group is a run of g columns in which some row of the group is not zero; its
h·g numbers are stored, zeros among them included. So h = g = 1 is CSR, and any pattern of blocks whose height is a
multiple of h is stored without a zero, whatever the blocks' width, when g divides that.

Columns that are zero in a whole group of h rows are not multiplied, so a NaN or an infinity in the input reaches only
the outputs of groups that use it (with h = 1: the outputs that use it); a dense product spreads it to all. NaN passes
through the activations, as in torch.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spartan.inference.cpu.library import library, status
from spartan.inference.cpu.memory import empty

# The numbers are Activation's in job.h.
ACTIVATIONS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "none": (0, lambda x: x),
    "relu": (1, F.relu),
    "gelu": (2, F.gelu),
    "gelu_tanh": (3, lambda x: F.gelu(x, approximate="tanh")),
    "silu": (4, F.silu),
}
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class PackedMatrix:
    """A matrix of `outputs` × `inputs` in groups of h rows and runs of g columns."""

    starts: Tensor  # int32, groups + 1
    runs: Tensor  # int32, the number of each entry's run of columns
    values: Tensor  # float32 or, for the kernel "rows", bfloat16 [entries, g, h]
    outputs: int
    inputs: int

    @property
    def h(self) -> int:
        """Rows a group."""
        return self.values.shape[2]

    @property
    def g(self) -> int:
        """Columns a run."""
        return self.values.shape[1]


def in_blocks(weight: Tensor, h: int, g: int) -> Tensor:
    """The matrix as [groups, h, runs, g], with zeros where the sides do not divide."""
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, -inputs % g, 0, -outputs % h))
    return padded.reshape(padded.shape[0] // h, h, padded.shape[1] // g, g)


def pack(weight: Tensor, h: int, g: int, half: bool = False) -> PackedMatrix:
    """The matrix in groups of h rows and runs of g columns; values in float32, or with `half` in bfloat16.

    Example:
        >>> packed = pack(torch.eye(4), 2, 2)
        >>> packed.starts.tolist(), packed.runs.tolist(), tuple(packed.values.shape)
        ([0, 1, 2], [0, 1], (2, 2, 2))
        >>> bool((unpack(packed) == torch.eye(4)).all())
        True
    """
    tiles = in_blocks(weight.detach().to(torch.bfloat16 if half else torch.float32).cpu(), h, g)
    # NaN counts: it is not zero.
    group, run = (tiles != 0).any(3).any(1).nonzero(as_tuple=True)
    counts = torch.bincount(group, minlength=tiles.shape[0])
    starts = torch.zeros(tiles.shape[0] + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    values = tiles[group, :, run, :].transpose(1, 2).contiguous()
    return PackedMatrix(starts, run.int(), values, weight.shape[0], weight.shape[1])


def unpack(packed: PackedMatrix) -> Tensor:
    """The dense matrix, of the values' type."""
    groups, h, g = packed.starts.numel() - 1, packed.h, packed.g
    runs = -(-packed.inputs // g)
    tiles = packed.values.new_zeros(groups, h, runs, g)
    group = torch.repeat_interleave(torch.arange(groups), packed.starts.diff().long())
    tiles[group, :, packed.runs.long(), :] = packed.values.transpose(1, 2)
    return tiles.reshape(groups * h, runs * g)[: packed.outputs, : packed.inputs].contiguous()


def stored(weight: Tensor, h: int, g: int) -> int:
    """How many numbers `pack` would store.

    Example:
        >>> stored(torch.eye(4), 1, 1), stored(torch.eye(4), 4, 1)
        (4, 16)
    """
    return int((in_blocks(weight, h, g) != 0).any(3).any(1).sum()) * h * g


@dataclass(frozen=True)
class Conv:
    """A convolution's constants, as `torch.nn.Conv2d` names them; padding is with zeros."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    channels: int

    def out_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output; ValueError where the image is smaller than the kernel."""
        sides = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        down, across = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
        if min(down, across) < 1:
            raise ValueError(f"an image of {height}×{width} is smaller than the kernel {self.kernel} with its padding")
        return down, across


@dataclass(frozen=True)
class ConvLayout:
    """Where the kernel finds each weight's input: the layout of the packed image and an offset per entry."""

    geometry: list[int]  # what spartan_conv takes, from the channels on
    offsets: Tensor
    out_size: tuple[int, int]


def lay_out_conv(conv: Conv, packed: PackedMatrix, height: int, width: int, dtype: torch.dtype) -> ConvLayout:
    """Lay out the padded image so that every tap of the kernel is one offset.

    The image is padded with zeros and, with stride s, divided into s·s *phases* (rows a, a + s, … and columns b, b + s,
    …). Rows lie behind each other, so output pixel (y, x) is lane y·pitch + x, and tap (i, j) reads the lane shifted by
    ⌊i·d/s⌋·pitch + ⌊j·d/s⌋ in phase (i·d mod s, j·d mod s). Lanes in the columns beyond the output's are dropped.
    """
    size = out_h, out_w = conv.out_size(height, width)
    pointwise = conv.kernel == conv.stride == (1, 1) and conv.padding == (0, 0)
    if pointwise:  # one long row: no columns to drop
        height, width, out_h, out_w = 1, height * width, 1, out_h * out_w
    steps = [torch.arange(k) * d for k, d in zip(conv.kernel, conv.dilation, strict=True)]
    shifts, rests = zip(*((step // s, step % s) for step, s in zip(steps, conv.stride, strict=True)), strict=True)
    phases = [int(rest.max()) + 1 for rest in rests]
    rows_q, pitch = out_h + int(shifts[0].max()), out_w + int(shifts[1].max())
    direct = pointwise and dtype == torch.float32 and width % 16 == 0
    plane = phases[0] * phases[1] * rows_q * pitch
    if not direct:
        plane += -plane % 16
        plane += 16 * (plane % 1024 == 0)  # or all channels fall into the same cache sets
    if conv.channels * plane >= 2**31:
        raise ValueError(
            f"an image of {conv.channels}×{height}×{width} is too large for 32-bit offsets; use dense kernels"
        )
    phase = rests[0][:, None] * phases[1] + rests[1]
    taps = phase * (rows_q * pitch) + shifts[0][:, None] * pitch + shifts[1]
    kernel = conv.kernel[0] * conv.kernel[1]
    columns = packed.runs.long()
    channel, tap = columns // kernel, columns % kernel
    if conv.groups > 1:  # columns count within the group
        rows = torch.repeat_interleave(torch.arange(packed.starts.numel() - 1), packed.starts.diff().long()) * packed.h
        channel = channel + rows // (packed.outputs // conv.groups) * (conv.channels // conv.groups)
    offsets = (channel * plane + taps.reshape(-1)[tap]).int()
    geometry = [conv.channels, height, width, *conv.stride, *conv.padding, *phases, rows_q, pitch, plane, out_h, out_w]
    return ConvLayout([*geometry, int(direct)], offsets, size)


def linear_places(kind: str, packed: PackedMatrix) -> Tensor:
    """Where a kernel of `linear` finds each entry's inputs: the number of their run, or their offset among the lanes."""
    return packed.runs if kind == "rows" else packed.runs * compiled().spartan_lane_pitch(packed.h)


def linear(kind: str, x: Tensor, packed: PackedMatrix, places: Tensor, bias: Tensor, activation: str) -> Tensor:
    """act(x Wᵀ + b).

    Args:
        kind: "rows", with the outputs in the SIMD lanes, for groups of 8, 16, 32 or 64 rows and runs of 1, 4 or 8
            columns; or "lanes", with the tokens there, for groups of any height up to 64, and g = 1.
        x: float32 or bfloat16, contiguous, last dimension `packed.inputs`.
        packed: the weight.
        places: of `linear_places`.
        bias: float32, one per row of every group (zeros in rows that pad the last group).
        activation: a key of `ACTIVATIONS`.
    """
    y = empty(x, (*x.shape[:-1], packed.outputs))
    half = packed.values.dtype == torch.bfloat16
    sizes = [kind == "rows", half, x.numel() // packed.inputs, packed.inputs, packed.outputs, packed.h, packed.g]
    call_kernel("spartan_linear", x, (y, bias, packed.starts, places, packed.values), sizes, activation)
    return y


def conv2d(
    x: Tensor, packed: PackedMatrix, layout: ConvLayout, bias: Tensor, activation: str, residual: Tensor | None = None
) -> Tensor:
    """act(conv(x) + b + residual), pixels in the SIMD lanes; x and residual contiguous [images, channels, height, width]."""
    y = empty(x, (x.shape[0], packed.outputs, *layout.out_size))
    geometry = (ctypes.c_int64 * 16)(x.shape[0], *layout.geometry)
    others = (y, bias, residual, packed.starts, layout.offsets, packed.values)
    call_kernel("spartan_conv", x, others, [geometry, packed.outputs, packed.h], activation)
    return y


MOST_POOLED = 1024  # the widest window of `max_pool`


def max_pool(x: Tensor, window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """The largest of every window of x [images, channels, height, width], contiguous; NaN where a window has one."""
    size = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[2:], window, stride, padding, strict=True)]
    y = empty(x, (*x.shape[:2], *size))
    sizes = (x.shape[0] * x.shape[1], *x.shape[2:], *window, *stride, *padding, *size, x.shape[0])
    call_kernel("spartan_pool", x, (y,), [(ctypes.c_int64 * len(sizes))(*sizes)], "none")
    return y


_MOST_WIDE = 512  # the widest head of `attend`


def attends(*qkv: Tensor) -> bool:
    """Whether `attend` takes these: there are kernels, and nothing is to be learned through them."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in qkv):
        return False
    plain = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype == qkv[0].dtype for x in qkv)
    fits = qkv[0].dtype in DTYPES and 0 < qkv[0].shape[-1] <= _MOST_WIDE and qkv[1].shape[-2] > 0
    return plain and fits and all(x.stride(-1) == 1 for x in qkv) and library() is not None


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √width) v without masks, heads side by side: [images, queries, heads · width].

    q, k and v are [images, heads, tokens, width], with any strides but that a token's numbers of a head follow each
    other; see `attends`.
    """
    images, heads, queries, width = q.shape
    y = empty(q, (images, queries, heads * width))
    strides = [n for x in (q, k, v) for n in x.stride()[:3]]
    geometry = (ctypes.c_int64 * 14)(images, heads, queries, k.shape[2], width, *strides)
    call_kernel("spartan_attend", q, (y, k, v), [geometry], "none")
    return y


def call_kernel(
    kernel: str, x: Tensor, others: Sequence[Tensor | None], sizes: Sequence[object], activation: str
) -> None:
    """Call a kernel with the input, the other tensors and their sizes."""
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (x, *others)]
    how = (ACTIVATIONS[activation][0], x.dtype == torch.bfloat16, torch.get_num_threads())
    if getattr(compiled(), kernel)(*pointers, *sizes, *how):
        raise MemoryError("a sparse layer found no memory for its rearranged input")


def compiled() -> ctypes.CDLL:
    """The compiled kernels; RuntimeError where there are none."""
    found = library()
    if found is None:
        raise RuntimeError(f"the compiled kernels are not there ({status()}); use linear_torch or conv_torch")
    return found


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The same in plain torch, from the dense weight."""
    y = F.linear(x, weight.to(x.dtype), None if bias is None else bias[: weight.shape[0]].to(x.dtype))
    return ACTIVATIONS[activation][1](y)


def conv_torch(
    x: Tensor, conv: Conv, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None = None
) -> Tensor:
    """The same in plain torch, from the dense weight."""
    conv.out_size(*x.shape[-2:])  # or its error
    bias = None if bias is None else bias[: weight.shape[0]].to(x.dtype)
    y = F.conv2d(x, weight.to(x.dtype), bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    return ACTIVATIONS[activation][1](y if residual is None else y + residual)
