"""A decoder of Llama's shape for decode_gpu.py, written so that little but its linear layers takes time at one token.

Queries, keys and values are one linear layer, gate and up another, as in engines made for decoding. At one token, norms with
the sum before them, rotary attention with its cache, and SwiGLU are one Triton kernel each, the same for every contender.
Each lets the next one begin at once, and waits for all that was written before it reads. A prompt goes through torch's own
operators.
"""

# Triton compiles the source below; its types are its own.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra import cuda as tlc

EPSILON = 1e-6


@triton.jit
def add_norm_kernel(x, more, weight, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """x += more, in place; y = x / root mean square · weight."""
    tlc.gdc_launch_dependents()
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    scales = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tlc.gdc_wait()
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v = (v + tl.load(more + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + at, v, mask=inside)
        v = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + 1e-6)
    tl.store(y + at, (v * scale * scales).to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(both, y, SIZE, BLOCK: tl.constexpr):
    """silu(first half) · second half."""
    tlc.gdc_launch_dependents()
    tlc.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(both + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    tl.store(y + at, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=at < SIZE)


@triton.jit
def attention_kernel(
    qkv, turn, position, keys, values, parts, arrived, y, length,
    HEADS: tl.constexpr, HALF: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """One head of one token, attending to BLOCK positions of the cache; the first program puts its key and value there.

    Each writes the weighted sum of values, the greatest score and the sum of weights, [heads, COUNT, 2 · HALF + 2]; the last
    one of a head makes its output of them. What earlier tokens left in the cache is read before the kernel ahead is done:
    between two tokens everything waits for everything.
    """
    tlc.gdc_launch_dependents()
    head, part = tl.program_id(0), tl.program_id(1)
    width = 2 * HALF
    at = tl.load(position).to(tl.int32)
    rh, rw, rt = tl.arange(0, HALF), tl.arange(0, 2 * HALF), tl.arange(0, BLOCK)
    cos = tl.load(turn + at * width + rh)
    sin = tl.load(turn + at * width + HALF + rh)
    cached = (head * length).to(tl.int64) * width
    t = part * BLOCK + rt
    inside = (t < at)[:, None]
    row = cached + t[:, None] * width
    a = tl.load(keys + row + rh[None, :], mask=inside, other=0.0)
    b = tl.load(keys + row + HALF + rh[None, :], mask=inside, other=0.0)
    z = tl.load(values + row + rw[None, :], mask=inside, other=0.0)
    tlc.gdc_wait()
    mine = qkv + head * width
    q0 = tl.load(mine + rh).to(tl.float32)
    q1 = tl.load(mine + HALF + rh).to(tl.float32)
    kind = qkv.dtype.element_ty
    q0, q1 = (q0 * cos - q1 * sin).to(kind).to(tl.float32), (q1 * cos + q0 * sin).to(kind).to(tl.float32)
    product = a.to(tl.float32) * q0[None, :] + b.to(tl.float32) * q1[None, :]
    score = tl.where(t < at, tl.sum(product, 1) * SCALE, float("-inf"))
    most = tl.maximum(tl.max(score, 0), -1e30)
    weight = tl.exp(score - most)
    acc = tl.sum(weight[:, None] * z.to(tl.float32), 0)
    total = tl.sum(weight, 0)
    if part == 0:  # and to itself
        k0 = tl.load(mine + HEADS * width + rh).to(tl.float32)
        k1 = tl.load(mine + HEADS * width + HALF + rh).to(tl.float32)
        v = tl.load(mine + 2 * HEADS * width + rw)
        k0, k1 = (k0 * cos - k1 * sin).to(kind), (k1 * cos + k0 * sin).to(kind)
        tl.store(keys + cached + at * width + rh, k0)
        tl.store(keys + cached + at * width + HALF + rh, k1)
        tl.store(values + cached + at * width + rw, v)
        own = tl.sum(q0 * k0.to(tl.float32) + q1 * k1.to(tl.float32), 0) * SCALE
        high = tl.maximum(most, own)
        fade, one = tl.exp(most - high), tl.exp(own - high)
        acc = acc * fade + one * v.to(tl.float32)
        total = total * fade + one
        most = high
    to = parts + (head * COUNT + part) * (width + 2)
    tl.store(to + rw, acc)
    tl.store(to + width, most)
    tl.store(to + width + 1, total)
    tl.debug_barrier()
    if tl.atomic_add(arrived + head, 1) == COUNT - 1:
        tl.store(arrived + head, 0)
        rp = tl.arange(0, ROOM)
        every = parts + (head * COUNT + rp) * (width + 2)
        highs = tl.load(every + width, mask=rp < COUNT, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(every + width + 1, mask=rp < COUNT, other=0.0, cache_modifier=".cg")
        accs = tl.load(every[:, None] + rw[None, :], mask=(rp < COUNT)[:, None], other=0.0, cache_modifier=".cg")
        fades = tl.exp(highs - tl.max(highs, 0))
        tl.store(y + head * width + rw, (tl.sum(accs * fades[:, None], 0) / tl.sum(fades * sums, 0)).to(kind))


def attend(qkv: Tensor, turn: Tensor, position: Tensor, cache: Tensor, arrived: Tensor) -> Tensor:
    """One token's attention, [1, width]; `arrived` is a zero for each head."""
    heads, length = len(arrived), cache.shape[2]
    width = qkv.shape[-1] // 3 // heads
    count, y = triton.cdiv(length, 64), qkv.new_empty(1, heads * width)
    parts = torch.empty(heads * count * (width + 2), device=qkv.device)
    attention_kernel[(heads, count)](
        *(qkv, turn, position, cache[0], cache[1], parts, arrived, y, length),
        *(heads, width // 2, width**-0.5, 64, count, triton.next_power_of_2(count)),
        num_warps=4,
        launch_pdl=True,
    )
    return y


def add_norm(x: Tensor, more: Tensor | None, weight: Tensor) -> Tensor:
    """The norm of x + more, which is put into x."""
    y, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    add_norm_kernel[(1,)](
        x, x if more is None else more, weight, y, width, block, more is not None, num_warps=16, launch_pdl=True
    )
    return y


class LlamaBlock(nn.Module):
    """Attention and SwiGLU around shortcuts; `cache` is [2, heads, positions, width of a head]."""

    arrived: Tensor

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("arrived", torch.zeros(heads, dtype=torch.int32), persistent=False)
        self.norm1, self.norm2 = nn.RMSNorm(width, EPSILON), nn.RMSNorm(width, EPSILON)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.both, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def one(self, x: Tensor, more: Tensor | None, turn: Tensor, position: Tensor, cache: Tensor) -> Tensor:
        """One token [1, width], to which `more` is still to be added; what is to be added after it."""
        qkv = self.qkv(add_norm(x, more, self.norm1.weight))
        mixed = attend(qkv, turn, position, cache, self.arrived)
        both = self.both(add_norm(x, self.o(mixed), self.norm2.weight))
        inner = both.shape[-1] // 2
        gated = x.new_empty(1, inner)
        swiglu_kernel[(triton.cdiv(inner, 512),)](both, gated, inner, 512, num_warps=4, launch_pdl=True)
        out: Tensor = self.down(gated)
        return out

    def forward(self, x: Tensor, turn: Tensor, cache: Tensor | None) -> Tensor:
        """A prompt [tokens, width]; its keys and values go into the cache, if any."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        q, k = rotate(q, turn[: len(x)]), rotate(k, turn[: len(x)])
        if cache is not None:
            cache[0, :, : len(x)], cache[1, :, : len(x)] = k, v
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + self.o(mixed.transpose(0, 1).flatten(1))
        gate, up = self.both(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions; `turn` holds cosines and sines [positions, 2, half a head]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = turn[:, 0], turn[:, 1]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Llama(nn.Module):
    """A decoder of Llama's shape.

    Weights are random; the head is the embedding with its rows in another order, so that one token is likelier than the
    others by as much as in a trained model, not by as little as rounding.
    """

    turn: Tensor

    def __init__(self, width: int, inner: int, heads: int, blocks: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(self.tokens.weight[torch.randperm(vocabulary)] / width**0.5)
        self.blocks = nn.ModuleList(LlamaBlock(width, inner, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, EPSILON)
        half = width // heads // 2
        angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(half) / half)
        self.register_buffer("turn", torch.stack((angle.cos(), angle.sin()), 1), persistent=False)
        self.sizes = (blocks, 2, heads, positions, width // heads)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.turn = self.turn.float()  # positions are no matter of the model's type
        return self

    def cache(self, positions: int) -> Tensor:
        """An empty cache for one sequence."""
        blocks, two, heads, _, width = self.sizes
        weight = self.tokens.weight
        return torch.zeros(blocks, two, heads, positions, width, dtype=weight.dtype, device=weight.device)

    def forward(self, tokens: Tensor, cache: Tensor | None = None) -> Tensor:
        """Scores of what comes after a prompt [tokens], which is read at once."""
        x = self.tokens(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, self.turn, None if cache is None else cache[i])
        out: Tensor = self.head(self.norm(x[-1:]))
        return out

    def one(self, token: Tensor, position: Tensor, cache: Tensor) -> Tensor:
        """Scores of what comes after one token [1] at a position [1]."""
        x: Tensor = self.tokens(token)
        more: Tensor | None = None
        for i, block in enumerate(self.blocks):
            more = block.one(x, more, self.turn, position, cache[i])  # type: ignore[operator]
        out: Tensor = self.head(add_norm(x, more, self.norm.weight))
        return out
