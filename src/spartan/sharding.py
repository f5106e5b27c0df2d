"""Weights that lie in shards on several processes: DTensors, as FSDP2 and tensor parallelism make them.

Every process works on its own shard. A unit keeps the position it has in the whole weight, so that ties are cut as on
one process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spartan.ops import spread
from spartan.ops.collective import Ranks
from spartan.ops.parts import Spread, check_budget, numel, slack, total_cost
from spartan.ops.select import Boundary, Bracket, Threshold, key_of, value_of
from spartan.patterns import NM, Block, Channel, Pattern, Unstructured

PLAIN = (Tensor, nn.Parameter)


def is_dtensor(tensor: object) -> bool:
    """Whether this is a DTensor. Importing their module takes long, and where nobody has, there is none."""
    if type(tensor) in PLAIN:  # asked a hundred times a step
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The shard that this process holds, in the same memory; the tensor itself where it is whole."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def version(tensor: Tensor) -> int:
    """A number that grows when the values change: through the DTensor, or behind its back in the shard."""
    return tensor._version + (local(tensor)._version if is_dtensor(tensor) else 0)


def like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A shard as a DTensor that lies over the processes as the parameter does; the shard itself for a plain one."""
    if not is_dtensor(parameter):
        return shard
    return as_dtensor(parameter, shard, tuple(parameter.shape))


def as_dtensor(parameter: Any, shard: Tensor, shape: Sequence[int]) -> Tensor:
    """A shard of something of that whole shape, sharded along the dimensions that the parameter is."""
    from torch.distributed.tensor import DTensor

    stride, n = [], 1
    for side in reversed(shape):
        stride.append(n)
        n *= side
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape),
        stride=tuple(reversed(stride)),
    )  # fmt: skip


def own_part(parameter: Any, tensor: Tensor) -> Tensor:
    """This process's part of a tensor of the parameter's shape: of a DTensor, or of a whole one."""
    if is_dtensor(tensor):
        return local(same_placement(parameter, tensor))
    for dim, index in enumerate(held(parameter)):
        if index.numel() != tensor.shape[dim]:
            tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor


def same_placement(parameter: Any, grad: Tensor) -> Tensor:
    """The gradient with the parameter's placements; a parallel layer may leave partial sums."""
    if is_dtensor(grad) and grad.placements != parameter.placements:  # type: ignore[attr-defined]
        return grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return grad


def sharded_dims(parameter: Any) -> list[tuple[int, int]]:
    """(mesh dimension, tensor dimension) of every sharding of a parameter, in the order in which they cut.

    FSDP2 over tensor parallelism marks its own with a split factor: it cuts what the latter has cut before.
    """
    if not is_dtensor(parameter):
        return []
    plain: list[tuple[int, int]] = []
    late: list[tuple[int, int]] = []
    for d, placement in enumerate(parameter.placements):
        if placement.is_partial():
            raise ValueError("a weight that is a partial sum cannot be ranked; redistribute it to Shard or Replicate")
        if hasattr(placement, "dim"):
            (late if hasattr(placement, "split_factor") else plain).append((d, placement.dim % parameter.ndim))
    return plain + late


def cuts_rows(parameter: Any) -> bool:
    """Whether the rows of a weight (its first dimension) are cut, and lie on several processes."""
    return any(dim != 0 for _, dim in sharded_dims(parameter))


def sum_over_cuts(parameter: Any, rows: Tensor) -> Tensor:
    """One number per row, added up over the processes that hold parts of the row."""
    groups = [parameter.device_mesh.get_group(d) for d, dim in sharded_dims(parameter) if dim != 0]
    return Ranks(groups, []).sum(rows.contiguous())


def held(parameter: Any) -> list[Tensor]:
    """Along each dimension, which indices of the whole weight this process holds."""
    found = [torch.arange(n) for n in parameter.shape]
    for d, dim in sharded_dims(parameter):
        mesh = parameter.device_mesh
        coordinate = mesh.get_coordinate()
        pieces = found[dim].chunk(mesh.size(d))
        mine = coordinate[d] if coordinate is not None else len(pieces)
        found[dim] = pieces[mine] if mine < len(pieces) else found[dim][:0]
    return found


@dataclass(frozen=True)
class Place:
    """Where the units of a shard stand among those of the whole weight: rows × columns of a grid `across` wide."""

    rows: Tensor
    columns: Tensor
    across: int
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
        full_rows = self.columns.numel() == self.across
        if full_rows and int(self.rows[-1] - self.rows[0]) + 1 == self.rows.numel():
            return int(self.rows[0]) * self.across
        return None

    def positions(self, device: torch.device, which: Tensor | None = None) -> Tensor:
        """The positions of these units of the shard, or of all."""
        rows, columns = self.rows.to(device), self.columns.to(device)
        if which is None:
            return (rows[:, None] * self.across + columns).reshape(-1)
        n = max(1, columns.numel())
        return rows[which // n] * self.across + columns[which % n]

    def cut_out(self, whole: Tensor) -> Tensor:
        """This shard's entries of a vector over all units."""
        first, n = self.first, self.rows.numel() * self.columns.numel()
        if first is not None:
            return whole[first : first + n].clone()
        return whole[self.positions(whole.device)]


def place(pattern: Pattern, parameter: Tensor) -> Place | None:
    """Where the units of this process's shard are; None where a unit is cut by the border of a shard."""
    shape = tuple(parameter.shape)
    rows, *rest = held(parameter)
    columns, whole_columns = torch.zeros(1, dtype=torch.int64), 1
    for n, index in zip(shape[1:], rest, strict=True):
        columns, whole_columns = (columns[:, None] * n + index).reshape(-1), whole_columns * n
    if isinstance(pattern, NM):  # inputs last
        inner = whole_columns // shape[1]
        if not _in_runs(rest[0], pattern.m):
            return None
        kernel = torch.arange(inner)
        for index, n in zip(rest[1:], shape[2:], strict=True):
            if index.numel() != n:
                return None
        columns = (kernel[:, None] * shape[1] + rest[0]).reshape(-1)
        return Place(rows, columns, whole_columns, (shape[0], whole_columns))
    sides = unit_sides(pattern, shape)
    if sides is None:
        cut = any(index.numel() != n for index, n in zip([rows, *rest], shape, strict=True))
        n = parameter.numel() // pattern.unit_size(shape)
        return None if cut else Place(torch.zeros(1, dtype=torch.int64), torch.arange(n), n, (1, n))
    h, w = sides
    if not (_in_runs(rows, h) and _in_runs(columns, w)):
        return None
    across = whole_columns // w
    return Place(rows[::h] // h, columns[::w] // w, across, (shape[0] // h, across))


def unit_sides(pattern: Pattern, shape: Sequence[int]) -> tuple[int, int] | None:
    """The rows and columns of a unit of a weight seen as a matrix; None where units are nothing of the kind."""
    rows, columns = shape[0], 1
    for n in shape[1:]:
        columns *= n
    if isinstance(pattern, Unstructured):
        return 1, 1
    if isinstance(pattern, Block):
        return (rows if pattern.h == -1 else pattern.h), (columns if pattern.w == -1 else pattern.w)
    if isinstance(pattern, Channel):
        return (1, columns) if pattern.side == "out" else (rows, columns // shape[1])
    return None


def _in_runs(index: Tensor, n: int) -> bool:
    """Whether the indices come in whole runs of n that begin at a multiple of n."""
    if index.numel() % n:
        return False
    runs = index.reshape(-1, n)
    return bool((runs[:, 0] % n == 0).all() and (runs == runs[:, :1] + torch.arange(n)).all())


def ranks_of(parameters: Sequence[Tensor]) -> Ranks | None:
    """The processes that hold the shards of these weights between them; None where each has them whole."""
    groups: dict[tuple[int, ...], Any] = {}
    over: list[set[tuple[int, ...]]] = []
    for parameter in parameters:
        mine = set()
        for d, _ in sharded_dims(parameter):
            group = parameter.device_mesh.get_group(d)  # type: ignore[attr-defined]
            key = tuple(dist.get_process_group_ranks(group))
            groups.setdefault(key, group)
            mine.add(key)
        over.append(mine)
    if not groups:
        return None
    # A weight that is whole along a dimension of the mesh is counted by the first process there.
    counts = [all(key in mine or dist.get_rank() == min(key) for key in groups) for mine in over]
    return Ranks(list(groups.values()), counts)


def check_shards(names: Sequence[str], parameters: Sequence[Tensor], pattern: Pattern) -> None:
    """ValueError, the same on every process, where a unit is cut, or a shard holds NaN or infinite weights."""
    ranks = ranks_of(parameters)
    bad = torch.zeros(2, len(parameters), dtype=torch.int32)
    for i, parameter in enumerate(parameters):
        bad[0, i] = is_dtensor(parameter) and place(pattern, parameter) is None
        bad[1, i] = not bool(torch.isfinite(local(parameter.detach())).all())
    if ranks is not None:
        bad = ranks.largest(bad.to(local(parameters[0]).device)).cpu()
    for i in bad[0].nonzero().flatten().tolist():
        raise ValueError(
            f"pattern: the border of a shard cuts a unit of {pattern!r} in {names[i]} of shape "
            f"{tuple(parameters[i].shape)}, placed as {getattr(parameters[i], 'placements', None)}; "
            "shard along the other dimension (fully_shard(…, shard_placement_fn=lambda p: Shard(1))), take blocks that "
            f"divide each process's rows, or leave that layer dense with exclude=[{names[i]!r}]"
        )
    for i in bad[1].nonzero().flatten().tolist():
        raise ValueError(f"{names[i]} holds NaN or infinite weights; they cannot be ranked")


def replicas(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP around a model, possibly compiled; None where there is none, or one process only."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model if dist.get_world_size(model.process_group) > 1 else None


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules whose weights FSDP2 makes whole for a forward pass."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# What the solver may send in a step, and what each group needs of it beside the search: Newton's sums, the gradient's.
BYTES, BESIDE = 64 * 1024, 96
MOST_WORDS = 256


class Search:
    """Exact selection among units on several processes, that remembers where it ended.

    The threshold moves little from step to step: the first pivots stand where the last two searches make one expect
    it. That saves rounds, and never changes what is found.

    Args:
        groups: how many groups search at the same time: the more, the fewer counts each sends in a round.
    """

    def __init__(self, groups: int = 1) -> None:
        self.groups = groups
        # Six rounds are seldom needed.
        self.words = min(max(int(BYTES / groups - BESIDE) // (6 * 8), 1), MOST_WORDS)
        self.last: int | None = None  # key of the last threshold
        self.move = 0  # how far it had come from the one before
        self.k = 0.0  # the budget then

    def boundary(self, parts: Spread, k: float) -> Boundary:
        """Where the budget runs out, as `select.boundary` finds it on one process, the same on every process."""
        if len({part.c for part in parts}) > 1:  # then costs are summed, not counts
            return spread.boundary(parts, k, spread.NARROW if self.groups > 1 else spread.DIGIT)
        total, n, cost = total_cost(parts), numel(parts), float(parts[0].c)
        k = check_budget(k, total)
        k += slack(k, total / n)
        if k >= total:
            return Boundary(Threshold(-math.inf, cost=total), 0.0, math.inf, math.inf)
        dtype, keys = parts[0].u.dtype, torch.cat([key_of(part.u) for part in parts])
        one = 1 << (52 if keys.dtype == torch.int64 else 23)  # between keys whose values differ by a factor of 2
        wanted, limits = min(math.floor(k / cost), n - 1), torch.iinfo(keys.dtype)
        if self.last is None or abs(k - self.k) > 0.02 * k:
            guess, reach = self._sampled(keys, parts.ranks, wanted / n), one >> 5
        else:
            guess, reach = self.last + self.move, max(abs(self.move), one >> 14)
        bracket = Bracket(limits.min, limits.max, n, wanted)
        (key, larger, equal), around = bracket.close(keys, parts.ranks, self.words, guess, reach)
        self.k, self.last, self.move = k, key, 0 if self.last is None else key - self.last
        value, over, below, low, high = (value_of(x, dtype) for x in (key, *around))
        room = k - larger * cost
        fit = min(max(math.floor(room / cost), 0), equal)
        cut = 0 if fit == 0 else n if fit == equal else self._cut(parts, value, equal, fit)
        return Boundary(
            Threshold(value, cut, cost=k - (room - fit * cost)),
            fraction=min(max(room / (equal * cost), 0.0), 1.0),
            gap_above=math.inf if math.isnan(over) else over - value,
            gap_below=math.inf if math.isnan(below) else value - below,
            ends=(low, high),
        )

    def _sampled(self, keys: Tensor, ranks: Ranks, q: float) -> int:
        """A key with about a fraction q of all above it: the mean of those that processes find in samples of theirs."""
        few = keys[:: max(1, keys.numel() >> 16)].sort(descending=True).values.double()
        mine = few[int(q * few.numel())] if few.numel() else few.new_zeros(())
        key, found = ranks.sum_told(torch.stack((mine, torch.full_like(mine, few.numel() > 0))))
        return int(key / found)

    def _cut(self, parts: Spread, value: float, equal: int, fit: int) -> int:
        """The position of the first unit equal to the threshold that does not fit."""
        tied = [at((part.u == value).nonzero().flatten()) for part, at in zip(parts, parts.positions, strict=True)]
        (key, _, _), _ = Bracket(1 - numel(parts), 0, equal, fit).close(-torch.cat(tied), parts.ranks, self.words)
        return -key
