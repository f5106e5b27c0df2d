"""Holds what is known of a top-k on the device: its numbers by place, and floats as keys that sort as they do."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from spartan.ops.newton import Dual
from spartan.solvers.pools import Duals, Selection
from spartan.solvers.triton.mailbox import Mailbox

BINS = tl.constexpr(1 << 11)
LOWEST = tl.constexpr((1 << 23) - 1)  # the key of −inf; only a NaN's key is below
HIGHEST = tl.constexpr((1 << 32) - 2)  # the upper end of the search; only a NaN's key is above
# Around the last threshold a pass first looks 2¹⁰ keys up and down, 0.01%, if its last move was at most half of that:
# they have a bin each, so that one pass finds the exact one. Else it looks four times as far as that move, at most 2¹⁵,
# 0.4%, which takes two; the fewer lie within, the faster it is. Where the threshold is not there, the next pass looks
# at so many times as much beyond.
NEAREST = tl.constexpr(1 << 10)
NEAR = tl.constexpr(1 << 15)
FURTHER = tl.constexpr(1 << 6)
# Where nothing is known of the threshold, so many entries of each piece are looked at, until their own is known to a
# bin of 2^COARSE keys (they cannot tell 0.01% apart); then it is sought around there, ±3%.
SAMPLE = tl.constexpr(64)
COARSE = tl.constexpr(10)
GUESSED = tl.constexpr(1 << 18)

# Kernels must import these by name: Triton's cache does not see the value of a module's attribute.
# The state of a top-k: floats, of which the host tells the first five …
K = tl.constexpr(
    0
)  # what may be kept, in cost, with what is forgiven: the coarse part (`ops.parts.CostGrid`); ∞: all of it
SOFT_K = tl.constexpr(1)  # the same without
TOTAL = tl.constexpr(2)  # C, the cost of everything
BETA = tl.constexpr(3)
K_FINE = tl.constexpr(4)  # the fine part of K; 0 where costs have none
TOLD = 5
GOAL = tl.constexpr(5)  # logit(k/C)
ORIGIN = tl.constexpr(6)  # z = β(u − ORIGIN) + S
S = tl.constexpr(7)
LEAST = tl.constexpr(8)  # the root S lies between these
MOST = tl.constexpr(9)
CENTER = tl.constexpr(10)  # the same line, written from a number near τ
OFFSET = tl.constexpr(11)
RESIDUAL = tl.constexpr(12)
VALUE = tl.constexpr(13)  # the threshold
COST = tl.constexpr(14)  # of what is kept
ROOM = tl.constexpr(15)  # what is left for units equal to the threshold: the coarse part, and the fine one
ROOM_FINE = tl.constexpr(16)
LAST_BETA = tl.constexpr(17)
FLOATS = tl.constexpr(18)
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
WHOLE_CUT = tl.constexpr(15)  # where weights lie in shards: the cut among all units; CUT is the one among those here
FITTING = tl.constexpr(16)  # and how many of the units equal to the threshold are known to fit
INTS = tl.constexpr(17)


@triton.jit
def row_of(table, piece):
    """Of a piece: its tensor, where it starts there, how long it is, and its position in its segment."""
    row = table + 4 * piece
    # Within a piece 32 bits are enough, and take half the registers.
    return tl.load(row), tl.load(row + 1), tl.load(row + 2).to(tl.int32), tl.load(row + 3)


@triton.jit
def segment_of(segments, piece):
    """The segment of a piece; with a single one there is no table."""
    segment = 0
    if segments is not None:
        segment = tl.load(segments + piece)
    return segment


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
def look_at(ints, low, high, N: tl.constexpr = BINS):
    """The next pass counts the keys from low to high, in at most N bins, a power of two."""
    shift = low * 0
    while (tl.full((), N, tl.int64) << shift) < high - low + 1:
        shift += 1
    tl.store(ints + LOW, low)
    tl.store(ints + HIGH, high)
    tl.store(ints + SHIFT, shift)


@triton.jit
def look_around(ints, key, width, N: tl.constexpr = BINS):
    """The next pass counts the keys up to so far from this one."""
    look_at(ints, tl.maximum(key - width, 0), tl.minimum(key + width - 1, HIGHEST), N)


class States:
    """What is known of the top-k of every segment, on the device, a row each."""

    def __init__(self, segments: int, device: torch.device) -> None:
        self.floats = torch.zeros(segments, FLOATS.value, dtype=torch.float64, device=device)
        self.ints = torch.zeros(segments, INTS.value, dtype=torch.int64, device=device)
        self._told: list[list[float]] = []

    def tell(self, numbers: list[list[float]]) -> bool:
        """Send what the host knows, `TOLD` numbers a segment; whether they are to be fetched before they are read."""
        if numbers == self._told:
            return False
        told, self._told = self._told, numbers
        if self.floats.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._box.send(numbers)
            return True
        # A graph of the user's replays without us: numbers that are arguments of launches stay as they are.
        for s, row in enumerate(numbers):
            for place, number in enumerate(row):
                if not told or told[s][place] != number:
                    self.floats[s, place].fill_(number)
        return False

    def fetch(self) -> None:
        """Launch what puts the numbers that were sent last where they are read."""
        self._box.fetch()

    @cached_property
    def _box(self) -> Mailbox:
        return Mailbox(self.floats, TOLD)

    def tell_tensor(self, numbers: Tensor) -> None:
        """The same with numbers that are on the device."""
        self._told = []
        self.floats[:, :TOLD] = numbers

    def selection(self) -> Selection:
        """What is kept, as views of this state."""
        return self._selection

    @cached_property
    def _selection(self) -> Selection:
        return Selection(self.floats[:, VALUE.value], self.ints[:, CUT.value], self.floats[:, COST.value])

    @cached_property
    def _dual(self) -> tuple[Tensor, ...]:
        return *(self.floats[:, i.value] for i in (CENTER, OFFSET, RESIDUAL)), self.ints[:, PASSES.value]

    def duals(self, beta: Sequence[float]) -> Duals:
        """The solved masks, as views of this state."""
        center, offset, residual, passes = self._dual
        return Duals(tuple(beta), center, offset, (1.0,) * len(beta), passes, residual)

    def copy(self) -> "States":
        """A copy that stays as it is."""
        found = type(self)(0, self.floats.device)
        found.floats, found.ints = self.floats.clone(), self.ints.clone()
        return found

    def set(self, chosen: Sequence[Mapping[str, float]], duals: Sequence[Dual] | None) -> None:
        """Go on from a solution that was saved."""
        floats, ints = (
            torch.zeros(self.floats.shape, dtype=torch.float64),
            torch.zeros(self.ints.shape, dtype=torch.int64),
        )
        for s, found in enumerate(chosen):
            floats[s, VALUE.value], floats[s, COST.value] = found["value"], found["cost"]
            ints[s, CUT.value], ints[s, SOLVED.value] = int(found["cut"]), 1
            if duals is not None:
                dual = duals[s]
                floats[s, BETA.value] = floats[s, LAST_BETA.value] = dual.beta
                floats[s, CENTER.value], floats[s, OFFSET.value] = dual.center, dual.offset
                floats[s, RESIDUAL.value], ints[s, PASSES.value] = dual.residual, dual.passes
        self._told = []
        self.floats.copy_(floats)
        self.ints.copy_(ints)
