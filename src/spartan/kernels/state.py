"""What is known of a top-k, on the device: its numbers by place, and floats as keys that sort as they do."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual

NARROWED = tl.constexpr(11)
BINS = tl.constexpr(1 << 11)
KEY_BITS = 32
# Around the last threshold a pass first looks at 2²⁰ keys, ±6%: two passes to the exact one.
WINDOW = tl.constexpr(1 << 19)

# The state of a top-k: floats …
K = tl.constexpr(0)  # what may be kept, in cost, with the slack for rounding
SOFT_K = tl.constexpr(1)  # the same without
TOTAL = tl.constexpr(2)  # C, the cost of everything
GOAL = tl.constexpr(3)  # logit(k/C)
BETA = tl.constexpr(4)
ORIGIN = tl.constexpr(5)  # z = β(u − ORIGIN) + S
S = tl.constexpr(6)
LEAST = tl.constexpr(7)  # the root S lies between these
MOST = tl.constexpr(8)
CENTER = tl.constexpr(9)  # the same line, written from a number near τ
OFFSET = tl.constexpr(10)
RESIDUAL = tl.constexpr(11)
VALUE = tl.constexpr(12)  # the threshold
COST = tl.constexpr(13)  # of what is kept
ROOM = tl.constexpr(14)  # what is left for units equal to the threshold
LAST_BETA = tl.constexpr(15)
FLOATS = 16
# … and integers.
LOW = tl.constexpr(0)  # keys from LOW to HIGH are looked at, in bins of 2^SHIFT
HIGH = tl.constexpr(1)
SHIFT = tl.constexpr(2)
HARD_DONE = tl.constexpr(3)
SOFT_DONE = tl.constexpr(4)
PASSES = tl.constexpr(5)
CUT = tl.constexpr(6)
TIES = tl.constexpr(7)  # whether some, not all, of the units equal to the threshold fit
WAITS = tl.constexpr(8)  # the soft mask waits for the threshold, to start from it
FRESH = tl.constexpr(9)  # the bracket of the root is not set yet
JUMPED = tl.constexpr(10)  # the root was already sought at the threshold
SOLVED = tl.constexpr(11)  # a top-k has been found before: start from it
INTS = 12


@triton.jit
def key_of(u):
    """A float32's bits as an unsigned number that sorts as the float does."""
    bits = u.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def float_of(key):
    """The float32 of a key."""
    low = key.to(tl.uint32)
    bits = tl.where(low >= 2147483648, low ^ 2147483648, low ^ 4294967295).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def look_at(ints, low, high):
    """The next pass counts the keys from low to high."""
    shift = low * 0
    while (tl.full((), 1, tl.int64) << (shift + NARROWED)) < high - low + 1:
        shift += 1
    tl.store(ints + LOW, low)
    tl.store(ints + HIGH, high)
    tl.store(ints + SHIFT, shift)


@dataclass(eq=False)
class State:
    """What is known of a top-k, on the device."""

    floats: Tensor
    ints: Tensor
    told: dict[int, float] = field(default_factory=dict)

    @classmethod
    def new(cls, device: torch.device) -> State:
        """Nothing known yet."""
        return cls(
            torch.zeros(FLOATS, dtype=torch.float64, device=device),
            torch.zeros(INTS, dtype=torch.int64, device=device),
        )

    def tell(self, k: float, with_slack: float, total: float, beta: float) -> None:
        """Fill in what the host knows: a number is an argument of the launch, so that nothing waits."""
        for place, number in ((SOFT_K, k), (K, with_slack), (TOTAL, total), (BETA, beta)):
            if self.told.get(place.value) != number:
                self.floats[place.value].fill_(number)
                self.told[place.value] = number

    def clone(self) -> State:
        """A copy that stays as it is."""
        return State(self.floats.clone(), self.ints.clone())

    def threshold(self) -> Threshold:
        """What is kept, as views of this state."""
        return Threshold(self.floats[VALUE.value], self.ints[CUT.value], self.floats[COST.value])

    def dual(self, beta: float) -> Dual:
        """The solved mask, as views of this state."""
        center, offset, residual = (self.floats[i.value] for i in (CENTER, OFFSET, RESIDUAL))
        return Dual(beta, center, offset, passes=self.ints[PASSES.value], residual=residual)

    def set(self, threshold: Threshold, dual: Dual | None) -> None:
        """Go on from a solution that was saved."""
        floats, ints = [0.0] * FLOATS, [0] * INTS
        floats[VALUE.value], floats[COST.value], ints[CUT.value] = (
            float(threshold.value),
            float(threshold.cost),
            int(threshold.cut),
        )
        if dual is not None:
            dual = dual.host()
            floats[BETA.value] = floats[LAST_BETA.value] = dual.beta
            floats[CENTER.value], floats[OFFSET.value] = dual.center, dual.offset
            floats[RESIDUAL.value], ints[PASSES.value] = dual.residual, dual.passes
        ints[SOLVED.value] = 1
        self.told = {}
        self.floats.copy_(torch.tensor(floats, dtype=torch.float64))
        self.ints.copy_(torch.tensor(ints))
