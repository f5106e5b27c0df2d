"""The GPU part of bench_decode.py (`--device cuda`): bfloat16, one device.

First the seven linear layers of a block at 1 and 16 tokens, replayed from a CUDA graph that goes through three copies of all
weights, more than any cache holds. Ours runs, layer by layer, the kernel that the choice of `accelerate` would time as the
fastest. Beside it torch's CSR product, and the floor: the kept bytes at the speed of a device copy.

Then a Llama-shaped decoder of such blocks with a cache of fixed size, one step in a CUDA graph: dense, and as `accelerate`
makes it with `tokens=(1,)`. The greedy tokens of both are compared, and the time to read 4,096 tokens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from inference_gpu import limits, seconds
from torch import Tensor, nn

from spartan import Block, prune
from spartan.inference.convert import accelerate, explain
from spartan.inference.gpu import choice
from spartan.inference.runtime import DenseLinear

DTYPE, COPIES = torch.bfloat16, 3
SHAPES = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]  # inputs, outputs
Write = Callable[[str, int, str, float, int, float, float], None]


def sparse_weight(inputs: int, outputs: int, block: int, sparsity: float) -> Tensor:
    keep = torch.rand(-(-outputs // block), -(-inputs // block), device="cuda") >= sparsity
    mask = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:outputs, :inputs]
    return torch.randn(outputs, inputs, device="cuda", dtype=DTYPE) * mask


def graph_seconds(layers: list[nn.Module], tokens: int) -> float:
    """Seconds of one pass through layers, replayed."""
    inputs = {n: torch.randn(tokens, n, device="cuda", dtype=DTYPE) for n in {n for n, _ in SHAPES}}
    sizes = [inputs_of(layer) for layer in layers]

    def run() -> Tensor:
        return [layer(inputs[size]) for layer, size in zip(layers, sizes, strict=True)][-1]

    return seconds(choice.graph_of(run), 1, 15)[0]


def inputs_of(layer: nn.Module) -> int:
    return int(layer.weight.shape[1] if isinstance(layer, DenseLinear) else layer.inputs)  # type: ignore[arg-type]


class Csr(nn.Module):
    """torch's product with a CSR weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.inputs, self.weight = weight.shape[1], weight.to_sparse_csr()

    def forward(self, x: Tensor) -> Tensor:
        """The weight times the tokens, as columns."""
        return self.weight @ x.t()


def best_kernel(weight: Tensor, tokens: int) -> choice.DeviceKernel | str | None:
    layer = DenseLinear(weight, None)
    return choice.choose(layer, (tokens, weight.shape[1]), DTYPE, "sparse")[0]


def bench_layers(tokens: int, sparsity: float, write: Write) -> None:
    copied, _ = limits()
    dense = [DenseLinear(sparse_weight(*shape, 1, 0.0), None) for _ in range(COPIES) for shape in SHAPES]
    total = sum(layer.weight.nbytes for layer in dense) // COPIES
    base = graph_seconds([*dense], tokens) / COPIES
    write("layers", tokens, "dense, in a graph", base, total, 1.0, base * copied / total)
    del dense
    for name, block in (("64×64 blocks", 64), ("16×16 blocks", 16), ("single weights", 1)):
        weights = [sparse_weight(*shape, block, sparsity) for shape in SHAPES]
        kernels = {shape: best_kernel(weight, tokens) for shape, weight in zip(SHAPES, weights, strict=True)}
        layers: list[nn.Module] = []
        for _ in range(COPIES):
            for shape in SHAPES:
                plain, kernel = DenseLinear(sparse_weight(*shape, block, sparsity), None), kernels[shape]
                layers.append(plain if kernel is None else choice.build(plain, kernel))
        held = sum(buffer.nbytes for layer in layers for buffer in layer.buffers()) // COPIES
        least = graph_seconds(layers, tokens) / COPIES
        write("layers", tokens, f"{name}, {sparsity:.0%}", least, held, base / least, least * copied / held)
        for shape, kernel in kernels.items():
            print(f"    {shape[0]}→{shape[1]}: {kernel or 'dense'}", flush=True)
        if block == 1:
            try:
                rows: list[nn.Module] = [Csr(weight) for weight in weights]
                csr = graph_seconds(rows, tokens)
                write("layers", tokens, "torch CSR", csr, held, base / csr, csr * copied / held)
            except RuntimeError as error:
                print(f"  torch CSR: failed: {str(error)[:200]}", flush=True)


# ---------------------------------------------------------------------- a decoder


class LlamaBlock(nn.Module):
    """Attention and SwiGLU around shortcuts, with a cache of fixed size."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, turn: Tensor, at: Tensor, cache: Tensor | None) -> Tensor:
        """Positions `at`; keys and values go into the cache, if any: [2, batch, heads, positions, width of a head]."""
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, turn[at]), rotate(k, turn[at])
        if cache is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            cache[0].index_copy_(2, at, k)
            cache[1].index_copy_(2, at, v)
            seen = torch.arange(cache.shape[3], device=x.device)[None] <= at[:, None]
            mixed = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions; `turn` holds cosines and sines [positions, 2, half a head]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = turn[:, 0], turn[:, 1]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Llama(nn.Module):
    """A decoder of Llama's shape; its caches are made by the caller."""

    def __init__(self, width: int, inner: int, heads: int, blocks: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(width, inner, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        half = width // heads // 2
        angle = torch.arange(context)[:, None] / 10000 ** (torch.arange(half) / half)
        self.register_buffer("turn", torch.stack((angle.cos(), angle.sin()), 1))
        self.sizes = (blocks, 2, 1, heads, context, width // heads)

    def cache(self) -> Tensor:
        """An empty cache for one sequence."""
        weight = self.tokens.weight
        return torch.zeros(self.sizes, dtype=weight.dtype, device=weight.device)

    def forward(self, tokens: Tensor, at: Tensor, cache: Tensor | None = None) -> Tensor:
        """Scores of what comes after the last of the tokens, which stand at positions `at`."""
        x = self.tokens(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, self.turn, at, None if cache is None else cache[i])
        return self.head(self.norm(x[:, -1:]))


@torch.inference_mode()
def decode(model: Llama, prompt: Tensor, length: int) -> tuple[list[int], float]:
    """The likeliest tokens after the prompt, and the seconds of one step (on a GPU in a CUDA graph)."""
    cache, at = model.cache(), torch.arange(prompt.shape[1], device=prompt.device)
    token = model(prompt, at, cache).argmax(-1)
    position, found = at[-1:] + 1, [int(token)]
    step: Callable[[], Tensor] = functools.partial(model, token, position, cache)
    if prompt.is_cuda:
        step = choice.graph_of(step)
    for _ in range(length - 1):
        token.copy_(step().argmax(-1))
        position += 1
        found.append(int(token))
    return found, seconds(step, 3, 9)[0] if prompt.is_cuda else float("nan")


@torch.inference_mode()
def bench_decoder(sparsity: float, write: Write, context: int = 512, length: int = 32) -> None:
    torch.manual_seed(0)
    plain = Llama(4096, 11008, 32, 8, 32000, 4096).to(DTYPE).cuda().eval()
    prompt = torch.randint(32000, (1, context), device="cuda")
    long, places = torch.randint(32000, (1, 4096), device="cuda"), torch.arange(4096, device="cuda")
    for name, block in (("64×64 blocks", 64), ("16×16 blocks", 16), ("single weights", 1)):
        model = copy.deepcopy(plain)
        pattern = Block(block, block) if block > 1 else None
        prune(model, sparsity, pattern=pattern, budget="uniform", include="blocks.*")
        fast = accelerate(model, "sparse", example_inputs=(long, places), tokens=(1,))
        expected, base = decode(model, prompt, length)
        got, least = decode(fast, prompt, length)
        held = sum(t.nbytes for t in fast.state_dict().values())
        write("decoder", 1, f"dense, {name}", base, 0, 1.0, float("nan"))
        write("decoder", 1, name, least, held, base / least, float("nan"))
        same = sum(a == b for a, b in zip(expected, got, strict=True))
        print(f"    the same token at {same} of {length}; {explain(fast)[0]}", flush=True)
        dense, ours = (seconds(functools.partial(m, long, places), 1, 5)[0] for m in (model, fast))
        write("prefill", 4096, name, ours, held, dense / ours, float("nan"))


@torch.inference_mode()
def bench(tokens: list[int], sparsity: float, write: Write) -> None:
    """Everything, the layers first."""
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: there is no CUDA device here")
    for count in tokens:
        bench_layers(count, sparsity, write)
    bench_decoder(sparsity, write)
