"""The sparse linear layers for CUDA devices: by a kernel on tiles, and by torch's semi-structured (2:4) tensors.

The kernel is launched as a torch operator, for `torch.compile` and CUDA graphs. Blocks that are not stored are not
multiplied, so a NaN or an infinity in the input reaches only the outputs of groups that use its block. Products are
summed in float32; bias and activation come before the one rounding.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn

from spartan.inference.cpu.ops import ACTIVATIONS, linear_torch
from spartan.inference.gpu.compiled import launch_of
from spartan.inference.gpu.driver import Prepared, is_here
from spartan.inference.gpu.tiles import Tiles, Tiling, pack, unpack
from spartan.inference.runtime import InferenceLayer, outside_graphs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Through cp.async; through the tensor memory accelerator, outputs as well; through the L1 cache; inputs alone through
# the accelerator, outputs straight from the registers.
LOADS = ("async", "tma", "l1", "tma in")
_MOST_CALLS = 64  # of a layer that are kept


@dataclass(frozen=True)
class Launch:
    """How the kernel is run."""

    tokens: int  # of one program
    warps: int  # of one program
    stages: int  # how many tiles are on their way at a time
    span: int  # about how many outputs a program computes, one group after the other
    loads: str  # one of `LOADS`; "tma" and "tma in" need q = inputs and 16-byte strides, else "async" is used

    def __str__(self) -> str:
        return f"{self.loads} {self.tokens} tokens, {self.warps} warps, {self.stages} stages, {self.span} outputs"


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
    return module is not None and not isinstance(module.tile_linear_kernel, module.triton.runtime.JITFunction)


def available(device: torch.device) -> bool:
    """Whether the kernel can run on tensors of this device."""
    return _kernel() is not None and (device.type == "cuda" or interpreted())


_HERE: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def on(device: int) -> contextlib.AbstractContextManager[Any]:
    """With this CUDA device as the current one; −1 is none. (torch's own way takes its time where it is that already.)"""
    return _HERE if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)


def status() -> str:
    """One line: whether the kernels can run here, or why not."""
    module = _kernel()
    if module is None:
        return "plain torch: Triton is not installed"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return "Triton, interpreted" if interpreted() else f"Triton {module.triton.__version__} on {where}"


def run(x: Tensor, buffers: list[Tensor], sizes: list[int], launch: list[int], activation: str) -> Tensor:
    """act(x Wᵀ + b).

    Where the kernel cannot run (no Triton, or a CPU), the dense product does the same, slowly: the weight is unpacked
    first.

    Args:
        x: [..., inputs]; float32, bfloat16 or float16.
        buffers: weight (of x's type), ins, last, outs and starts, as in `Tiles`; and the bias, float32, one an output.
        sizes: outputs, empties and the four numbers of `Tiling`.
        launch: tokens, warps, stages and the place of the loads in `LOADS`.
        activation: a key of `spartan.inference.cpu.ops.ACTIVATIONS`.
    """
    inputs, module, (outputs, empties) = x.shape[-1], _kernel(), sizes[:2]
    if module is None or not available(x.device):
        weight, ins, last, outs, starts, bias = buffers
        dense = unpack(Tiles(weight, ins, last, outs, starts, empties, Tiling(*sizes[2:]), (outputs, inputs)))
        return linear_torch(x, dense, bias, activation)
    y = x.new_empty(*x.shape[:-1], outputs)
    if y.numel() == 0:
        return y
    rows = x.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    case, programs, given, constants, warps, stages = _work(rows, y, buffers, sizes, launch, activation)
    with on(x.device.index if x.is_cuda else -1):
        # A kernel that is known is not looked for by all that Triton's own launch would look at, which takes it longer
        # than the launch.
        known = _compiled.get(case)
        if known is not None:
            known[(programs, 1, 1)](*given, *constants)
        else:
            made = module.tile_linear_kernel[(programs,)](*given, *constants, num_warps=warps, num_stages=stages)
            if made is not None:  # nothing comes from the interpreter
                _compiled[case] = made
    return y


_compiled: dict[tuple[Any, ...], Any] = {}


def _work(
    rows: Tensor, y: Tensor, buffers: list[Tensor], sizes: list[int], launch: list[int], activation: str
) -> tuple[tuple[Any, ...], int, tuple[Any, ...], tuple[Any, ...], int, int]:
    """What tells kernels apart; programs, arguments and constants; warps and stages."""
    (tokens, inputs), (weight, ins, last, outs, starts, bias), size = rows.shape, buffers, rows.element_size()
    outputs, empties, tile_n, tile_k, p, q = sizes
    tile_m, warps, stages, loads = launch
    chunks, stride = starts.numel() - 1, rows.stride(0)
    tma = LOADS[loads].startswith("tma") and q == tile_k and tokens > 1
    tma = tma and all(number * size % 16 == 0 for number in (stride, inputs, outputs)) and rows.data_ptr() % 16 == 0
    tma_out = tma and LOADS[loads] == "tma" and p == tile_n
    x, w, out = rows, weight, y
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x = TensorDescriptor(rows, [tokens, inputs], [stride, 1], [tile_m, tile_k])
        w = TensorDescriptor(weight, [weight.shape[0] * tile_k, tile_n], [tile_n, 1], [tile_k, tile_n])
        if tma_out:
            out = TensorDescriptor(y.view(-1, outputs), [tokens, outputs], [outputs, 1], [tile_m, tile_n])
    # float32 as torch's own product would take it: in three parts unless TF32 was asked for.
    exact = rows.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    way = ("tf32x3" if exact else "tf32", tma, tma_out, ".ca" if LOADS[loads] == "l1" else "", interpreted())
    constants = (tile_m, tile_n, tile_k, p, q, activation, *way)
    numbers = (inputs, outputs, stride, outputs)
    given = (x, w, bias, ins, last, outs, starts, out, tokens, *numbers, chunks, outs.shape[0], empties)
    even = all(t.data_ptr() % 16 == 0 for t in (rows, *buffers))
    case = (rows.device, rows.dtype, even, numbers, constants, warps, stages)
    return case, -(-tokens // tile_m) * chunks, given, constants, warps, stages


# The same as an operator that `torch.compile` takes as it is.
tile_linear = torch.library.custom_op("spartan::tile_linear", run, mutates_args=())


@tile_linear.register_fake
def _fake(x: Tensor, buffers: list[Tensor], sizes: list[int], *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], sizes[0])


class DeviceLinear(InferenceLayer):
    """A sparse linear layer on a CUDA device, which a subclass gives its weight and its kernel."""

    weight: Tensor
    _names: tuple[str, ...] = ()  # of the buffers that the operator is given, the weight's values first
    _given: list[Tensor] | None = None  # these, from the first call on: to ask a module for a buffer takes its time
    # By shape, strides, type and device of the input: the launch, the output's shape, and whether inputs begin at 16 bytes.
    _calls: dict[Any, tuple[Prepared, tuple[int, ...], bool]]

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        super().__init__(activation)
        self.outputs, self.inputs = weight.shape
        self._calls = {}
        self.bias: Tensor = nn.Buffer(weight.new_zeros(self.outputs) if bias is None else bias.detach().clone())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._given, self._calls = None, {}
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._given, self._calls = None, {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_given": None, "_calls": {}}  # a copy has its own

    def _call(self, x: Tensor) -> Tensor:
        """The output for an input that was checked."""
        raise NotImplementedError

    def _prepared(self, x: Tensor) -> tuple[Prepared, bool] | None:
        """What such a call launches, and whether it needs inputs that begin at 16 bytes; None if that is not known."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs], float32, bfloat16 or float16.

        What is launched for inputs of one shape is worked out once: a call then takes the host little more than the
        driver does.
        """
        if torch.compiler.is_compiling():
            return self._call(self._checked_input(x, self.inputs, -1))
        device = x.device
        known = self._calls.get((x.shape, x.stride(), x.dtype, device))
        if known is None or x.requires_grad or not is_here(device.index) or torch.is_autocast_enabled(device.type):
            return self._first(x)
        launch, shape, aligned = known
        at = x.data_ptr()
        if aligned and at % 16:
            return self._first(x)
        y = x.new_empty(shape)
        launch(at, y.data_ptr())
        return y

    def _first(self, x: Tensor) -> Tensor:
        """The output; what such a call launches is noted down."""
        given = self._checked_input(x, self.inputs, -1)
        y = self._call(given)
        if given is x and y.numel() and y.dtype == self._operands(y.dtype)[0].dtype and self.bias.device == x.device:
            with on(x.device.index if x.is_cuda else -1):
                prepared = self._prepared(x)
            if prepared is not None:
                if len(self._calls) >= _MOST_CALLS:
                    self._calls.clear()
                self._calls[x.shape, x.stride(), x.dtype, x.device] = prepared[0], tuple(y.shape), prepared[1]
        return y

    def _operands(self, dtype: torch.dtype) -> list[Tensor]:
        """What the operator is given, with values of this type."""
        compiling = torch.compiler.is_compiling()
        buffers = None if compiling else self._given
        if buffers is None:
            buffers = [getattr(self, name) for name in self._names]
            if not compiling:
                self._given = buffers
        return buffers if buffers[0].dtype == dtype else [buffers[0].to(dtype), *buffers[1:]]

    def part(self, x: Tensor, first: int, last: int) -> Tensor:
        """Outputs `first` to `last`, of all that are computed."""
        return self(x)[..., first:last]

    def _checked_input(self, x: Tensor, size: int, dim: int) -> Tensor:
        """The input in the type to compute in: autocast's, as for torch's linear, else its own."""
        x, kind = super()._checked_input(x, size, dim), x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{type(self).__name__} takes float32, bfloat16 and float16, not {x.dtype}; use kernels='dense'"
            )
        return x


class TileLinear(DeviceLinear):
    """act(x Wᵀ + b) with a weight in tiles.

    The tiles follow the model's type; the bias stays float32.

    Example:
        >>> layer = torch.nn.Linear(64, 96)
        >>> _ = spartan.prune(layer, 0.5, pattern=spartan.Block(16, 16))
        >>> fast = TileLinear(layer.weight, layer.bias, Tiling(16, 64, 16, 16), Launch(64, 4, 2, 64, "async"))
        >>> x = torch.randn(5, 64)
        >>> bool(torch.allclose(fast(x), layer(x), atol=1e-5))
        True
    """

    _names = ("tiles", "ins", "last", "outs", "starts", "bias")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, tiling: Tiling, launch: Launch, activation: str = "none"
    ) -> None:
        super().__init__(weight, bias, activation)
        packed = pack(weight, tiling, span=max(1, launch.span // tiling.outputs))
        self.tiles, self.ins, self.last = nn.Buffer(packed.weight), nn.Buffer(packed.ins), nn.Buffer(packed.last)
        self.outs, self.starts = nn.Buffer(packed.outs), nn.Buffer(packed.starts)
        self.bias = self.bias.float()
        self.tiling, self.empties = tiling, packed.empties
        self.kernel = f"tiles {tiling}, {launch}"
        self._sizes = [self.outputs, self.empties, tiling.outputs, tiling.inputs, tiling.p, tiling.q]
        self._launch = [launch.tokens, launch.warps, launch.stages, LOADS.index(launch.loads)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # model.bfloat16() rounds the bias as it would a dense model's; the kernel still reads float32.
        super()._apply(fn, recurse)
        self.bias = self.bias.float()
        return self

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight, for code that asks a linear layer for it; made on every access."""
        buffers = (self.tiles, self.ins, self.last, self.outs, self.starts)
        return unpack(Tiles(*buffers, self.empties, self.tiling, (self.outputs, self.inputs)))

    def _call(self, x: Tensor) -> Tensor:
        # Outside a graph the dispatcher would only add to the time of the launch.
        call: Callable[..., Tensor] = tile_linear if torch.compiler.is_compiling() else run
        return call(x, self._operands(x.dtype), self._sizes, self._launch, self.activation)

    def _prepared(self, x: Tensor) -> tuple[Prepared, bool] | None:
        rows = x.reshape(-1, self.inputs)
        if not x.is_cuda or x.dtype == torch.float32 or rows.data_ptr() != x.data_ptr() or rows.stride(1) != 1:
            return None  # how float32 is multiplied may be decided anew
        y, buffers = x.new_empty(*x.shape[:-1], self.outputs), self._operands(x.dtype)
        case, programs, given, *_ = _work(rows, y, buffers, self._sizes, self._launch, self.activation)
        made = _compiled.get(case)
        launch = None if made is None else launch_of(made, programs, given, 0, 7, x.device.index)
        return None if launch is None else (launch, True)


def two_of_four(weight: Tensor) -> bool:
    """Whether of every four weights along the input at most two are not zero.

    Example:
        >>> two_of_four(torch.tensor([[1.0, 0, 2, 0]])), two_of_four(torch.tensor([[1.0, 1, 1, 0]]))
        (True, False)
    """
    return weight.shape[1] % 4 == 0 and bool(((weight != 0).reshape(-1, 4).sum(1) <= 2).all())


class SemiStructuredLinear(DeviceLinear):
    """act(x Wᵀ + b) with a 2:4 weight, by torch's own kernels; the dense weight is kept beside it."""

    kernel = "2:4"

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        if not two_of_four(weight):
            raise ValueError("weight: of every four along the input at most two may differ from zero")
        super().__init__(weight, bias, activation)
        self.weight = nn.Buffer(weight.detach().clone())
        self._packed: Tensor | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._packed = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_packed": None}  # made again from the dense weight

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x [..., inputs]."""
        x = self._checked_input(x, self.inputs, -1)
        if not x.is_cuda or x.dtype != self.weight.dtype:
            return linear_torch(x, self.weight, self.bias, self.activation)
        if self._packed is None:
            with warnings.catch_warnings(action="ignore"):  # torch calls these tensors a prototype
                self._packed = torch.sparse.to_sparse_semi_structured(self.weight)
        y = nn.functional.linear(x, self._packed, self.bias)
        return ACTIVATIONS[self.activation][1](y)
