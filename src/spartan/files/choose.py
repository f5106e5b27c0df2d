"""Chooses the code that is smallest for a tensor: dense, or mask, gaps (of entries or of blocks) or N:M."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.files import codes, nm
from spartan.files.codes import byte_count
from spartan.problem.patterns import Pattern

# What a packed tensor takes in the header beyond what a dense one does, at most: it must save more than that.
HEADER_BYTES = 64
# A sample of the weight, to rule candidates out before the whole is looked at.
SAMPLE_ROWS, SAMPLE_COLUMNS = 128, 1024
# A pattern may keep this many entries for one that is not zero (kept weights can happen to be zero).
SLACK = 1.25
_SIDES = (1, 2, 4, 8, 16, 32, 64)
_GROUPS = (2, 4, 8, 16)
_NUMBER = "([0-9]{1,18})"
# Of N:M, how the entries are ordered: as they are, with the second dimension last, or a matrix by columns.
AS_THEY_ARE, INPUTS_LAST, INPUTS_FIRST = "", " inputs last", " inputs first"
_TEXT = re.compile(
    rf"(mask|gaps {_NUMBER})(?: {_NUMBER}x{_NUMBER}( stacked)?)?|nm {_NUMBER}:{_NUMBER}({INPUTS_LAST}|{INPUTS_FIRST})?"
)


@dataclass(frozen=True)
class Code:
    """How the kept entries of a tensor are found: the name of the code and its parameters.

    `mask` and `gaps` are over blocks of h × w entries of the tensor seen as a matrix, 1 × 1 for single entries; its rows
    are by the first dimension, or by the first two of three if `stacked`, as matrices of experts are. `k` is the
    parameter of `gaps`. `nm` keeps n of every m entries in row-major order, or in an `order` in which inputs follow one
    another: with the second dimension moved last (convolutions), or column by column (transformers' Conv1D).
    """

    name: str
    h: int = 1
    w: int = 1
    k: int = 0
    n: int = 0
    m: int = 0
    order: str = AS_THEY_ARE
    stacked: bool = False

    def __str__(self) -> str:
        if self.name == "nm":
            return f"nm {self.n}:{self.m}{self.order}"
        parameter = f" {self.k}" if self.name == "gaps" else ""
        blocks = f" {self.h}x{self.w}" + (" stacked" if self.stacked else "")
        return self.name + parameter + (blocks if self.h * self.w > 1 else "")

    @classmethod
    def parse(cls, text: object) -> "Code":
        """The code that `str` gives this text for; ValueError if there is none.

        Example:
            >>> Code.parse("gaps 3 16x16"), str(Code.parse("nm 2:4"))
            (Code(name='gaps', h=16, w=16, k=3, n=0, m=0, order='', stacked=False), 'nm 2:4')
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError(f"there is no code {ascii(text)[:40]}")
        _, k, h, w, stacked, n, m, order = found.groups()
        sides, numbers = (int(h or 1), int(w or 1)), (int(k or 0), int(n or 0), int(m or 0))
        return cls(found[0].split()[0], *sides, *numbers, order or AS_THEY_ARE, bool(stacked))


def matrix(shape: Sequence[int], stacked: bool = False) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix: the first dimension by the rest; one row below two dimensions.

    A stack of matrices is one above the other.
    """
    total = math.prod(shape)
    rows = 1 if len(shape) < 2 else shape[0] * shape[1] if stacked else shape[0]
    return rows, total // max(1, rows)


def in_order(x: Tensor, order: str) -> Tensor:
    """A tensor so that its row-major order is the one of an N:M code: a view."""
    return x.movedim(1, -1) if order == INPUTS_LAST else x.T if order == INPUTS_FIRST else x


def places_in_order(places: Tensor, shape: Sequence[int], order: str) -> Tensor:
    """Places in such an order as places in row-major order."""
    if order == AS_THEY_ARE:
        return places
    if order == INPUTS_FIRST:
        return places % shape[0] * shape[1] + places // shape[0]
    inputs, rest = shape[1], math.prod(shape[2:])
    group, column = places // inputs, places % inputs
    return (group // rest * inputs + column) * rest + group % rest


def choose(support: Tensor, itemsize: float, dense: int, pattern: Pattern | None = None) -> tuple[Code, Tensor] | None:
    """The code that stores a tensor in the fewest bytes, with what it keeps; None if that is to store it dense.

    Args:
        support: bool, of the tensor's shape: what must be stored.
        itemsize: bytes that a stored entry takes.
        dense: bytes of the tensor if it is stored dense.
        pattern: a pattern to try first, beside those that are found.

    The second result holds the kept units' positions (for `nm`, the groups' masks).

    Example:
        >>> support = torch.rand(256, 256) < 0.05
        >>> str(choose(support, 4, 4 * 65536)[0])
        'gaps 4'
        >>> in_blocks = torch.rand(16, 1, 16, 1).lt(0.1).expand(16, 16, 16, 16).reshape(256, 256)
        >>> str(choose(in_blocks, 4, 4 * 65536)[0])
        'gaps 3 16x16'
    """
    total, count = support.numel(), int(torch.count_nonzero(support))
    if count == total or count * itemsize + HEADER_BYTES >= dense:
        return None
    kept = support.reshape(-1).nonzero().squeeze(1)
    options = [_units(kept, total, itemsize, 1, 1)]
    if count:
        for stacked in (False, True) if support.ndim == 3 else (False,):
            rows, columns = matrix(support.shape, stacked)
            for h, w in _blocks(support.reshape(rows, columns), kept, _sides(support.shape, pattern, stacked)):
                if h > 1 or not stacked:  # one row of a stack is one of the whole
                    blocks = _blocks_of(kept, columns, h, w)
                    options.append(_units(blocks, total // (h * w), itemsize, h, w, stacked))
        options += _groups(support, count, itemsize, min(size for size, *_ in options))
    # Of two that take as many bytes, the larger blocks.
    size, code, kept = min(options, key=lambda option: (option[0], -option[1].h * option[1].w))
    return (code, kept) if size + HEADER_BYTES < dense else None


def _units(
    kept: Tensor, units: int, itemsize: float, h: int, w: int, stacked: bool = False
) -> tuple[float, Code, Tensor]:
    """Bytes, code and positions for units of h × w entries."""
    values = kept.numel() * h * w * itemsize
    coded, k = codes.gaps_size(codes.gaps_of(kept), units)
    if byte_count(units) <= coded:
        return values + byte_count(units), Code("mask", h, w, stacked=stacked), kept
    return values + coded, Code("gaps", h, w, k, stacked=stacked), kept


def _blocks_of(kept: Tensor, columns: int, h: int, w: int) -> Tensor:
    """The blocks of h × w, in row-major order of blocks, that hold any of the kept entries."""
    rows_of, across = kept // columns, columns // w
    blocks = (rows_of // h) * across + (kept - rows_of * columns) // w
    found = torch.zeros(int(blocks.max()) + 1, dtype=torch.bool).index_fill_(0, blocks, True)
    return found.nonzero().squeeze(1)


def _sides(shape: Sequence[int], pattern: Pattern | None, stacked: bool) -> set[tuple[int, int]]:
    """The sides of a pattern's blocks, of a weight of outputs × inputs and of one that is turned."""
    one = shape[1:] if stacked else shape
    turned = (one[1], one[0]) if len(one) == 2 else one
    found = [pattern.sides(one), pattern.sides(turned)] if pattern else []
    return {side for sides in found if sides for side in (sides, sides[::-1])}


def _blocks(support: Tensor, kept: Tensor, sides: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Block sizes worth a full look: the pattern's, the grid that all changes lie on, and usual ones that fit a sample."""
    rows, columns = support.shape
    tried = {(h, w) for h, w in sides if rows % h == 0 and columns % w == 0}
    # Around an entry that is kept, so that the sample is never empty.
    middle = int(kept[kept.numel() // 2])
    top = middle // columns // SAMPLE_ROWS * SAMPLE_ROWS
    left = middle % columns // SAMPLE_COLUMNS * SAMPLE_COLUMNS
    sample = support[top : top + SAMPLE_ROWS, left : left + SAMPLE_COLUMNS]
    if _edges(sample, left) > 1 or _edges(sample.T, top) > 1:
        # Changes of the whole lie on a grid that is at most as coarse as the sample's.
        tried.add((_edges(support.T, 0), _edges(support, 0)))
    tried |= set(_usual(sample, rows, columns))
    yield from (sides for sides in tried if sides != (1, 1))


def _edges(support: Tensor, start: int) -> int:
    """The largest w such that rows change only at multiples of w; the number of columns if they never do."""
    changes = (support[:, 1:] != support[:, :-1]).any(0).nonzero().squeeze(1) + 1 + start
    return math.gcd(*changes.tolist(), start, start + support.shape[1])


def _usual(sample: Tensor, rows: int, columns: int) -> list[tuple[int, int]]:
    """The three largest power-of-two blocks that keep few zeros in the sample."""
    count, fits, tall = int(torch.count_nonzero(sample)), [], sample
    for h in _SIDES:
        if rows % h or sample.shape[0] % h:
            break
        tall = tall if h == 1 else tall[::2] | tall[1::2]
        wide = tall
        for w in _SIDES:
            if columns % w or sample.shape[1] % w:
                break
            wide = wide if w == 1 else wide[:, ::2] | wide[:, 1::2]
            if int(torch.count_nonzero(wide)) * h * w <= SLACK * count and h * w > 1:
                fits.append((h, w))
    return sorted(fits, key=lambda sides: sides[0] * sides[1])[-3:]


def _groups(support: Tensor, count: int, itemsize: float, beat: float) -> Iterator[tuple[float, Code, Tensor]]:
    """N:M codes that come to fewer than `beat` bytes, for groups along the rows, the second dimension, or columns."""
    orders = [AS_THEY_ARE]
    if support.ndim > 2 and math.prod(support.shape[2:]) > 1:
        orders.append(INPUTS_LAST)
    elif support.ndim == 2 and min(support.shape) > 1:
        orders.append(INPUTS_FIRST)
    for order in orders:
        view = in_order(support, order)
        length = matrix(view.shape)[1] if order == AS_THEY_ARE else view.shape[-1]
        sample = view[: -(-SAMPLE_ROWS * SAMPLE_COLUMNS // view[0].numel())]
        sample = sample.reshape(-1)[: SAMPLE_ROWS * SAMPLE_COLUMNS]
        flat: Tensor | None = None
        for m in _GROUPS:
            # No group has fewer than the mean; and no code is smaller than its values.
            if length % m or -(-count * m // support.numel()) * (support.numel() // m) * itemsize >= beat:
                continue
            if (nm.most(nm.masks(sample[: sample.numel() // m * m], m), m) * (support.numel() // m)) * itemsize >= beat:
                continue
            flat = view.reshape(-1) if flat is None else flat
            masks = nm.masks(flat, m)
            n, groups = nm.most(masks, m), masks.numel()
            size = groups * n * itemsize + nm.size(groups, n, m)
            if 0 < n < m and size < beat:
                yield size, Code("nm", n=n, m=m, order=order), masks
