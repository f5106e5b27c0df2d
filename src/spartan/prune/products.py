"""Sees every product of a weight with its inputs, whichever module computes it and however it writes it.

Modules of other libraries multiply by `F.linear` with the weight of a submodule that is never called, by `addmm`, by
slices of a packed weight or of experts. What torch computes in the end is one of a few operations, and its operand lies
in the memory of the weight.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from spartan.prune.layout import Layout

AT_A_TIME = 1 << 24  # entries of unfolded images: 64 MiB in float32
aten = torch.ops.aten


class Product(NamedTuple):
    """A weight, by its number, that is multiplied with something: which groups of its rows, with what."""

    number: int
    groups: range
    source: Tensor
    inputs: Callable[[], Iterator[Tensor]]  # pieces of (groups, or 1 for all of them) × samples × columns


class Products(TorchDispatchMode):
    """Inside, `see` is called after every product of the weights.

    Args:
        layouts: the weights, by number; if they are moved, `locate` is to be called.
        see: what is called.
    """

    def __init__(self, layouts: dict[int, Layout], see: Callable[[Product], None]) -> None:
        super().__init__()
        self._layouts, self._see = layouts, see
        self._at: dict[int, list[int]] = {}  # by where their storage begins
        self.locate()

    def locate(self) -> None:
        """Look again where the weights lie: some have been moved."""
        self._at = {}
        for number, layout in self._layouts.items():
            self._at.setdefault(_storage(layout.target.local), []).append(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        computed = func(*args, **(kwargs or {}))  # first, so that shapes that do not fit are the model's own error
        find = _OPERATIONS.get(func)
        if find is not None:
            for product in find(self._which, *args, **(kwargs or {})):
                self._see(product)
        return computed

    def _which(self, operand: Tensor) -> "list[tuple[int, Layout]]":
        """The weights in whose memory an operand lies."""
        return [(number, self._layouts[number]) for number in self._at.get(_storage(operand), ())]


Which = Callable[[Tensor], list[tuple[int, Layout]]]


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _linear(which: Which, x: Tensor, weight: Tensor, bias: Any = None) -> Iterator[Product]:
    yield from _mm(which, x.reshape(-1, x.shape[-1]), weight.t())


def _addmm(which: Which, bias: Tensor, a: Tensor, b: Tensor, **options: Any) -> Iterator[Product]:
    yield from _mm(which, a, b)


def _mm(which: Which, a: Tensor, b: Tensor) -> Iterator[Product]:
    """x @ w, or w @ x."""
    for x, w in ((a, b), (b.t(), a.t())):
        for number, layout in which(w):
            if (groups := _groups(layout, w)) is not None:
                yield Product(number, groups, x, lambda x=x: iter([x[None]]))  # type: ignore[misc]


def _bmm(which: Which, a: Tensor, b: Tensor) -> Iterator[Product]:
    """The same for a stack: of one matrix, or of all experts at once."""
    for x, w in ((a, b), (b.mT, a.mT)):
        for number, layout in which(w):
            if w.shape[0] == 1 or w.stride(0) == 0:  # the same matrix for all
                if (groups := _groups(layout, w[0])) is not None:
                    yield Product(number, groups, x, lambda x=x: iter([x.flatten(0, 1)[None]]))  # type: ignore[misc]
            elif _is_whole_stack(layout, w):
                yield Product(number, range(layout.groups), x, lambda x=x: iter([x]))  # type: ignore[misc]


def _baddbmm(which: Which, bias: Tensor, a: Tensor, b: Tensor, **options: Any) -> Iterator[Product]:
    yield from _bmm(which, a, b)


def _grouped_mm(which: Which, x: Tensor, w: Tensor, ends: Tensor | None = None, *rest: Any) -> Iterator[Product]:
    """Experts: the rows of x up to the first end for the first of them, and so on."""
    for number, layout in which(w):
        if ends is not None and x.ndim == 2 and _is_whole_stack(layout, w):
            first = 0
            for expert, end in enumerate(ends.tolist()):
                if end > first:
                    rows = x[first:end]
                    yield Product(number, range(expert, expert + 1), x, lambda rows=rows: iter([rows[None]]))  # type: ignore[misc]
                first = end


def _convolution(
    which: Which,
    x: Tensor,
    w: Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *rest: Any,
) -> Iterator[Product]:
    for number, layout in which(w):
        if not transposed and w.shape == layout.target.shape:
            unfold = partial(_unfolded, x, w, layout.groups, [*stride], [*padding], [*dilation])
            yield Product(number, range(layout.groups), x, unfold)


def _unfolded(
    x: Tensor, w: Tensor, groups: int, stride: list[int], padding: list[int], dilation: list[int]
) -> Iterator[Tensor]:
    """What a convolution multiplies its weights with: groups × samples × (inputs of a group · kernel), some images each."""
    kernel = w.shape[2:]
    x = pad(x, [side for p in reversed(padding) for side in (p, p)])
    for dim, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, (size - 1) * apart + 1, step)[..., ::apart]  # a view; the kernel's axes come last
    n = len(kernel)
    x = x.unflatten(1, (groups, -1))  # images × groups × inputs × positions × kernel
    x = x.permute(1, 0, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
    an_image = max(1, x[:, :1].numel())
    for images in x.split(max(1, AT_A_TIME // an_image), 1):
        yield images.reshape(groups, -1, math.prod(w.shape[1:]))


def _groups(layout: Layout, w: Tensor) -> range | None:
    """The groups of rows that x @ w, with w in the weight's memory, computes; None where it is another kind of product."""
    weight, axes = layout.target.local, layout.target.axes
    if weight.ndim != (3 if axes.stacked else 2):
        return None
    lines, length = weight.shape[-2:]
    between, along = weight.stride()[-2:]
    first = int(w.storage_offset()) - int(weight.storage_offset())
    if axes.stacked:
        expert, rest = divmod(first, weight.stride(0))
        whole = rest == 0 and _same(w, ((lines, between), (length, along)) if axes.swapped else _turned(weight[0]))
        return range(expert, expert + 1) if whole else None
    if axes.swapped:
        return range(1) if first == 0 and _same(w, ((lines, between), (length, along))) else None
    start, rest = divmod(first, between)
    count, high = w.shape[-1], lines // layout.groups
    if rest or start % high or count % high or not _same(w, ((length, along), (count, between))):
        return None
    return range(start // high, (start + count) // high)


def _is_whole_stack(layout: Layout, w: Tensor) -> bool:
    weight, axes = layout.target.local, layout.target.axes
    if not axes.stacked or w.storage_offset() != weight.storage_offset():
        return False
    expected = weight if axes.swapped else weight.mT
    return _same(w, tuple(zip(expected.shape, expected.stride(), strict=True)))


def _turned(matrix: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple(zip(matrix.t().shape, matrix.t().stride(), strict=True))


def _same(x: Tensor, sides: tuple[tuple[int, int], ...]) -> bool:
    """Whether a tensor has these sizes and strides; that of a side of one entry means nothing."""
    each = zip(x.shape, x.stride(), sides, strict=True)
    return x.ndim == len(sides) and all(n == size and (n == 1 or s == stride) for n, s, (size, stride) in each)


_OPERATIONS: dict[Any, Callable[..., Iterator[Product]]] = {
    aten.linear.default: _linear,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten._grouped_mm.default: _grouped_mm,
    aten.convolution.default: _convolution,
}
