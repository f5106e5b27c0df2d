"""Multiplies by a tiled weight, in Triton (see `tiles.py` for what is stored).

A program takes TM tokens and one chunk of the outputs' groups. It walks the chunk's steps in one flat loop, whatever
the number of steps of each group, so that the next tiles are on their way while a group's outputs are written: with 90%
zeros a group of 64 outputs of 768 inputs has but one or two steps, and a loop for each would wait for memory most of
the time.
"""

# Triton compiles the source below; its types are its own.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs

import triton
import triton.language as tl


@triton.jit
def activate(z, ACT: tl.constexpr):
    """The activation, in float32. NaN stays NaN."""
    if ACT == "relu":
        z = tl.where(z < 0.0, 0.0, z)
    elif ACT == "gelu":
        # z Φ(z), with Φ(−|z|) = 2^(r(|z|) − z²/2 · log₂e): erf would take as long as the product. r is a fit on [0, 5],
        # to 4e-6 of Φ.
        s = tl.minimum(tl.abs(z), 5.0)
        r = ((6.09706691e-05 - 1.78361305e-06 * s) * s - 0.000928166063) * s + 0.00850680171
        r = (((r * s - 0.0539705566) * s + 0.262902045) * s - 1.15125994) * s - 0.999994711
        tail = tl.exp2(r - 0.7213475204444817 * z * z)
        z = z * tl.where(z < 0.0, tail, 1.0 - tail)
    elif ACT == "gelu_tanh":
        # ½(1 + tanh u) = σ(2u)
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACT == "silu":
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def put(
    y, z, bias, outs, group, first, rm, rn, inside, N, stride,
    ACT: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    """act(z + b) into the outputs of a group; with TMA_OUT these lie together, and y is a descriptor."""
    if P == BN:
        begin = tl.load(outs + group) * P
        on = begin + rn
    else:
        on = tl.load(outs + group * (BN // P) + rn // P) * P + rn % P
    b = tl.load(bias + on, mask=on < N, other=0.0).to(tl.float32)
    z = activate(z + b[None, :], ACT)
    if TMA_OUT:
        y.store([first, begin], z.to(y.dtype))
    else:
        at = y + rm.to(tl.int64)[:, None] * stride + on[None, :]
        tl.store(at, z.to(y.dtype.element_ty), mask=inside[:, None] & (on < N)[None, :])


# These numbers differ from layer to layer and batch to batch, and the code gains nothing from knowing them.
@triton.jit(do_not_specialize=["M", "chunks", "groups", "empties"])
def tile_linear_kernel(
    x, w, bias, ins, last, outs, starts, y, M, K, N, stride_x, stride_y, chunks, groups, empties,
    TM: tl.constexpr, BN: tl.constexpr, KK: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr, CACHE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """y = act(x Wᵀ + b) for TM tokens and the groups of one chunk; with TMA x and w are descriptors."""
    chunk = tl.program_id(0) % chunks  # neighbours read the same tokens: from the second on they find them in L2
    first = tl.program_id(0) // chunks * TM
    rm = first + tl.arange(0, TM)
    rk = tl.arange(0, KK)
    rn = tl.arange(0, BN)
    inside = rm < M
    acc = tl.zeros((TM, BN), tl.float32)
    if not TMA:
        rows = x + rm.to(tl.int64)[:, None] * stride_x
        tiles = w + tl.load(starts + chunk).to(tl.int64) * (KK * BN) + rk[:, None] * BN + rn[None, :]
    step = tl.load(starts + chunk)
    # The next step's places are read one step ahead. (Read where they are needed, Triton takes them as a first link of
    # the pipeline and halves the number of tiles on their way.)
    if Q == KK:  # noqa: SIM108 (a condition for the compiler)
        part = tl.load(ins + step)
    else:
        part = tl.load(ins + step * (KK // Q) + rk // Q)
    group = tl.load(last + step)
    for ahead in range(step + 1, tl.load(starts + chunk + 1) + 1):
        if Q == KK:
            begin = part * Q
            column = begin + rk
            part = tl.load(ins + ahead)
        else:
            column = part * Q + rk % Q
            part = tl.load(ins + ahead * (KK // Q) + rk // Q)
        if TMA:
            a = x.load([first, begin])
            b = w.load([(ahead - 1) * KK, 0])
        else:
            # A column at K or beyond fills a step up, or lies beyond the last input; its weights are zero.
            a = tl.load(
                rows + column[None, :], inside[:, None] & (column < K)[None, :], other=0.0, cache_modifier=CACHE
            )
            b = tl.load(tiles)
            tiles += KK * BN
        if WIDEN:  # Triton's interpreter multiplies the bits of bfloat16
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if group >= 0:
            put(y, acc, bias, outs, group, first, rm, rn, inside, N, stride_y, ACT, BN, P, TMA_OUT)
            acc = tl.zeros((TM, BN), tl.float32)
        group = tl.load(last + ahead)
    # Groups without a step come last; their outputs are act(b).
    for group in range(groups - empties + chunk, groups, chunks):
        acc = tl.zeros((TM, BN), tl.float32)
        put(y, acc, bias, outs, group, first, rm, rn, inside, N, stride_y, ACT, BN, P, TMA_OUT)
