"""Says which indices of which dimensions have to stay, and why: axes, and the rules between them.

Nothing stays until something asks for it: the model's outputs do, and from there on what they are computed from. So the
answer is the least that the rules allow.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

# The number of the reason that says least: a dimension that never was one of channels.
NO_CHANNEL = 1


class Axis:
    """A dimension that tensors have in common: an index is cut out of all of them or of none.

    `why` has for every index the number of the reason that it stays for; 0 where nothing asks for it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.why = torch.zeros(size, dtype=torch.int32)
        self.pinned = self.why  # what asks for them whatever the rules say
        self._joined: Axis | None = None

    @property
    def root(self) -> "Axis":
        """The axis that stands for all that were joined to it."""
        axis = self
        while axis._joined is not None:
            axis = axis._joined
        return axis

    @property
    def kept(self) -> Tensor:
        """Which indices stay, as booleans."""
        return self.root.why > 0

    @property
    def new_size(self) -> int:
        """How many indices stay."""
        return int(self.kept.sum())

    def join(self, other: "Axis") -> None:
        """From now on the two are one."""
        a, b = self.root, other.root
        assert a.size == b.size
        if a is not b:
            a.pinned = torch.maximum(a.pinned, b.pinned)
            b._joined = a

    def pin(self, reason: int, where: Tensor | None = None) -> None:
        """These indices (None: all) stay, whatever the rules say."""
        root = self.root
        asked = torch.full((self.size,), reason, dtype=torch.int32)
        root.pinned = torch.maximum(root.pinned, asked if where is None else asked * where)

    def mark(self, why: Tensor) -> bool:
        """These indices stay for these reasons; whether that is news of any."""
        root = self.root
        news = (root.why == 0) & (why > 0)
        if not bool(news.any()):
            return False
        root.why = torch.where(news, why.to(torch.int32), root.why)
        return True


class Reasons:
    """Sentences by number. The higher the number, the more it says."""

    def __init__(self) -> None:
        self._texts = ["", "they are no channels"]
        self._numbers = {text: n for n, text in enumerate(self._texts)}

    def number(self, text: str) -> int:
        """The number of a sentence, a new one if need be."""
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def text(self, number: int) -> str:
        """The sentence of a number."""
        return self._texts[number]


class Rule(Protocol):
    """What ties axes together."""

    @property
    def axes(self) -> Sequence[Axis]:
        """Those that it looks at."""

    def apply(self) -> list[Axis]:
        """Mark what has to stay because of what is marked; the axes with news."""


@dataclass(eq=False)
class Reshaped:
    """Two ways to divide the same entries into dimensions, such as H·d and (H, d): what stays is a box in both."""

    before: Sequence[Axis]
    after: Sequence[Axis]

    @property
    def axes(self) -> Sequence[Axis]:
        """All of both."""
        return [*self.before, *self.after]

    def apply(self) -> list[Axis]:
        """Whatever is in the box of one side is in that of the other."""
        flat = torch.maximum(_box(self.before), _box(self.after))
        return [axis for side in (self.before, self.after) for axis in _mark_sides(side, flat)]


def _box(axes: Sequence[Axis]) -> Tensor:
    """Entries all of whose indices stay, flat; of their reasons, the one that says most.

    That an axis is pinned as a whole says nothing about why an entry stays, unless all are.
    """
    free = [axis.root for axis in axes if not bool(axis.root.pinned.all())]
    whys = [axis.root.why if axis.root in free or not free else axis.root.why.clamp(max=1) for axis in axes]

    def cross(left: Tensor, right: Tensor) -> Tensor:
        a, b = left[:, None], right[None, :]
        return torch.where((a > 0) & (b > 0), torch.maximum(a, b), 0).reshape(-1)

    return reduce(cross, whys)


def _mark_sides(axes: Sequence[Axis], flat: Tensor) -> list[Axis]:
    grid = flat.reshape([axis.size for axis in axes])
    found = []
    for i, axis in enumerate(axes):
        others = [j for j in range(len(axes)) if j != i]
        if axis.mark(grid.amax(others) if others else grid):
            found.append(axis)
    return found


@dataclass(eq=False)
class Joined:
    """Parts one behind the other, as `cat` and `split` have them."""

    whole: Axis
    parts: Sequence[Axis]

    @property
    def axes(self) -> Sequence[Axis]:
        """The whole and its parts."""
        return [self.whole, *self.parts]

    def apply(self) -> list[Axis]:
        """An index of a part is one of the whole."""
        sizes = [part.size for part in self.parts]
        found = [self.whole] if self.whole.mark(torch.cat([part.root.why for part in self.parts])) else []
        for part, why in zip(self.parts, self.whole.root.why.split(sizes), strict=True):
            if part.mark(why):
                found.append(part)
        return found


@dataclass(eq=False)
class WeightedSum:
    """A product with a weight, which reads the indices of one axis and writes those of another.

    An input is asked for where it varies and an output that stays has a weight for it that is not zero. One that is a
    constant is not: the bias takes it over, or another constant input that stays (`spartan.shrink.folding`).
    """

    inputs: Axis
    outputs: Axis
    weight: Tensor  # as it is stored
    turned: Callable[[Tensor], Tensor]  # the same as outputs × inputs of a group × anything
    groups: int
    varies: Tensor  # by input: whether it depends on what the model is given, or on the position
    constant: Tensor  # by input: its value where it does not vary
    into_bias: bool  # whether the bias can take constants over
    into_weight: bool  # whether a constant input that stays can
    reason: int
    weight_node: Any  # of the graph, and the bias's, if there is one
    bias_node: Any
    _read: tuple[Tensor, Tensor] | None = None  # what the last answer was, and for which outputs

    @property
    def axes(self) -> Sequence[Axis]:
        """Inputs and outputs."""
        return [self.inputs, self.outputs]

    def is_read(self) -> Tensor:
        """By input: whether an output that stays has a weight for it."""
        kept = self.outputs.kept
        if self._read is not None and torch.equal(self._read[0], kept):
            return self._read[1]
        weight = self.turned(self.weight)
        nonzero = (weight != 0).reshape(*weight.shape[:2], -1).any(2).cpu().reshape(self.groups, -1, weight.shape[1])
        found = (nonzero & kept.reshape(self.groups, -1, 1)).any(1).reshape(-1)
        self._read = kept, found
        return found

    def constants_read(self) -> Tensor:
        """By input: whether it is read and a constant other than zero."""
        return ~self.varies & (self.constant != 0) & self.is_read()

    def apply(self) -> list[Axis]:
        """Ask for the inputs that are needed."""
        asked = self.varies
        if not (self.into_bias or self.into_weight):
            asked = asked | (self.constant != 0)
        return [self.inputs] if self.inputs.mark(self.reason * (asked & self.is_read())) else []

    def ask_for_carrier(self, reason: int) -> list[Axis]:
        """See to it that of constants which no bias takes over one stays, the largest, for the weights of the others.

        One that is much smaller than those it stands for would lose digits.
        """
        if self.into_bias or not self.into_weight or not bool(self.constant.any()):
            return []
        lost = self.constants_read() & ~self.inputs.kept
        sizes = self.constant.abs()
        here = torch.where(self.inputs.kept & ~self.varies, sizes, 0)
        if not bool(lost.any()) or here.max() >= 0.1 * torch.where(lost, sizes, 0).max():
            return []
        chosen = torch.zeros_like(self.inputs.root.why)
        chosen[torch.where(lost, sizes, -1).argmax()] = reason
        return [self.inputs] if self.inputs.mark(chosen) else []


@dataclass
class Ties:
    """All axes of a graph and the rules between them."""

    reasons: Reasons = field(default_factory=Reasons)
    every: list[Axis] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    # sizes that modules keep in attributes: the operation, the attribute and the axis that it is the size of
    counts: list[tuple[Any, str, Axis]] = field(default_factory=list)
    # channels that are constant but at borders: their axis, which of its indices, and the number of that reason
    borders: list[tuple[Axis, Tensor, int]] = field(default_factory=list)

    def axis(self, size: int, reason: int = 0) -> Axis:
        """A new axis, pinned where there is a reason."""
        axis = Axis(size)
        self.every.append(axis)
        if reason:
            axis.pin(reason)
        return axis

    def reshape(self, axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
        """The axes of a tensor with these axes once it has this shape."""
        found: list[Axis] = []
        for before, after in regroup([axis.size for axis in axes], shape):
            old = [axes[i] for i in before if axes[i].size != 1]
            sizes = [shape[j] for j in after]
            if len(old) == 1 and sizes.count(1) == len(sizes) - 1:
                new = [old[0] if n != 1 else self.axis(1, NO_CHANNEL) for n in sizes]
            else:
                new = [self.axis(n, int(n == 1)) for n in sizes]
                wide = [axis for axis in new if axis.size != 1]
                if old and wide:
                    self.rules.append(Reshaped(old, wide))
            found += new
        return found

    def solve(self, whole: Mapping[Axis, int]) -> None:
        """Find what stays; `whole` are axes of which everything does this time, with the reasons for it."""
        for axis in self.every:
            axis.root.why = axis.root.pinned
        for axis, reason in whole.items():
            axis.mark(torch.full((axis.size,), reason))
        users: dict[int, list[Rule]] = {}
        for rule in self.rules:
            for axis in rule.axes:
                users.setdefault(id(axis.root), []).append(rule)
        last = self.reasons.number("a layer has one channel at least")
        carrier = self.reasons.number("they are constant, and one constant is kept for all that the same layer reads")
        readings = [rule for rule in self.rules if isinstance(rule, WeightedSum)]
        roots = [axis for axis in reversed(self.every) if axis.root is axis and axis.size]
        self._close(self.rules, users)
        while True:
            news = [axis for reading in readings for axis in reading.ask_for_carrier(carrier)]
            if not news:
                # The last one first: what it asks for may be in others.
                news = [axis for axis in roots if not axis.new_size][:1]
                if not news:
                    return
                news[0].mark(last * (torch.arange(news[0].size) == 0))
            self._close([rule for axis in news for rule in users.get(id(axis.root), ())], users)

    @staticmethod
    def _close(rules: Iterable[Rule], users: dict[int, list[Rule]]) -> None:
        waiting = deque(dict.fromkeys(rules))
        queued = set(map(id, waiting))
        while waiting:
            rule = waiting.popleft()
            queued.discard(id(rule))
            for axis in rule.apply():
                for other in users.get(id(axis.root), ()):
                    if id(other) not in queued:
                        queued.add(id(other))
                        waiting.append(other)

    def parts(self) -> list[list[Axis]]:
        """Axes that lose indices, those together that have to lose theirs together."""
        of: dict[int, list[Axis]] = {}
        for axis in self.every:
            if axis.root is axis and axis.new_size < axis.size:
                of[id(axis)] = [axis]
        for rule in self.rules:
            if isinstance(rule, WeightedSum):
                continue
            roots = [id(axis.root) for axis in rule.axes if id(axis.root) in of]
            for root in roots[1:]:
                first, other = of[roots[0]], of[root]
                if other is not first:
                    first += other
                    of |= {id(axis): first for axis in other}
        return list({id(part): part for part in of.values()}.values())


def regroup(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Which dimensions of a reshape become which: the shortest runs with as many entries on both sides.

    Example:
        >>> regroup([2, 9, 64], [2, 9, 4, 16]), regroup([2, 12, 3, 3], [2, 108])
        ([([0], [0]), ([1], [1]), ([2], [2, 3])], [([0], [0]), ([1, 2, 3], [1])])
    """
    if math.prod(before) == 0:
        return [([*range(len(before))], [*range(len(after))])]
    starts = [1, *accumulate(before, int.__mul__)], [1, *accumulate(after, int.__mul__)]
    cuts = sorted(set(starts[0]) & set(starts[1]))
    groups = []
    for low, high in pairwise(cuts):
        # A dimension of size 1 begins where it ends; it goes with the run that begins there.
        sides = [[i for i in range(len(s) - 1) if low <= s[i] and s[i + 1] <= high and s[i] < high] for s in starts]
        groups.append((sides[0], sides[1]))
    if not groups:
        return [([*range(len(before))], [*range(len(after))])]
    ones = [[i for i in range(len(s) - 1) if s[i] == cuts[-1]] for s in starts]
    groups[-1] = (groups[-1][0] + ones[0], groups[-1][1] + ones[1])
    return groups
