"""Launches the kernel that multiplies by a tiled weight, as a torch operator for `torch.compile` and CUDA graphs.

Blocks that are not stored are not multiplied, so a NaN or an infinity in the input reaches only the outputs of groups that
use its block. Products are summed in float32; bias and activation come before the one rounding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spartan.inference.cpu.ops import linear_torch
from spartan.inference.gpu.tiles import Tiles, Tiling, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Through cp.async; through the tensor memory accelerator, outputs as well; through the L1 cache; inputs alone through the
# accelerator, outputs straight from the registers.
LOADS = ("async", "tma", "l1", "tma in")


@dataclass(frozen=True)
class Launch:
    """How the kernel is run.

    Args:
        tokens: of one program.
        warps: of one program.
        stages: how many tiles are on their way at a time.
        span: about how many outputs a program computes, one group after the other.
        loads: one of `LOADS`. "tma" and "tma in" need q = inputs and 16-byte strides; else "async" is used.
    """

    tokens: int
    warps: int
    stages: int
    span: int
    loads: str

    def __str__(self) -> str:
        return f"{self.loads} {self.tokens} tokens, {self.warps} warps, {self.stages} stages, {self.span} outputs"

    def groups(self, tiling: Tiling) -> int:
        """The span in groups of outputs."""
        return max(1, self.span // tiling.outputs)


@functools.cache
def _kernel() -> ModuleType | None:
    try:
        from spartan.inference.gpu import kernel
    except ImportError:  # no Triton here
        return None
    return kernel


@functools.cache
def interpreted() -> bool:
    """Whether Triton interprets kernels, so that they run on a CPU."""
    module = _kernel()
    if module is None:
        return False
    import triton

    return not isinstance(module.tile_linear_kernel, triton.runtime.JITFunction)


def available(device: torch.device) -> bool:
    """Whether the kernel can run on tensors of this device."""
    return _kernel() is not None and (device.type == "cuda" or interpreted())


def status() -> str:
    """One line: whether the kernels can run here, or why not."""
    if _kernel() is None:
        return "plain torch: Triton is not installed"
    if interpreted():
        return "Triton, interpreted"
    import triton

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"Triton {triton.__version__} on {where}"


def run(
    x: Tensor,
    weight: Tensor,
    ins: Tensor,
    last: Tensor,
    outs: Tensor,
    starts: Tensor,
    bias: Tensor,
    outputs: int,
    empties: int,
    tiling: list[int],
    launch: list[int],
    activation: str,
) -> Tensor:
    """act(x Wᵀ + b).

    Where the kernel cannot run (no Triton, or a CPU), the dense product does the same, slowly: the weight is unpacked first.

    Args:
        x: [..., inputs]; float32, bfloat16 or float16.
        weight, ins, last, outs, starts, empties: as in `Tiles`; the weight of x's type.
        bias: float32, one an output.
        outputs: how many.
        tiling: the four numbers of `Tiling`.
        launch: tokens, warps, stages and the place of the loads in `LOADS`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    inputs, module = x.shape[-1], _kernel()
    if module is None or not available(x.device):
        dense = unpack(Tiles(weight, ins, last, outs, starts, empties, Tiling(*tiling), (outputs, inputs)))
        return linear_torch(x, dense, bias, activation)
    import triton

    y = x.new_empty(*x.shape[:-1], outputs)
    tokens = x.numel() // inputs
    if tokens == 0 or outputs == 0:
        return y
    rows = x.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    tile_n, tile_k, p, q = tiling
    tile_m, warps, stages, loads = launch
    chunks, stride = starts.numel() - 1, rows.stride(0)
    tma = LOADS[loads].startswith("tma") and q == tile_k and tokens > 1
    tma = tma and all(size * x.element_size() % 16 == 0 for size in (stride, inputs, outputs))
    tma = tma and rows.data_ptr() % 16 == 0
    tma_out = tma and LOADS[loads] == "tma" and p == tile_n
    given: list[Any] = [rows, weight, y]
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        given = [
            TensorDescriptor(rows, [tokens, inputs], [stride, 1], [tile_m, tile_k]),
            TensorDescriptor(weight, [weight.shape[0] * tile_k, tile_n], [tile_n, 1], [tile_k, tile_n]),
            TensorDescriptor(y, [tokens, outputs], [outputs, 1], [tile_m, tile_n]) if tma_out else y,
        ]
    # float32 as torch's own product would take it: in three parts unless TF32 was asked for.
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        module.tile_linear_kernel[(triton.cdiv(tokens, tile_m) * chunks,)](
            *(given[0], given[1], bias, ins, last, outs, starts, given[2]),
            *(tokens, inputs, outputs, stride, outputs, chunks, outs.shape[0], empties),
            *(tile_m, tile_n, tile_k, p, q, activation, "tf32x3" if exact else "tf32", tma, tma_out),
            *(".ca" if LOADS[loads] == "l1" else "", interpreted()),
            num_warps=warps,
            num_stages=stages,
        )
    return y


# The same as an operator that `torch.compile` takes as it is. Outside a graph the dispatcher would only add to the launch.
tile_linear = torch.library.custom_op("spartan::tile_linear", run, mutates_args=())


@tile_linear.register_fake
def _fake(
    x: Tensor, weight: Tensor, ins: Tensor, last: Tensor, outs: Tensor, starts: Tensor, bias: Tensor, n: int, *_: Any
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)
