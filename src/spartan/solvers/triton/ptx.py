"""Instructions of NVIDIA's GPUs that a pass spends most of its time in; elsewhere, and in the interpreter, plain Triton.

A pass over the values is to take as long as reading them. With Triton's own sigmoid and masked atomics it has more
instructions than there is time for.
"""

import torch
import triton
import triton.language as tl

INLINE = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

LOG2E = tl.constexpr(1.4426950408889634)

# 1/(1 + 2^x), each instruction exact to about one unit in the last place.
LOGISTIC = tl.constexpr("ex2.approx.ftz.f32 $0, $1; add.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;")

# Four places at a time: most threads have none within the span, and are done when they know the least of theirs. Where
# millions of keys are equal, additions to one bin would wait for each other: the first thread of a warp adds for all
# threads that have the same bin. That takes a while, so it is done where several have one within the span.
_PACK, _SEVERAL = 4, 4
_OUT, _PLACE, _SPAN, _SHIFT, _COUNTS = (range(i * _PACK, (i + 1) * _PACK) for i in range(5))
_LEAST = "".join(f"min.u32 t, t, ${i}; " for i in _PLACE[1:])
_EACH = "".join(
    f"setp.le.u32 p, ${i}, ${_SPAN[0]}; shr.u32 t, ${i}, ${_SHIFT[0]}; mad.wide.u32 a, t, 4, ${_COUNTS[0]}; mov.b32 n, 1; "
    f"vote.sync.ballot.b32 m, p, w; popc.b32 l, m; setp.lt.u32 q, l, {_SEVERAL}; @q bra ADD{i}; "
    "match.any.sync.b32 l, t, w; and.b32 m, m, l; popc.b32 n, m; mov.u32 l, %lanemask_lt; and.b32 l, l, m; "
    f"setp.eq.and.u32 p, l, 0, p; ADD{i}: @p red.relaxed.gpu.global.add.u32 [a], n; "
    for i in _PLACE
)
PACK = tl.constexpr(_PACK)
COUNT = tl.constexpr(
    "{ .reg .pred p; .reg .pred q; .reg .b32 t; .reg .b32 w; .reg .b32 m; .reg .b32 n; .reg .b32 l; .reg .b64 a; "
    f"mov.b32 t, ${_PLACE[0]}; {_LEAST}setp.gt.u32 p, t, ${_SPAN[0]}; @p bra NONE; activemask.b32 w; {_EACH}"
    f"NONE: {''.join(f'mov.b32 ${i}, 0; ' for i in _OUT)}}}"
)
COUNT_TYPES = tl.constexpr(",".join(["=r"] * _PACK + ["r"] * 3 * _PACK + ["l"] * _PACK))


@triton.jit
def logistic(x):
    """1/(1 + 2^x), the sigmoid of −x·ln 2."""
    if INLINE and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(LOGISTIC, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / (1.0 + tl.exp2(x))


@triton.jit
def log_of_one_plus(y):
    """log(1 + y) for y > −1, without loss where y is small."""
    t = y / (2.0 + y)
    t2 = t * t
    near = 2.0 * t * (1.0 + t2 * (1.0 / 3.0 + t2 * (1.0 / 5.0)))
    return tl.where(tl.abs(t) < 0.1, near, tl.log(1.0 + y))


@triton.jit
def count_places(counts, place, span, shift):
    """Add 1 to the bin place >> shift, for each place up to the span; sums of whole numbers have no order."""
    if INLINE:
        tl.inline_asm_elementwise(
            COUNT, COUNT_TYPES, [place, span, shift, counts.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=PACK
        )
    else:
        tl.atomic_add(counts + (place >> shift).to(tl.int32), 1, mask=place <= span, sem="relaxed")
