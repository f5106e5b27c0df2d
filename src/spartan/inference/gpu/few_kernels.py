"""Multiplies one to 64 tokens by a sparse weight, in Triton, reading of the weight only what is kept (see `few.py`).

With so few tokens the time is that of reading the weight, and there are not outputs enough to keep the device busy: the
inputs of a group of outputs are shared among SPLIT programs. Alone, a program adds the bias and the activation; of
several, each writes its sums in float32, and `finish_kernel` adds them up.
"""

# Triton compiles the source below; its types are its own.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs

import triton
import triton.language as tl

from spartan.inference.gpu.kernel import activate, put


@triton.jit(do_not_specialize=["M"])
def scatter_kernel(
    x, values, columns, rows, starts, bias, y, M, N, stride_token, stride_input,
    TT: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, SPLIT: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """TT tokens by the single weights of BN rows: SLOTS weights of each row at a time."""
    group, share = tl.program_id(0), tl.program_id(1)
    rt = tl.program_id(2) * TT + tl.arange(0, TT)
    rs = tl.arange(0, SLOTS)
    rn = tl.arange(0, BN)
    begin = tl.load(starts + group)
    end = tl.load(starts + group + 1)
    each = (((end - begin + SLOTS - 1) // SLOTS + SPLIT - 1) // SPLIT) * SLOTS
    first = begin + share * each
    end = tl.minimum(end, first + each)
    acc = tl.zeros((SLOTS, BN, TT), tl.float32)
    for slot in range(first, end, SLOTS):
        at = (slot + rs).to(tl.int64)[:, None] * BN + rn[None, :]
        inside = ((slot + rs) < end)[:, None] & (rn >= 0)[None, :]
        w = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        column = tl.load(columns + at, mask=inside, other=0).to(tl.int32)
        # What only fills a row up is not multiplied: a NaN reaches no output but those that use it.
        mask = (w != 0.0)[:, :, None] & (rt < M)[None, None, :]
        xs = tl.load(x + column[:, :, None] * stride_input + rt[None, None, :] * stride_token, mask=mask, other=0.0)
        acc += w[:, :, None] * xs.to(tl.float32)
    z = tl.sum(acc, 0)
    on = tl.load(rows + group * BN + rn)
    keep = (on < N)[:, None] & (rt < M)[None, :]
    at = rt.to(tl.int64)[None, :] * N + on[:, None]
    if SPLIT == 1:
        z = activate(z + tl.load(bias + on, mask=on < N, other=0.0)[:, None], ACT)
        tl.store(y + at, z.to(y.dtype.element_ty), mask=keep)
    else:
        tl.store(y + share.to(tl.int64) * M * N + at, z, mask=keep)


@triton.jit(do_not_specialize=["M", "chunks"])
def split_tile_kernel(
    x, w, bias, ins, outs, starts, y, M, K, N, stride_x, chunks,
    TM: tl.constexpr, BN: tl.constexpr, KK: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, SPLIT: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """TM tokens by a share of the tiles of one group of outputs; each chunk of the tiles is one group."""
    group, share = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * TM
    rm = first + tl.arange(0, TM)
    rk = tl.arange(0, KK)
    rn = tl.arange(0, BN)
    inside = rm < M
    # Groups without a tile come after the chunks.
    begin = tl.load(starts + tl.minimum(group, chunks))
    end = tl.load(starts + tl.minimum(group + 1, chunks))
    each = (end - begin + SPLIT - 1) // SPLIT
    low = begin + share * each
    acc = tl.zeros((TM, BN), tl.float32)
    tiles = w + low.to(tl.int64) * (KK * BN) + rk[:, None] * BN + rn[None, :]
    for step in range(low, tl.minimum(end, low + each)):
        if Q == KK:  # noqa: SIM108 (a condition for the compiler)
            column = tl.load(ins + step) * Q + rk
        else:
            column = tl.load(ins + step * (KK // Q) + rk // Q) * Q + rk % Q
        # A column at K or beyond fills a step up, or lies beyond the last input; its weights are zero.
        a = tl.load(
            x + rm.to(tl.int64)[:, None] * stride_x + column[None, :],
            mask=inside[:, None] & (column < K)[None, :],
            other=0.0,
        )
        b = tl.load(tiles)
        tiles += KK * BN
        if WIDEN:  # Triton's interpreter multiplies the bits of bfloat16
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if SPLIT == 1:
        put(y, acc, bias, outs, group, first, rm, rn, inside, N, N, ACT, BN, P, False)
    else:
        on = tl.load(outs + group * (BN // P) + rn // P) * P + rn % P
        at = y + (share.to(tl.int64) * M + rm)[:, None] * N + on[None, :]
        tl.store(at, acc, mask=inside[:, None] & (on < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def finish_kernel(sums, bias, y, M, N, SPLIT: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """act(sum over the shares + b) of one token's BLOCK outputs."""
    on = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * N + on
    z = tl.load(bias + on, mask=on < N, other=0.0)
    source = at
    for _ in range(SPLIT):
        z += tl.load(sums + source, mask=on < N, other=0.0)
        source += M * N
    tl.store(y + at, activate(z, ACT).to(y.dtype.element_ty), mask=on < N)
