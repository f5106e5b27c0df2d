"""Solves many small budgets on a CPU as `rows` does, with rows as columns (m × rows) and in memory that is there.

A sorting network of maxima and minima of whole columns finds where the budget of every row runs out: no row is looked at
by itself, and nothing is a bool, which a CPU is slow at. The few rows where units are tied there, and those whose soft
mask asks for many steps, are solved one more time by themselves.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from spartan.ops import rows

# out = x where u > λ, exactly +0.0 elsewhere.
_where_above = torch.ops.aten.threshold_backward.grad_input
PASSES = 5  # Newton passes before the rows that are left go the safe way; as few of them as this may go before
FEW = 1 / 32


class Room:
    """Memory for m × rows numbers at a time, handed on from piece to piece."""

    def __init__(self, m: int, size: int, dtype: torch.dtype) -> None:
        self.blocks = [torch.empty(m, size, dtype=dtype) for _ in range(4)]
        self.slots = list(torch.empty(m + 1, size, dtype=dtype).unbind())
        self.lines = list(torch.empty(8, size, dtype=dtype).unbind())


@cache
def comparators(m: int, wanted: frozenset[int]) -> tuple[tuple[int, int, bool, bool], ...]:
    """Batcher's odd-even merge of m columns, largest first, as far as the wanted places need it.

    Each is two places, of which the first gets the larger and the second the smaller, and whether either is needed.
    """
    found: list[tuple[int, int, bool, bool]] = []
    needed = set(wanted)
    for i, j in reversed(list(_merges(m))):
        if i in needed or j in needed:
            found.append((i, j, i in needed, j in needed))
            needed |= {i, j}
    return tuple(reversed(found))


def _merges(m: int) -> Iterator[tuple[int, int]]:
    p = 1
    while p < m:
        k = p
        while k:
            for j in range(k % p, m - k, 2 * k):
                for i in range(j, j + min(k, m - j - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        yield i, i + k
            k //= 2
        p *= 2


def ordered(u: Tensor, wanted: Sequence[int], room: Room) -> list[Tensor]:
    """The columns of u with the wanted places in order, largest first, in the slots of the room."""
    columns, free = list(u.unbind()), list(room.slots)
    own = [False] * len(columns)  # whether a column is in a slot; u itself is not written to
    for i, j, larger, smaller in comparators(len(columns), frozenset(wanted)):
        x, y = columns[i], columns[j]
        if larger and smaller:
            columns[i] = torch.maximum(x, y, out=free.pop())
            columns[j] = torch.minimum(x, y, out=y if own[j] else free.pop())
            free += [x] if own[i] else []
            own[i] = own[j] = True
        else:
            place, other, choose = (i, j, torch.maximum) if larger else (j, i, torch.minimum)
            columns[place] = choose(x, y, out=columns[place] if own[place] else free.pop())
            free += [columns[other]] if own[other] else []
            own[place], own[other] = True, False
    return columns


def keep(u: Tensor, n: int, room: Room, out: Tensor, below: Tensor | None = None) -> Tensor:
    """1 at the n largest of each row, of equal ones the first, else 0.

    `below` gets the largest of each row strictly below these, or 0 where there is none; magnitudes are no less.
    """
    m = len(u)
    if not 0 < n < m:
        if below is not None:
            below.zero_()
        return out.fill_(float(n >= m))
    columns = ordered(u, (n - 1, n), room)
    return kept_above(u, n, columns[n - 1], columns[n], room, out, below)


def kept_above(
    u: Tensor, n: int, last: Tensor, next_one: Tensor, room: Room, out: Tensor, below: Tensor | None = None
) -> Tensor:
    """The same from the n-th and the (n+1)-th largest of each row."""
    torch.gt(u, next_one, out=out)
    if below is not None:
        below.copy_(next_one)
    tied = torch.eq(last, next_one, out=room.lines[0])
    if not tied.any():
        return out
    which = tied.nonzero().squeeze(1)
    x, value = u.index_select(1, which), last.index_select(0, which)
    found = torch.gt(x, value, out=torch.empty_like(x))
    left = n - found.sum(0)
    for column, first in zip(x, found, strict=True):
        equal = torch.eq(column, value, out=torch.empty_like(value)).mul_(left.clamp(max=1.0))
        first.add_(equal)
        left.sub_(equal)
    out.index_copy_(1, which, found)
    if below is not None:
        smaller = torch.where(x < value, x, -math.inf).amax(0).clamp_(min=0.0)
        below.index_copy_(0, which, smaller)
    return out


def only(x: Tensor, kept: Tensor, out: Tensor) -> Tensor:
    """x where 1 stands, exactly +0.0 where 0 does."""
    _where_above(x, kept, 0.5, grad_input=out)
    return out


def solve(u: Tensor, n: int, beta: float, room: Room, center: Tensor, offset: Tensor) -> list[Tensor]:
    """Center and offset of the soft top-n mask of each row, as `rows.solve`, and the columns in order.

    A Newton step Δ on h = logit(F/m) − logit(n/m) ends a row's search where what it leaves is known to be nothing: as
    |h''| ≤ 2h', a step of at most 0.01 leaves no more than 1.1Δ² of the offset, and 1.2·Δ²·dF/ds of the budget. A
    row that is done stays as it is, whatever the others beside it need.
    """
    m = len(u)
    if n == m or beta == 0.0:
        center.zero_()
        offset.fill_(math.inf if n == m else math.log(n) - math.log(m - n))
        return ordered(u, (n - 1, n), room) if n < m else []
    columns = ordered(u, range(m), room)
    last, next_one = columns[n - 1], columns[n]
    torch.sub(last, next_one, out=center).mul_(0.5).add_(next_one)
    a, b, step, slope, rest, active = room.lines[:6]
    # The center is rounded; what it lacks of the middle would shift the root by more than log m at large β.
    torch.add(torch.sub(last, center, out=a), torch.sub(next_one, center, out=b), out=offset).mul_(-0.5 * beta)
    z, tail, square = room.blocks[1:4]
    for j, column in enumerate(columns):
        torch.sub(column, center, out=z[j])
    z[:n].mul_(-beta)
    z[n:].mul_(beta)
    _start_from_the_mean(z, n, offset, tail, room.lines)
    enough = n * rows.ENOUGH[u.dtype]
    active.fill_(1.0)
    for done in range(1, PASSES + 1):
        # How far each unit is from the hard mask: 1 − m of the n largest, m of the others.
        torch.sub(z[:n], offset, out=tail[:n])
        torch.add(z[n:], offset, out=tail[n:])
        tail.sigmoid_()
        torch.sum(torch.addcmul(tail, tail, tail, value=-1.0, out=square), 0, out=slope)
        excess = torch.sub(torch.sum(tail[n:], 0, out=b), torch.sum(tail[:n], 0, out=a), out=rest)  # F − n
        torch.div(excess, n, out=step).log1p_().sub_(torch.div(excess, n - m, out=a).log1p_())
        # Δ = h · F(m − F)/(m · dF/ds), F being n + excess
        step.mul_(torch.add(excess, n, out=a)).mul_(torch.sub(m - n, excess, out=b)).div_(slope).div_(m)
        step.clamp_(-16.0, 16.0)
        # Where the budget is met the offset is what it is; slopes may be 0 there.
        missed = torch.gt(excess.abs_(), enough, out=a)
        only(step, missed, step)
        offset.sub_(step.mul_(active))
        left = slope.clamp_(min=5e3 * enough).mul_(step).mul_(step)
        active.addcmul_(active, torch.le(left, 0.5 * enough, out=b), value=-1.0)  # what is no number is not settled
        many = float(active.sum())
        if not many:
            return columns
        if done > 1 and many < FEW * len(active):
            break
    which = active.nonzero().squeeze(1)
    for found, mine in zip(rows.solve(u.index_select(1, which).t(), n, beta), (center, offset), strict=True):
        mine.index_copy_(0, which, found)
    return columns


def _start_from_the_mean(z: Tensor, n: int, offset: Tensor, square: Tensor, lines: Sequence[Tensor]) -> None:
    """Where all of a row is close together at this β, begin at the root but for third moments: mostly near enough.

    z is β(u − center), negative for the n largest, of which the first and the last are the outermost.
    """
    near, mean, var, less = lines[:4]
    m = len(z)
    torch.gt(torch.add(z[0], z[-1], out=mean), -1.0, out=near)
    if not near.any():
        return
    torch.sum(z[n:], 0, out=mean).sub_(torch.sum(z[:n], 0, out=less)).div_(m)
    torch.sum(torch.mul(z, z, out=square), 0, out=var).div_(m).sub_(torch.mul(mean, mean, out=less))
    # Σ sigmoid(z + s)/m = σ(s + mean) + ½σ''·var, and σ''/σ' = 1 − 2n/m at the root.
    start = mean.neg_().sub_(var, alpha=0.5 * (1.0 - 2.0 * n / m)).add_(math.log(n) - math.log(m - n))
    offset.add_(only(start.sub_(offset), near, start))


def soft(u: Tensor, center: Tensor, offset: Tensor, beta: float, out: Tensor) -> Tensor:
    """The soft mask."""
    return torch.add(offset, torch.sub(u, center, out=out), alpha=beta, out=out).sigmoid_()
