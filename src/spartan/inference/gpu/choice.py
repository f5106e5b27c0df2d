"""Chooses the kernel that runs a linear layer on a CUDA device: times a few at its own shape, and keeps the answer."""

import contextlib
import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spartan.inference.cpu.choice import DENSE_ABOVE, fastest, measured
from spartan.inference.gpu import gathers, linear, nvrtc, singles
from spartan.inference.gpu.blocks import BlockKernel, BlockLinear, held_bytes
from spartan.inference.gpu.few import MOST_TOKENS, ScatterKernel, ScatterLinear, SplitTileKernel, SplitTileLinear
from spartan.inference.gpu.gathers import GatherKernel, GatherLinear
from spartan.inference.gpu.linear import DeviceLinear, Launch, SemiStructuredLinear, TileLinear, two_of_four
from spartan.inference.gpu.singles import SingleKernel, SingleLinear
from spartan.inference.gpu.spread import SpreadKernel, SpreadLinear
from spartan.inference.gpu.tiles import Tiling, blocks_of, plan
from spartan.inference.runtime import DenseLinear

VERSION = 5  # of the kernel: times of another do not count
CALLS, ROUNDS, TILINGS_TIMED = 10, 5, 2
TILINGS = [
    *(Tiling(n, 64, 64, 64) for n in (64, 128)),
    *(Tiling(64, 64, p, q) for p, q in ((64, 32), (32, 64), (64, 16), (16, 64))),
    *(Tiling(n, k, 32, 32) for n, k in ((32, 32), (32, 64), (64, 32), (64, 64), (128, 64))),
    *(Tiling(32, k, 32, 16) for k in (32, 64)),
    *(Tiling(n, k, 16, 16) for n, k in ((16, 64), (32, 64), (64, 64), (128, 64))),
]
# The best of some 150 launches of each tiling, for ViT-B/16's layers at 90% zeros and 12,608 tokens on an H200.
LAUNCHES = [
    *(Launch(128, 4, 2, span, "tma") for span in (64, 128)),
    *(Launch(128, 4, stages, 64, "tma") for stages in (3, 4)),
    *(Launch(64, 4, stages, span, "tma") for stages, span in ((2, 256), (4, 512))),
    Launch(128, 4, 3, 128, "tma in"),
    *(Launch(128, 4, 2, span, "async") for span in (64, 256)),
    Launch(128, 8, 3, 128, "async"),
    Launch(64, 4, 3, 512, "async"),
]
# For one to 64 tokens where no CUDA C++ can be compiled; and where it can, the best of a dozen or two of each on an H200,
# for layers of 4096 and 11008 inputs and outputs.
SCATTERS = [ScatterKernel(lanes, 128, splits, 4) for lanes in (16, 32) for splits in (1, 4)]
SPLITS, FEW_ZEROS = (1, 2, 4, 8), 0.75
BLOCKS = [BlockKernel(*case) for case in ((1, 16, 4), (1, 8, 8), (1, 8, 2), (2, 16, 4), (2, 8, 4), (2, 4, 8))]
SINGLES = [SingleKernel(1, 32, 4), SingleKernel(1, 16, 4), SingleKernel(1, 12, 3), SingleKernel(2, 8, 4)]
GATHERS = [GatherKernel(4, 8, 1, 1), GatherKernel(4, 4, 1, 1), GatherKernel(8, 2, 2, 1)]
SPREADS = [
    SpreadKernel(*case)
    for case in ((4, 12, 2, 3), (4, 16, 2, 2), (4, 8, 1, 3), (3, 8, 1, 3), (2, 16, 1, 3), (2, 24, 1, 2))
]
# Rates for `estimate`, in bytes and multiplications a second, of one H200: they only decide which tilings are timed.
_FROM_L2, _TO_MEMORY, _PRODUCTS, _STEP = 5.5e12, 4e12, 3e14, 3e-12


@dataclass(frozen=True)
class TileKernel:
    """A tiling, and a launch for it."""

    tiling: Tiling
    launch: Launch

    def __str__(self) -> str:
        return f"tiles {self.tiling}, {self.launch}"


CudaKernel = BlockKernel | SingleKernel | GatherKernel | SpreadKernel
DeviceKernel = TileKernel | ScatterKernel | SplitTileKernel | CudaKernel


def estimate(keep: Tensor, tiling: Tiling, shape: tuple[int, int]) -> tuple[float, float]:
    """Seconds a token, roughly, and the share of the weight that the tiles hold, from the blocks (p × q) that are kept."""
    outputs, inputs = shape
    _, columns = plan(keep, tiling)
    steps = int((-(-columns.sum(1) // (tiling.inputs // tiling.q))).sum())
    held = steps * tiling.inputs * tiling.outputs
    loads = int(columns.sum()) * tiling.q * 2 / _FROM_L2
    products = held / _PRODUCTS * (1 + 16 / tiling.outputs)  # narrow tiles wait for the tokens' tile
    return max(loads, products) + outputs * 2 / _TO_MEMORY + steps * _STEP, held / (outputs * inputs)


def block_sizes(weight: Tensor) -> dict[tuple[int, int], Tensor]:
    """Sizes of blocks worth cutting the weight into, with the blocks that are kept: no larger ones hold as little.

    Example:
        >>> list(block_sizes(torch.eye(4).repeat_interleave(32, 0).repeat_interleave(32, 1)))
        [(32, 32)]
    """
    fine = blocks_of(weight.detach() != 0, 16, 16).cpu()
    sizes = sorted({(t.p, t.q) for t in TILINGS}, key=lambda size: -size[0] * size[1])
    kept = {(p, q): blocks_of(fine, p // 16, q // 16) for p, q in sizes}
    held = {(p, q): int(keep.sum()) * p * q for (p, q), keep in kept.items()}
    found: dict[tuple[int, int], Tensor] = {}
    for p, q in sizes:
        larger = any(a >= p and b >= q and held[a, b] <= 1.02 * held[p, q] for a, b in found)
        if held[p, q] <= 1.5 * held[16, 16] and not larger:
            found[p, q] = kept[p, q]
    return found


def candidates(weight: Tensor) -> list[tuple[Tiling, float]]:
    """Tilings that may suit the weight's zeros, the most promising first, each with the share of the weight it stores.

    Those that TMA can load come first: on an H200 they were always faster than one whose columns must be gathered.
    """
    kept, shape = block_sizes(weight), (weight.shape[0], weight.shape[1])
    tilings = [tiling for tiling in TILINGS if (tiling.p, tiling.q) in kept]
    found = [(tiling, *estimate(kept[tiling.p, tiling.q], tiling, shape)) for tiling in tilings]
    found.sort(key=lambda option: option[1])
    ranked = [(tiling, share) for tiling, seconds, share in found if seconds <= 1.5 * found[0][1]]
    whole = [option for option in ranked if option[0].q == option[0].inputs][:TILINGS_TIMED]
    gathered = [option for option in ranked if option[0].q < option[0].inputs]
    return whole + gathered[: 1 if whole else TILINGS_TIMED]


def fits(tiling: Tiling, launch: Launch, size: int) -> bool:
    """Whether a launch can run a tiling of values of `size` bytes, and suits it: where q < inputs, TMA cannot."""
    stage = (launch.tokens + tiling.outputs) * tiling.inputs * size
    room = launch.stages * stage + launch.tokens * tiling.outputs * size <= 220 * 1024
    sums = launch.tokens * tiling.outputs // (32 * launch.warps) <= 64  # registers a thread: with 128 they spill
    return room and sums and (tiling.q == tiling.inputs) == launch.loads.startswith("tma")


def tile_kernels(tilings: Sequence[Tiling], launches: Sequence[Launch], size: int) -> list[TileKernel]:
    """Every tiling with every launch that it can take."""
    return [TileKernel(t, launch) for t in tilings for launch in launches if fits(t, launch, size)]


def resident_kernels(inputs: int, kernels: Sequence[BlockKernel]) -> list[BlockKernel]:
    """Kernels on blocks for many tokens: as many of these as shared memory holds."""
    most = max((n for n in (16, 32, 64, 128) if held_bytes(inputs, n) <= nvrtc.MOST_SHARED), default=0)
    narrow = [
        (most, 12),
        (most, 16),
        (most // 2, 8),
    ]  # tokens and warps, where a strip is 16 outputs: sums in registers
    cases = [(1, *case) for case in narrow] + [(2, most, 8), (2, most // 2, 8)]
    rows = {kernel.rows for kernel in kernels}
    return [BlockKernel(r, 8, 4, n, warps, 4 // r) for r, n, warps in cases if r in rows and n >= 16]


def few_kernels(weight: Tensor, tilings: Sequence[Tiling]) -> list[ScatterKernel | SplitTileKernel]:
    """Kernels for one to 64 tokens: the tilings shared out among programs or, where there are none, single weights."""
    split = [SplitTileKernel(tiling, splits, 4, 3) for tiling in tilings for splits in SPLITS]
    return [*split] if split or float((weight == 0).float().mean()) < FEW_ZEROS else [*SCATTERS]


def cuda_kernels(weight: Tensor, height: int, tokens: int) -> list[CudaKernel]:
    """Kernels in CUDA C++ for a number of tokens: on blocks of so many rows or, with few tokens, on single weights (0)."""
    inputs = weight.shape[1]
    if height:
        found = [kernel for kernel in BLOCKS if 16 * kernel.rows <= height]
        return [*found] if tokens <= MOST_TOKENS else [*resident_kernels(inputs, found)]
    if tokens > MOST_TOKENS or float((weight == 0).float().mean()) < FEW_ZEROS:
        return []
    if tokens == 1:
        return [*SINGLES] if inputs <= singles.MOST_INPUTS else []
    return [*SPREADS, *GATHERS] if inputs <= gathers.MOST_INPUTS else [*SPREADS]


def build(layer: DenseLinear, kernel: DeviceKernel | str) -> DeviceLinear:
    """The layer on a kernel: on tiles, in CUDA C++, for few tokens, or "2:4"."""
    if isinstance(kernel, BlockKernel):
        return BlockLinear(layer.weight, layer.bias, kernel, layer.activation)
    if isinstance(kernel, SingleKernel):
        return SingleLinear(layer.weight, layer.bias, kernel, layer.activation)
    if isinstance(kernel, GatherKernel):
        return GatherLinear(layer.weight, layer.bias, kernel, layer.activation)
    if isinstance(kernel, SpreadKernel):
        return SpreadLinear(layer.weight, layer.bias, kernel, layer.activation)
    if isinstance(kernel, ScatterKernel):
        return ScatterLinear(layer.weight, layer.bias, kernel, layer.activation)
    if isinstance(kernel, SplitTileKernel):
        return SplitTileLinear(layer.weight, layer.bias, kernel, layer.activation)
    if isinstance(kernel, str):
        return SemiStructuredLinear(layer.weight, layer.bias, layer.activation)
    return TileLinear(layer.weight, layer.bias, kernel.tiling, kernel.launch, layer.activation)


def choose(
    layer: DenseLinear, shape: tuple[int, ...], dtype: torch.dtype, kernels: str
) -> tuple[DeviceKernel | str | None, str]:
    """The kernel for a layer and the reason, in a few words, as the choice for a CPU: None is torch's dense product."""
    zeros = layer.zeros
    if not linear.available(layer.weight.device):
        return None, f"{zeros:.1%} zeros; {linear.status()}"
    tokens, half = math.prod(shape[:-1]), dtype in (torch.bfloat16, torch.float16)
    offered: list[DeviceKernel] = []
    shares: list[str] = []
    if half and nvrtc.available(layer.weight.device):
        sizes = {(p, q): int(k.sum()) * p * q / layer.weight.numel() for (p, q), k in block_sizes(layer.weight).items()}
        height = max((p for (p, _), share in sizes.items() if share <= DENSE_ABOVE), default=0)
        offered += cuda_kernels(layer.weight, height, tokens)
        shares += [f"{p}×{q} {share:.2g}" for (p, q), share in sizes.items()]
    if not offered or tokens > MOST_TOKENS:  # those in CUDA C++ are faster with few tokens
        options = candidates(layer.weight)
        if kernels == "auto":
            options = [option for option in options if option[1] <= DENSE_ABOVE]
        offered += tile_kernels([tiling for tiling, _ in options], LAUNCHES, dtype.itemsize)
        shares += [f"{tiling} {share:.2g}" for tiling, share in options]
        if half and tokens <= MOST_TOKENS:
            offered += few_kernels(layer.weight, [tiling for tiling, share in options if share <= DENSE_ABOVE])
    named: dict[str, DeviceKernel | str | None] = {str(kernel): kernel for kernel in offered}
    if two_of_four(layer.weight) and zeros < 0.75 and layer.weight.is_cuda:  # sparser ones belong to other kernels
        named["2:4"] = "2:4"
    if not named:
        return None, f"{zeros:.1%} zeros: too few, or too scattered for any kernel"
    if kernels == "auto":
        named["dense"] = None
    machine = f"{linear.status()}, torch {torch.__version__}, {torch.version.cuda}, kernel {VERSION}"
    case = [machine, "linear", tuple(layer.weight.shape), shape, dtype, layer.activation, kernels, *shares]
    return fastest(named, zeros, shape, measured(case, lambda: measure(layer, shape, dtype, named), named))


@torch.inference_mode()
def measure(
    layer: DenseLinear, shape: tuple[int, ...], dtype: torch.dtype, kernels: Mapping[str, DeviceKernel | str | None]
) -> dict[str, float]:
    """Seconds on the device by kernel; infinity for one that fails or is wrong.

    Launches are not counted: whether the device has to wait for them shows in the whole model only.
    """
    x = torch.randn(shape, device=layer.weight.device).to(dtype)
    expected = layer(x)
    runs: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, kernel in kernels.items():
        try:
            run = layer if kernel is None else build(layer, kernel)
            close(run(x), expected)
            runs[name] = run
        except torch.AcceleratorError:  # the device is lost: nothing else would run
            raise
        except Exception:  # out of shared memory or registers, not compiled, not this shape: then another one
            continue
    return dict.fromkeys(kernels, math.inf) | timed(runs, x, cold=math.prod(shape[:-1]) <= MOST_TOKENS)


def close(got: Tensor, expected: Tensor) -> None:
    """Raise ArithmeticError unless the two agree up to rounding."""
    bound = {torch.float32: 5e-3, torch.float16: 5e-3}.get(expected.dtype, 4e-2)
    gap = (got.float() - expected.float()).abs().max()
    if not bool(gap <= bound * expected.float().abs().max().clamp(min=1e-6)):
        raise ArithmeticError(f"a kernel's output differs from the dense one's by {float(gap):.3g}")


def timed(runs: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor, cold: bool = False) -> dict[str, float]:
    """Seconds a call: the median of rounds of several calls behind each other, the runs taking turns.

    The calls are replayed from a CUDA graph, so that none waits for its launch. With `cold` they go through copies of a
    layer, of more bytes than a cache holds: with few tokens the time is that of reading the weight.
    """
    count, rounds = (CALLS, ROUNDS) if x.is_cuda else (1, 1)  # in Triton's interpreter times mean little

    def several(layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        return [layer(x) for layer in layers][-1]

    lists = {name: _copies(run, count) if cold and x.is_cuda else [run] * count for name, run in runs.items()}
    calls: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(several, layers) for name, layers in lists.items()
    }
    for name in calls if x.is_cuda else ():
        with contextlib.suppress(RuntimeError):  # it cannot be captured, or there is no memory: then with launches
            calls[name] = graph_of(calls[name])
        torch.cuda.synchronize()
    turns = [{name: _seconds(call, x.is_cuda) for name, call in calls.items()} for _ in range(rounds + 1)]
    return {name: statistics.median_high(turn[name] for turn in turns[1:]) / len(lists[name]) for name in runs}


def _copies(run: Callable[[Tensor], Tensor], least: int) -> list[Callable[[Tensor], Tensor]]:
    """A layer and copies of it: at least so many, and twice what the device's cache holds."""
    if not isinstance(run, nn.Module):
        return [run] * least
    size, cache = sum(buffer.nbytes for buffer in run.buffers()), torch.cuda.get_device_properties().L2_cache_size
    return [run, *(copy.deepcopy(run) for _ in range(max(least, 2 * cache // max(1, size)) - 1))]


def graph_of(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The run as a CUDA graph; each replay overwrites its output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def is_faster(fast: Callable[[], object], plain: Callable[[], object]) -> bool:
    """Whether a model is done sooner than another one, called as it is, launches included."""
    times = {fast: math.inf, plain: math.inf}
    for _ in range(ROUNDS + 1):
        for run in times:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            times[run] = min(times[run], time.perf_counter() - start)
    return times[fast] < times[plain]


def _seconds(run: Callable[[], Tensor], cuda: bool) -> float:
    if not cuda:  # Triton's interpreter
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
