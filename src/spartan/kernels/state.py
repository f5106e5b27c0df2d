"""What is known of a top-k, on the device: its numbers by place, and floats as keys that sort as they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual

NARROWED = tl.constexpr(11)
BINS = tl.constexpr(1 << 11)
LOWEST = tl.constexpr((1 << 23) - 1)  # the key of −inf: what lies below is no number
HIGHEST = tl.constexpr((1 << 32) - 2)  # that a pass looks at: no number has a higher key, but for some that are none
# Around the last threshold a pass first looks 2¹⁰ keys up and down, 0.01%, if its last move was at most half of that: they
# have a bin each, so that one pass finds the exact one. Else it looks four times as far as that move, at most 2¹⁵, 0.4%,
# which takes two; the fewer lie within, the faster it is. Where the threshold is not there, the next pass looks at so many
# times as much beyond.
NEAREST = tl.constexpr(1 << 10)
NEAR = tl.constexpr(1 << 15)
FURTHER = tl.constexpr(1 << 6)
# Where nothing is known of the threshold, so many entries of each piece are looked at, until their own is known to a bin of
# 2^COARSE keys (they cannot tell 0.01% apart); then it is sought around there, ±3%.
SAMPLE = tl.constexpr(64)
COARSE = tl.constexpr(10)
GUESSED = tl.constexpr(1 << 18)

# The state of a top-k: floats, of which the host tells the first four …
K = tl.constexpr(0)  # what may be kept, in cost, with the slack for rounding
SOFT_K = tl.constexpr(1)  # the same without
TOTAL = tl.constexpr(2)  # C, the cost of everything
BETA = tl.constexpr(3)
TOLD = 4
GOAL = tl.constexpr(4)  # logit(k/C)
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
FLOATS = tl.constexpr(16)
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
SAMPLES = tl.constexpr(12)  # 1: a pass looks at samples only; 2: they have told where to look
FROM = tl.constexpr(13)  # the key of the last threshold; −1 if there is none
MOVED = tl.constexpr(14)  # how far from there it was found
INTS = tl.constexpr(15)


@triton.jit
def row_of(table, piece):
    """Of a piece: its tensor, where it starts there, how long it is, and its position in its group."""
    row = table + 4 * piece
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def even_row_of(table, piece, ALIGNED: tl.constexpr):
    """The same; with ALIGNED pieces end at multiples of 8, and the compiler learns it."""
    which, start, length, position = row_of(table, piece)
    if ALIGNED:
        length = length // 8 * 8
    return which, start, length, position


@triton.jit
def place_of(address, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a piece begins; ALIGNED tensors, whose pieces start at multiples of 1,024, are read 16 bytes at a time."""
    base = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        start = start // 1024 * 1024  # what it is anyway: now the compiler knows
    return base + start


@triton.jit
def group_of(groups, piece):
    """The group of a piece; with a single one there is no table."""
    group = 0
    if groups is not None:
        group = tl.load(groups + piece)
    return group


@triton.jit
def key_of(u):
    """A float32's bits as an unsigned number that sorts as the float does."""
    bits = u.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def signed_key_of(u):
    """The same as a signed number, 2³¹ less; for u ≥ 0 these are its bits."""
    bits = u.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 2147483647)


@triton.jit
def signed(key):
    """Such a number of a key."""
    return (key - 2147483648).to(tl.int32)


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


@triton.jit
def look_around(ints, key, width):
    """The next pass counts the keys up to so far from this one."""
    look_at(ints, tl.maximum(key - width, 0), tl.minimum(key + width - 1, HIGHEST))


@dataclass(eq=False)
class State:
    """What is known of a top-k, on the device."""

    floats: Tensor
    ints: Tensor
    told: list[float] = field(default_factory=list)

    @classmethod
    def new(cls, device: torch.device) -> State:
        """Nothing known yet."""
        return cls(
            torch.zeros(FLOATS.value, dtype=torch.float64, device=device),
            torch.zeros(INTS.value, dtype=torch.int64, device=device),
        )

    def tell(self, numbers: Sequence[float]) -> None:
        """Fill in what the host knows: a number is an argument of the launch, so that nothing waits."""
        for place, number in enumerate(numbers):
            if not self.told or self.told[place] != number:
                self.floats[place].fill_(number)
        self.told = list(numbers)

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
        floats, ints = [0.0] * FLOATS.value, [0] * INTS.value
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
        self.told = []
        self.floats.copy_(torch.tensor(floats, dtype=torch.float64))
        self.ints.copy_(torch.tensor(ints))


class States:
    """What is known of the top-k of every group, a row each."""

    def __init__(self, groups: int, device: torch.device) -> None:
        self.floats = torch.zeros(groups, FLOATS.value, dtype=torch.float64, device=device)
        self.ints = torch.zeros(groups, INTS.value, dtype=torch.int64, device=device)
        self.rows = [State(floats, ints) for floats, ints in zip(self.floats, self.ints, strict=True)]
        self._room = torch.zeros(groups, TOLD, dtype=torch.float64, device=device)
        self._before = self.floats.clone(), self.ints.clone()

    def tell(self, numbers: dict[int, list[float]]) -> None:
        """Fill in what the host knows of these groups: in one copy, since most of it changes with every step."""
        if all(self.rows[g].told == new for g, new in numbers.items()):
            return
        if self.floats.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            for g, new in numbers.items():  # a graph would go on reading the host's memory
                self.rows[g].tell(new)
            return
        table = torch.tensor(
            [numbers.get(g) or row.told or [0.0] * TOLD for g, row in enumerate(self.rows)], dtype=torch.float64
        )
        if self.floats.device.type == "cuda":
            table = table.pin_memory()  # from there the copy is queued, and the host goes on
        self._room.copy_(table, non_blocking=True)
        self.floats[:, :TOLD] = self._room
        for g, new in numbers.items():
            self.rows[g].told = list(new)

    def remember(self) -> None:
        """Keep what is known now, to go back to."""
        for kept, now in zip(self._before, (self.floats, self.ints), strict=True):
            kept.copy_(now)

    def go_back(self, group: int) -> None:
        """Know of a group what was known before."""
        for kept, now in zip(self._before, (self.floats, self.ints), strict=True):
            now[group].copy_(kept[group])
        self.rows[group].told = []
