"""Lists many tensors for one launch: tables of addresses, and of the pieces that programs work on."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.ops.parts import CostGrid
from spartan.solvers.base import there
from spartan.solvers.forms import PerSegment
from spartan.solvers.triton.replay import Replay

# A program's share. Small enough to fill a GPU with a few million weights, large enough that the pieces' own sums,
# which one program adds up, stay few.
SMALLEST, MOST = 1 << 12, 1 << 11
# Where shares are cut within a tensor: what is aligned there is aligned in every piece.
GRAIN = 1 << 10
# With shares, a program goes from piece to piece by itself, and to begin one takes as long as reading thousands of
# entries.
LONG = 1 << 18
FEW = 4  # numbers that are sent one by one


class Pieces:
    """Tensors of given sizes cut into pieces of at most `length` entries, a multiple of `smallest`, in order of position.

    `table` has a row per piece: its tensor, where in that tensor it starts, how long it is, and its position among all
    entries of its segment. `segments` tells which one that is, where there are several; `costs` and `factors` repeat
    what is given per tensor, `kinds` tells which of the different `prices` it has; `fine_costs` and `fine_prices` are
    their fine parts (`ops.parts.CostGrid`), None where they have none and sums do not round. `limits` has a row per
    segment: its pieces, its prices and its tensors, each from the first to the one past the last. With `programs`,
    pieces also end where the entries are divided evenly among so many, and `shares` has the first piece of each, and
    the end.

    Args:
        sizes: entries of each tensor.
        costs: cost of an entry of each.
        factors: u = factor · |x| of each.
        device: where the tables are to lie.
        smallest: entries that a piece has at least, but for the last of a tensor.
        owners: the segment of each tensor, in order; None for a single one.
        segments: how many there are.
        programs: among how many the entries are divided evenly; 0 if every piece has its own.
        whole: entries of each tensor on all processes, which `totals` counts; None where all of them are here.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        costs: Sequence[float],
        factors: Sequence[float],
        device: torch.device,
        smallest: int = SMALLEST,
        owners: Sequence[int] | None = None,
        segments: int = 1,
        programs: int = 0,
        whole: Sequence[int] | None = None,
    ) -> None:
        owners = [0] * len(sizes) if owners is None else owners
        self.total = sum(sizes)
        length = LONG if programs else smallest
        while length * MOST < self.total:
            length *= 2
        share = self.total
        if programs:
            share = _up(-(-self.total // programs))
            length = _up(-(-share // -(-share // length)))  # as long as each other, within a share
        shares, filled = [0], 0
        rows: list[tuple[int, int, int, int]] = []
        kinds: list[int] = []
        prices: list[float] = []
        limits: list[tuple[int, ...]] = []
        for segment in range(segments):
            mine, position = _of(owners, segment), 0
            own_prices, first, first_kind = sorted({costs[i] for i in mine}), len(rows), len(prices)
            for i in mine:
                start = 0
                while start < sizes[i]:
                    taken = min(length, sizes[i] - start, _up(share - filled) if programs else length)
                    rows.append((i, start, taken, position + start))
                    kinds.append(first_kind + own_prices.index(costs[i]))
                    start, filled = start + taken, filled + taken
                    if programs and filled >= share:
                        shares.append(len(rows))
                        filled = 0
                position += sizes[i]
            prices += own_prices
            tensors = (mine[0], mine[-1] + 1) if mine else (0, 0)
            limits.append((first, len(rows), first_kind, len(prices), *tensors))
        if filled:
            shares.append(len(rows))
        self.count, self.length, which = len(rows), length, [row[0] for row in rows]
        self.tensors = which  # of each piece, where the host can read it
        self.shares = sent(shares, torch.int64, device)
        self.table = sent(rows, torch.int64, device).reshape(-1, 4)
        of = [owners[i] for i in which]
        self.segments = sent(of, torch.int32, device) if segments > 1 else None  # nothing to look up
        self.limits = sent(limits, torch.int64, device)
        self.costs = sent([costs[i] for i in which], torch.float64, device)
        self.prices = sent(prices, torch.float64, device)
        counted = sizes if whole is None else whole
        self.totals = [math.fsum(counted[i] * costs[i] for i in _of(owners, segment)) for segment in range(segments)]
        self.grids = [CostGrid(total) for total in self.totals]
        fine = [self.grids[owners[i]].split(costs[i])[1] for i in range(len(sizes))]
        self.fine_costs = self.fine_prices = None
        if any(fine):
            self.fine_costs = sent([fine[i] for i in which], torch.float64, device)
            of_kind = [grid for grid, row in zip(self.grids, limits, strict=True) for _ in range(row[2], row[3])]
            each = [grid.split(price)[1] for grid, price in zip(of_kind, prices, strict=True)]
            self.fine_prices = sent(each, torch.float64, device)
        self.kinds = sent(kinds, torch.int32, device)
        self.factors = sent([factors[i] for i in which], torch.float32, device)


def sent(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device; from pinned memory the copy is queued, and the host goes on: tables may be made in a step."""
    here = torch.tensor(numbers, dtype=dtype)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


def _of(owners: Sequence[int], segment: int) -> list[int]:
    """The tensors of a segment."""
    return [i for i, owner in enumerate(owners) if owner == segment]


def _up(entries: int) -> int:
    """The next multiple of the grain."""
    return -(-entries // GRAIN) * GRAIN


class Addresses:
    """Where the tensors of a list lie, as a table on the device; sent again only when they moved.

    Args:
        device: where the table is to lie.
        fixed: whether tensors of the same list never move.
        replay: launches that it only notes are to read what they were noted with, so they run before the table changes,
            and the tensors live until then.
        resting: whether tensors of the same list stay where they are while launches are noted.
    """

    aligned = True  # to 16 bytes, all of them
    version = 0  # it grows when the table changes
    remembered = 8  # gradients of one step often lie where those of an earlier one did

    def __init__(
        self, device: torch.device, fixed: bool = False, replay: Replay | None = None, resting: bool = False
    ) -> None:
        self.device, self.fixed, self._replay = device, fixed, replay
        self._resting = replay if resting else None
        self._list: Sequence[Tensor | None] | None = None  # the last one, where it is to live as long as the table
        self._looked = 0  # when: the number of what is being noted
        self._last: list[int] = []
        self._sent: dict[tuple[int, ...], Tensor] = {}  # on the host, ready to be copied once more
        # It stays where it is: graphs replay its address.
        self._table = torch.empty(0, dtype=torch.int64, device=device)

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The table; 0 stands for a tensor that is not there."""
        resting = self._resting
        if tensors is self._list and (self.fixed or (resting is not None and self._looked == resting.noting != 0)):
            return self._table
        table = self._at(_addresses(tensors), tensors)
        if self.fixed or resting is not None:
            self._list, self._looked = tensors, 0 if resting is None else resting.noting
        return table

    def same(self, tensors: Sequence[Tensor | None], version: int) -> bool:
        """Whether the table was that of these tensors at this version; they then live until noted launches have run."""
        resting = self._resting
        if resting is not None and tensors is self._list and self._looked == resting.noting != 0:
            return self.version == version
        same = self.version == version and _addresses(tensors) == self._last
        if same and self._replay is not None:
            self._replay.keep(tensors)
        return same

    @property
    def table(self) -> Tensor:
        """The last one."""
        return self._table

    def along(self, vector: Tensor, starts: Sequence[int]) -> Tensor:
        """The table of the parts of a vector, where it lies in one piece."""
        self._list = (vector,)  # who made it may let it go before all that reads it here has run
        first, size = vector.data_ptr(), vector.element_size()
        return self._at([first + size * start for start in starts], (vector,))

    def _at(self, now: list[int], tensors: Sequence[Tensor | None]) -> Tensor:
        if self._replay is not None:
            if now != self._last:
                self._replay.flush()
            self._replay.keep(tensors)
        if now != self._last:
            self.version += 1
            key = tuple(now)
            table = self._sent.get(key)
            if table is None:
                table = torch.tensor(now, dtype=torch.int64)
                if self.device.type == "cuda":
                    table = table.pin_memory()  # from there the copy is queued, and the host goes on
                if len(self._sent) == self.remembered:
                    self._sent.pop(next(iter(self._sent)))
                self._sent[key] = table
            if len(self._last) != len(now):
                self._table = torch.empty_like(table, device=self.device)
            self._table.copy_(table, non_blocking=True)
            self._last, self.aligned = now, functools.reduce(operator.or_, now, 0) % 16 == 0
        return self._table


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    if all(map(there, tensors)):
        return list(map(Tensor.data_ptr, tensors))  # type: ignore[arg-type]  # all of it C: it runs in every step
    return [0 if t is None else t.data_ptr() for t in tensors]


class Numbers:
    """A few numbers for each segment, on the device; sent again only when they changed."""

    def __init__(self, segments: int, device: torch.device, each: int = 3) -> None:
        self.there = torch.zeros(segments * each, dtype=torch.float32, device=device)
        self._told = [0.0] * (segments * each)
        self._each = each
        self._found: tuple[object, ...] = ()

    def of(self, numbers: list[float]) -> Tensor:
        """Where they lie: always in the same place."""
        changed = [i for i, (now, told) in enumerate(zip(numbers, self._told, strict=True)) if now != told]
        cuda = self.there.device.type == "cuda"
        if len(changed) <= FEW or (cuda and torch.cuda.is_current_stream_capturing()):
            for i in changed:
                self.there[i].fill_(numbers[i])  # a number is an argument of the launch
        else:
            table = torch.tensor(numbers, dtype=torch.float32)
            if cuda:
                table = table.pin_memory()  # from there the copy is queued, and the host goes on
            self.there.copy_(table, non_blocking=True)
        self._told, self._found = numbers, ()
        return self.there

    def of_each(self, factors: Sequence[PerSegment], firsts: Tensor) -> Tensor:
        """The same of factors; what the device found does not leave it, and is copied when it is another than before.

        `firsts` has the first target of every segment.
        """
        if not any(isinstance(x, Tensor) for x in factors):
            return self.of([_number(x, s) for s in range(len(firsts)) for x in factors])
        if not self._found or any(a is not b for a, b in zip(self._found, factors, strict=True)):
            for column, x in zip(self.there.view(-1, self._each).unbind(1), factors, strict=True):
                if isinstance(x, Tensor):
                    column.copy_(x[firsts])
                else:
                    for s in range(len(firsts)):
                        column[s].fill_(_number(x, s))
            self._found, self._told = tuple(factors), [math.nan] * len(self._told)
        return self.there


def _number(of: PerSegment, segment: int) -> float:
    """That of one segment, where the host knows it."""
    assert not isinstance(of, Tensor)
    return of[segment] if isinstance(of, tuple) else of
