"""The GPU part of bench_decode.py (`--device cuda`): bfloat16, or float16 with `--half`, one device.

First the seven linear layers of a block at 1 and 16 tokens, replayed from a CUDA graph that goes through copies of all
weights, four times what the L2 cache holds. Ours runs, layer by layer, the kernel that `accelerate` times as the fastest.
Dense is the faster one of `F.linear` and the same under `torch.compile` (max-autotune). Beside them torch's CSR product, and
the floor: the stored bytes at the speed of a device copy. Then what a call of a layer takes the host, not waited for.

Then a decoder of eight such blocks (decode_model.py) with 512 tokens in its cache, one step in a CUDA graph: dense, and as
`accelerate` makes it with `tokens=(1,)`. The greedy tokens of both are compared, and the time to read 4,096 tokens.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from decode_model import Llama
from inference_gpu import limits, seconds
from torch import Tensor, nn

from spartan import Block, prune
from spartan.inference.convert import accelerate, explain
from spartan.inference.gpu import choice
from spartan.inference.gpu.linear import Launch, TileLinear
from spartan.inference.gpu.tiles import Tiling
from spartan.inference.runtime import DenseLinear

DTYPE = torch.bfloat16  # bench_decode.py sets it
SHAPES = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]  # inputs, outputs
PATTERNS = {"64×64 blocks": 64, "single weights": 1, "16×16 blocks": 16}
# What was asked for, at 90% zeros, by tokens; and single weights at 80%.
GOALS = {
    1: {"64×64 blocks": 4.0, "16×16 blocks": 4.0, "single weights": 3.0},
    16: {"64×64 blocks": 3.0, "16×16 blocks": 3.0, "single weights": 2.0},
}
DECODER_GOALS = {"64×64 blocks": 3.0, "16×16 blocks": 3.0, "single weights": 2.0}
PARTS = ["layers", "host", "decoder"]
LESS_SPARSE, LESS_GOAL, HOST_GOAL = 0.8, 1.8, 25.0
Write = Callable[[str, int, str, float, int, float, float], None]


def sparse_weight(inputs: int, outputs: int, block: int, sparsity: float) -> Tensor:
    keep = torch.rand(-(-outputs // block), -(-inputs // block), device="cuda") >= sparsity
    mask = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:outputs, :inputs]
    return torch.randn(outputs, inputs, device="cuda", dtype=DTYPE) * mask


def rotated(layers: Mapping[tuple[int, int], nn.Module]) -> tuple[list[nn.Module], int, int]:
    """The seven layers and enough copies; how often, and the bytes of seven."""
    size = sum(buffer.nbytes for shape in SHAPES for buffer in layers[shape].buffers())
    times = max(2, 4 * torch.cuda.get_device_properties().L2_cache_size // size + 1)
    return [copy.deepcopy(layers[shape]) for _ in range(times) for shape in SHAPES], times, size


def graph_seconds(layers: list[nn.Module], tokens: int, call: Callable[[nn.Module, Tensor], Tensor]) -> float:
    """Seconds of one pass through layers, replayed."""
    inputs = {n: torch.randn(tokens, n, device="cuda", dtype=DTYPE) for n in {n for n, _ in SHAPES}}
    sizes = [SHAPES[i % len(SHAPES)][0] for i in range(len(layers))]

    def run() -> Tensor:
        return [call(layer, inputs[size]) for layer, size in zip(layers, sizes, strict=True)][-1]

    return seconds(choice.graph_of(run), 1, 15)[0]


class Plain(nn.Module):
    """A dense weight, without a bias."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ."""
        return F.linear(x, self.weight)


class Csr(Plain):
    """torch's product with a CSR weight."""

    def forward(self, x: Tensor) -> Tensor:
        """The weight times the tokens, as columns."""
        return self.weight @ x.t()


def best_dense(tokens: int, write: Write, copied: float) -> float:
    dense = {shape: Plain(sparse_weight(*shape, 1, 0.0)) for shape in SHAPES}
    layers, times, size = rotated(dense)
    found = {"dense": graph_seconds(layers, tokens, lambda layer, x: layer(x)) / times}
    try:
        linear = torch.compile(F.linear, mode="max-autotune-no-cudagraphs", dynamic=False)
        found["dense, compiled"] = (
            graph_seconds(layers, tokens, lambda layer, x: linear(x, layer.get_buffer("weight"))) / times
        )
    except Exception as error:  # the other one stands
        print(f"  dense, compiled: failed: {str(error)[:200]}", flush=True)
    base = min(found.values())
    for name, least in found.items():
        write("layers", tokens, f"{name}, in a graph", least, size, base / least, least * copied / size)
    return base


def bench_layers(tokens: int, sparsity: float, write: Write) -> None:
    copied, _ = limits()
    base = best_dense(tokens, write, copied)
    cases = [(name, block, sparsity, GOALS.get(tokens, {}).get(name)) for name, block in PATTERNS.items()]
    if tokens == 1:
        cases.append(("single weights", 1, LESS_SPARSE, LESS_GOAL))
    for name, block, zeros, goal in cases:
        plain = {shape: DenseLinear(sparse_weight(*shape, block, zeros), None) for shape in SHAPES}
        kernels = {s: choice.choose(layer, (tokens, s[0]), DTYPE, "sparse")[0] for s, layer in plain.items()}
        ours = {s: layer if kernels[s] is None else choice.build(layer, kernels[s]) for s, layer in plain.items()}  # type: ignore[arg-type]
        layers, times, size = rotated(ours)
        least = graph_seconds(layers, tokens, lambda layer, x: layer(x)) / times
        write("layers", tokens, f"{name}, {zeros:.0%}", least, size, base / least, least * copied / size)
        told = "" if goal is None else f"goal {goal}: {'met' if base / least >= goal else 'MISSED'}; "
        print(f"    {told}{'; '.join(f'{a}→{b} {kernel}' for (a, b), kernel in kernels.items())}", flush=True)
        if block == 1 and zeros == sparsity:
            rows = {shape: Csr(layer.weight.to_sparse_csr()) for shape, layer in plain.items()}
            held = sum(rows[s].weight.values().nbytes + 4 * len(rows[s].weight.values()) for s in SHAPES)
            try:
                csr = graph_seconds([rows[shape] for shape in SHAPES], tokens, lambda layer, x: layer(x))
                write("layers", tokens, "torch CSR", csr, held, base / csr, csr * copied / held)
            except RuntimeError as error:
                print(f"  torch CSR: failed: {str(error)[:200]}", flush=True)


def bench_host(write: Write) -> None:
    """What a call takes the host: 300 behind each other, not waited for; the least of five times."""
    one, many = (torch.randn(n, 1024, device="cuda", dtype=DTYPE) for n in (1, 256))
    layers: dict[str, tuple[nn.Module, Tensor]] = {"F.linear": (Plain(sparse_weight(1024, 1024, 1, 0.0)), one)}
    for name, block in PATTERNS.items():
        layer = DenseLinear(sparse_weight(1024, 1024, block, 0.9), None)
        for tokens, x in ((1, one), (16, many[:16])):
            kernel, _ = choice.choose(layer, (tokens, 1024), DTYPE, "sparse")
            if kernel is not None:
                layers[f"{name}, {tokens} tokens"] = choice.build(layer, kernel), x
    blocks = sparse_weight(1024, 1024, 64, 0.9)
    for loads in ("tma", "async"):
        layers[f"tiles, {loads}"] = TileLinear(blocks, None, Tiling(64, 64, 64, 64), Launch(128, 4, 2, 64, loads)), many
    for name, (run, x) in layers.items():
        least = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(300):
                run(x)
            least = min(least, (time.perf_counter() - start) / 300)
        write("host", len(x), name, least, 0, float("nan"), float("nan"))
        print(
            f"    {1e6 * least:.1f} µs, goal {HOST_GOAL:g}: {'met' if 1e6 * least <= HOST_GOAL else 'MISSED'}",
            flush=True,
        )


# ---------------------------------------------------------------------- a decoder


@torch.inference_mode()
def decode(model: Llama, prompt: Tensor, length: int) -> tuple[list[int], float]:
    """The likeliest tokens after the prompt, and the seconds of one step in a CUDA graph."""
    count = len(prompt)
    cache = model.cache(-(-(count + length) // 64) * 64)
    token = model(prompt, cache).argmax(-1)
    position, found = torch.tensor([count], device=prompt.device), [int(token)]
    step = choice.graph_of(functools.partial(model.one, token, position, cache))
    for _ in range(length - 1):
        token.copy_(step().argmax(-1))
        position += 1
        found.append(int(token))
    position.fill_(count)
    return found, seconds(step, 3, 15)[0]


@torch.inference_mode()
def bench_decoder(sparsity: float, write: Write, context: int = 512, length: int = 32) -> None:
    torch.manual_seed(0)
    plain = Llama(4096, 11008, 32, 8, 32000, 4096).to(DTYPE).cuda().eval()
    prompt, long = (torch.randint(32000, (n,), device="cuda") for n in (context, 4096))
    for name, block in PATTERNS.items():
        model = copy.deepcopy(plain)
        prune(model, sparsity, pattern=Block(block, block) if block > 1 else None, budget="uniform", include="blocks.*")
        fast = accelerate(model, example_inputs=(long,), tokens=(1,))
        expected, base = decode(model, prompt, length)
        got, least = decode(fast, prompt, length)
        held = sum(t.nbytes for t in fast.state_dict().values())
        write(
            "decoder", 1, f"dense, {name}", base, sum(t.nbytes for t in model.state_dict().values()), 1.0, float("nan")
        )
        write("decoder", 1, name, least, held, base / least, float("nan"))
        same, goal = sum(a == b for a, b in zip(expected, got, strict=True)), DECODER_GOALS[name]
        told = f"goal {goal}: {'met' if base / least >= goal else 'MISSED'}; the same token at {same} of {length}"
        print(f"    {told}; {'; '.join(str(e.kernel) for e in explain(fast) if 'blocks.0.' in e.layer)}", flush=True)
        reads = [[seconds(functools.partial(m, long), 1, 5)[0] for m in (model, fast)] for _ in range(3)]  # in turns
        dense, ours = map(min, zip(*reads, strict=True))
        write("prefill", 4096, name, ours, held, dense / ours, float("nan"))
        del model, fast


@torch.inference_mode()
def bench(parts: list[str], tokens: list[int], sparsity: float, write: Write) -> None:
    """The parts of `PARTS` that are asked for."""
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: there is no CUDA device here")
    if "layers" in parts:
        for count in tokens:
            bench_layers(count, sparsity, write)
    if "host" in parts:
        bench_host(write)
    if "decoder" in parts:
        bench_decoder(sparsity, write)
