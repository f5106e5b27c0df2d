"""Lists many tensors for one launch: tables of addresses, and of the pieces that programs work on."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spartan.ops.parts import CostGrid

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
    the end. `even` tells that every piece has a multiple of 8 entries.

    Args:
        sizes: entries of each tensor.
        costs: cost of an entry of each.
        factors: u = factor · |x| of each.
        device: where the tables are to lie.
        smallest: entries that a piece has at least, but for the last of a tensor.
        owners: the segment of each tensor, in order; None for a single one.
        segments: how many there are.
        programs: among how many the entries are divided evenly; 0 if every piece has its own.
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
    ) -> None:
        owners = [0] * len(sizes) if owners is None else owners
        self.total = sum(sizes)
        self.even = all(n % 8 == 0 for n in sizes)
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
        self.shares = torch.tensor(shares, dtype=torch.int64).to(device)
        self.table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(device)
        of = torch.tensor([owners[i] for i in which], dtype=torch.int32)
        self.segments = of.to(device) if segments > 1 else None  # nothing to look up
        self.limits = torch.tensor(limits, dtype=torch.int64).to(device)
        self.costs = torch.tensor([costs[i] for i in which], dtype=torch.float64).to(device)
        self.prices = torch.tensor(prices, dtype=torch.float64).to(device)
        self.totals = [math.fsum(sizes[i] * costs[i] for i in _of(owners, segment)) for segment in range(segments)]
        self.grids = [CostGrid(total) for total in self.totals]
        fine = [self.grids[owners[i]].split(costs[i])[1] for i in range(len(sizes))]
        self.fine_costs = self.fine_prices = None
        if any(fine):
            self.fine_costs = torch.tensor([fine[i] for i in which], dtype=torch.float64).to(device)
            of_kind = dict(zip(kinds, which, strict=True))
            each = [fine[of_kind[kind]] if kind in of_kind else 0.0 for kind in range(len(prices))]
            self.fine_prices = torch.tensor(each, dtype=torch.float64).to(device)
        self.kinds = torch.tensor(kinds, dtype=torch.int32).to(device)
        self.factors = torch.tensor([factors[i] for i in which], dtype=torch.float32).to(device)


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
        before: called before the table changes: launches that were only noted are to read what they were noted with.
    """

    aligned = True  # to 16 bytes, all of them
    remembered = 8  # gradients of one step often lie where those of an earlier one did

    def __init__(self, device: torch.device, fixed: bool = False, before: Callable[[], None] | None = None) -> None:
        self.device, self.fixed, self._before = device, fixed, before
        self._list: Sequence[Tensor | None] | None = None  # the last one, which is to live as long as the table
        self._last: list[int] = []
        self._sent: dict[tuple[int, ...], Tensor] = {}  # on the host, ready to be copied once more
        # It stays where it is: graphs replay its address.
        self._table = torch.empty(0, dtype=torch.int64, device=device)

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The table; 0 stands for a tensor that is not there."""
        if self.fixed and tensors is self._list:
            return self._table
        self._list = tensors
        if all(t is not None for t in tensors):
            return self._at(list(map(Tensor.data_ptr, tensors)))  # type: ignore[arg-type]  # C, for every step
        return self._at([0 if t is None else t.data_ptr() for t in tensors])

    @property
    def table(self) -> Tensor:
        """The last one."""
        return self._table

    def along(self, vector: Tensor, starts: Sequence[int]) -> Tensor:
        """The table of the parts of a vector, where it lies in one piece."""
        self._list = (vector,)  # it must live until launches that were only noted have read it
        first, size = vector.data_ptr(), vector.element_size()
        return self._at([first + size * start for start in starts])

    def _at(self, now: list[int]) -> Tensor:
        if now != self._last:
            if self._before is not None:
                self._before()
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
            self._last, self.aligned = now, all(address % 16 == 0 for address in now)
        return self._table


class Numbers:
    """A few numbers for each segment, on the device; sent again only when they changed."""

    def __init__(self, segments: int, device: torch.device, each: int = 3) -> None:
        self.there = torch.zeros(segments * each, dtype=torch.float32, device=device)
        self._told = [0.0] * (segments * each)

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
        self._told = numbers
        return self.there
