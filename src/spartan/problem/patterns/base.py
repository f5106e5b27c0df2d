"""What a pattern is: how a weight divides into the units that live or die together.

A pattern turns a weight into a flat vector of units (`reduce` sums over each unit) and back (`expand`). Units stand in
row-major order of the weight, whatever its memory format. All that the rest of the library asks of a pattern is below;
a new one is one file, and recipes know it by its `name`.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from spartan.distributed import held


class Pattern(ABC):
    """How a weight divides into units."""

    # How a recipe names it; its arguments follow after colons. A pattern without a name is known to Python only.
    name: ClassVar[str] = ""
    # What a recipe may write, for help and errors.
    spelling: ClassVar[str] = ""
    # The budget that applies when the user does not say; None is the method's own.
    budget: ClassVar[str | None] = None
    # Whether every weight is a unit by itself, which then stand in the order of memory where that has no gaps.
    single: ClassVar[bool] = False
    # Whether its units run along the inputs or the outputs, so that it matters which axis is which.
    tells_inputs_from_outputs: ClassVar[bool] = False
    # Whether a unit is better judged by what the loss would lose with it than by its magnitude.
    judged_by_loss: ClassVar[bool] = False

    @property
    def rows(self) -> int | None:
        """m, where every m consecutive units have a budget of their own; None where all units compete."""
        return None

    def check(self, shape: Sequence[int], owner: nn.Module) -> None:
        """ValueError with the reason where a weight of this shape, of this layer, cannot take the pattern."""
        self.unit_size(shape)

    @abstractmethod
    def unit_size(self, shape: Sequence[int]) -> int:
        """Entries per unit of a weight of this shape; ValueError with the reason where it does not divide."""

    @abstractmethod
    def reduce(self, x: Tensor) -> Tensor:
        """Sum over each unit: a flat tensor, one entry per unit."""

    @abstractmethod
    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """Each unit's entry at every place of the unit: a tensor of `shape`, or one that broadcasts to it."""

    def sides(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """The rows and columns of a unit of a weight seen as a matrix; None where units are nothing of the kind."""
        return None

    def growing(self, shape: Sequence[int], device: torch.device) -> Tensor | None:
        """Which entries start from zero when a unit comes back, and tell how much it is wanted; None for all of them."""
        return None

    def density_at(self, density: float) -> float:
        """The density that is asked for when the schedule says `density`."""
        return density

    def check_budget(self, sparsity: float, budget: object, value_power: float, share: float) -> float:
        """The sparsity of the targets, exactly; ValueError for what the pattern cannot do.

        `share` is the targets' share of what is counted.
        """
        return sparsity

    def place(self, parameter: Tensor) -> "Place | None":
        """Where the units of this process's shard are; None where the border of a shard cuts a unit."""
        shape = tuple(parameter.shape)
        rows, *rest = held(parameter)
        sides = self.sides(shape)
        if sides is None:
            cut = any(index.numel() != n for index, n in zip([rows, *rest], shape, strict=True))
            n = parameter.numel() // self.unit_size(shape)
            return None if cut else Place(torch.zeros(1, dtype=torch.int64), torch.arange(n), (1, n))
        columns, wide = torch.zeros(1, dtype=torch.int64), 1
        for n, index in zip(shape[1:], rest, strict=True):
            columns, wide = (columns[:, None] * n + index).reshape(-1), wide * n
        h, w = sides
        if not (in_runs(rows, h) and in_runs(columns, w)):
            return None
        return Place(rows[::h] // h, columns[::w] // w, (shape[0] // h, wide // w))

    @classmethod
    def read(cls, value: object) -> "Pattern | None":
        """The pattern that a recipe's value stands for: its name, then arguments after colons. None if it is another's."""
        name, *arguments = value.split(":") if isinstance(value, str) else [""]
        if not cls.name or name != cls.name:
            return None
        fields: list[Any] = [f for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []
        if len(arguments) > len(fields):
            raise ValueError(f"{cls.__name__} has {len(fields)} arguments")
        try:
            return cls(*(int(a) if a.lstrip("-").isdigit() else a for a in arguments))
        except TypeError:
            raise ValueError(f"{cls.__name__} needs more arguments") from None


@dataclass(frozen=True)
class Place:
    """Where the units of a shard stand among those of the whole weight: rows × columns of a grid."""

    rows: Tensor
    columns: Tensor
    whole: tuple[int, int]  # the grid of the whole weight

    @property
    def units(self) -> int:
        """Units of the whole weight."""
        return self.whole[0] * self.whole[1]

    @property
    def first(self) -> int | None:
        """The position of the first unit if the others follow one by one, else None."""
        if not self.rows.numel() or not self.columns.numel():
            return 0
        full_rows = self.columns.numel() == self.whole[1]
        if full_rows and int(self.rows[-1] - self.rows[0]) + 1 == self.rows.numel():
            return int(self.rows[0]) * self.whole[1]
        return None

    @property
    def window(self) -> tuple[int, int, int, int] | None:
        """The first row and how many, the first column and how many; None where either do not follow one another."""
        found = []
        for index in (self.rows, self.columns):
            n = index.numel()
            if n and int(index[-1] - index[0]) + 1 != n:
                return None
            found += [int(index[0]) if n else 0, n]
        return found[0], found[1], found[2], found[3]

    def positions(self, device: torch.device, which: Tensor | None = None) -> Tensor:
        """The positions of these units of the shard, or of all."""
        rows, columns = self.rows.to(device), self.columns.to(device)
        if which is None:
            return (rows[:, None] * self.whole[1] + columns).reshape(-1)
        n = max(1, columns.numel())
        return rows[which // n] * self.whole[1] + columns[which % n]

    def cut_out(self, whole: Tensor) -> Tensor:
        """This shard's entries of a vector over all units."""
        first, n = self.first, self.rows.numel() * self.columns.numel()
        if first is not None:
            return whole[first : first + n].clone()
        return whole[self.positions(whole.device)]


def in_runs(index: Tensor, n: int) -> bool:
    """Whether the indices come in whole runs of n that begin at a multiple of n."""
    if index.numel() % n:
        return False
    runs = index.reshape(-1, n)
    return bool((runs[:, 0] % n == 0).all() and (runs == runs[:, :1] + torch.arange(n)).all())


def check_axes(pattern: Pattern, owner: nn.Module) -> None:
    """ValueError where a weight's axes are not outputs × inputs."""
    if isinstance(owner, _ConvTransposeNd):
        raise ValueError(f"{pattern!r} is for weights that stand as outputs × inputs, not for the transposed ones")


def kinds() -> Iterator[type[Pattern]]:
    """Every pattern that a recipe can name, this library's and those that others have defined."""
    waiting: list[type[Any]] = [Pattern]
    while waiting:
        kind = waiting.pop(0)
        waiting += kind.__subclasses__()
        if kind.name:
            yield kind


def read_pattern(value: object) -> Pattern:
    """The pattern that a recipe writes, such as `unstructured`, `[16, 16]`, `channel:in`, `nm:2:4` or `heads:3`.

    Example:
        >>> read_pattern("nm:2:4"), read_pattern([16, 16])
        (NM(2, 4), Block(h=16, w=16))
    """
    why = ""
    for kind in kinds():
        try:
            found = kind.read(value)
        except ValueError as error:
            why = f" ({error})"
            break
        if found is not None:
            return found
    accepted = ", ".join(kind.spelling for kind in kinds())
    raise ValueError(f"{value!r} is not accepted{why}; accepted: {accepted}")


def check_pattern(pattern: object) -> Pattern:
    """The pattern, or an error that says what is accepted."""
    if not isinstance(pattern, Pattern):
        raise ValueError(
            f"pattern={pattern!r} is not a pattern; pass Unstructured(), Block(h, w), Channel(), NM(n, m) or Heads(count)"
        )
    return pattern
