"""Which groups the kernels can work on, and who decides."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.patterns import NM, Unstructured
from spartan.sharding import is_dtensor, unit_sides

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine
    from spartan.kernels.frozen_engine import FrozenEngine
    from spartan.kernels.team import FrozenTeam, Team
    from spartan.kernels.triton_engine import TritonEngine

KERNELS = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_RUN = 64  # of N:M: every entry is compared with all of its run
CHUNKED = 1 << 16  # on a CPU, more weights than these are worth going through in chunks


def check_kernels(kernels: str) -> str:
    """The argument, or an error that says what is accepted."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} is unknown; accepted: {', '.join(map(repr, KERNELS))}")
    if kernels == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("kernels='triton': Triton is not installed; pip install triton, or use kernels='auto'")
    return kernels


def why_not(group: Group, kernels: str, any_order: bool = False) -> str:
    """Why plain torch does the work of a group; "" where kernels can.

    With `any_order` they read weights in whatever order these lie, as long as there are no gaps.
    """
    device = group.targets[0].parameter.device
    if kernels == "torch":
        return "kernels='torch'"
    if any(is_dtensor(t.parameter) for t in group.targets):
        return "weights in shards"
    if kernels == "auto" and (device.type != "cuda" or torch.version.hip is not None):
        return "no NVIDIA device" if device.type == "cuda" else f"on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    dtypes = {t.parameter.dtype for t in group.targets}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"weights of {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}"
    for target in group.targets:
        if target.dense_stride is None:
            return f"{target.name} has gaps in its memory"
        # The order that ties are cut by and kept places are listed in.
        if not (any_order or group.fused or target.parameter.is_contiguous()):
            return f"{target.name} is not in row-major order"
    return ""


def engine_for(
    group: Group, thetas: Sequence[Tensor], bad: Tensor, first: int, out: Tensor, kernels: str
) -> tuple[Engine | None, str]:
    """The kernels of a group with these dense weights, None where plain torch does the work; and why."""
    if kernels == "auto" and _suits_chunks(group):
        from spartan.kernels.chunk_engine import ChunkEngine

        chunked = ChunkEngine([t.parameter for t in group.targets], thetas, group.prices, group.factors)
        return chunked, "torch in chunks that fit the cache"
    why = why_not(group, kernels, any_order=not isinstance(group.pattern, Unstructured))
    runs = isinstance(group.pattern, NM) and group.pattern.m <= LONGEST_RUN
    sides = None if why else _sides(group)
    if not why and sides is None and not runs:
        why = f"no kernels for {group.pattern!r}"
    if not why and any(t.numel >= 1 << 31 for t in group.targets) and not isinstance(group.pattern, Unstructured):
        why = "a weight of 2³¹ entries or more"
    if why:
        return None, f"plain torch ({why})"
    from spartan.kernels.nm_engine import NMEngine
    from spartan.kernels.triton_engine import TritonEngine
    from spartan.kernels.unit_engine import UnitEngine, grid_of

    parameters = [t.parameter for t in group.targets]  # themselves: someone may give them other memory
    if isinstance(group.pattern, NM):
        strides = [t.parameter.stride(1) for t in group.targets]
        rest = parameters, thetas, group.unit_costs, group.factors, bad, first, out
        return NMEngine(group, group.pattern.m, strides, *rest), "triton kernels"
    if isinstance(group.pattern, Unstructured):
        factors = [c ** (group.power - 1.0) for c in group.prices]
        return TritonEngine(parameters, thetas, group.prices, factors, bad, first, out), "triton kernels"
    assert sides is not None
    grids = [grid_of(t.parameter, *side) for t, side in zip(group.targets, sides, strict=True)]
    return UnitEngine(grids, parameters, thetas, group.unit_costs, group.factors, bad, first, out), "triton kernels"


def _suits_chunks(group: Group) -> bool:
    """Single weights on a CPU, in row-major order, and many of them: a few are done before a loop has begun."""
    if not isinstance(group.pattern, Unstructured) or group.fused or sum(t.numel for t in group.targets) <= CHUNKED:
        return False
    if any(is_dtensor(t.parameter) for t in group.targets):
        return False
    kinds = {(t.parameter.device.type, t.parameter.dtype) for t in group.targets}
    suits = kinds in ({("cpu", torch.float32)}, {("cpu", torch.float64)})
    return suits and all(t.parameter.is_contiguous() for t in group.targets)


def frozen_engine_for(
    group: Group,
    lists: Sequence[tuple[Tensor, Tensor, Tensor]],
    bad: Tensor,
    first: int,
    kernels: str,
) -> tuple[FrozenEngine | None, str]:
    """The kernels of a group whose mask is fixed, from θ, the mask and the place of the kept entries of each tensor."""
    why = why_not(group, kernels, any_order=True)  # places are listed in the order of memory
    if not why and len({index.dtype for _, _, index in lists}) > 1:
        why = "weights of both under and over 2³¹ entries"
    if why:
        return None, f"plain torch ({why})"
    from spartan.kernels.frozen_engine import FrozenEngine

    slabs, start = [], 0
    for target in group.targets:
        slabs.append(start)
        start += target.numel if group.fused else 0
    each = list(lists) * len(group.targets) if group.fused else list(lists)
    thetas, masks, indices = ([one[i] for one in each] for i in range(3))
    parameters = [t.parameter for t in group.targets]
    return FrozenEngine(parameters, slabs, thetas, masks, indices, bad, first), "triton kernels"


class Teams:
    """Who launches kernels for many groups at once, where there are many.

    Args:
        groups: all of them, with their engines.
        out: two numbers a group that the gradients leave.
    """

    def __init__(self, groups: Sequence[Group], out: Tensor) -> None:
        owners = [group.index for group in groups for _ in group.targets]
        engines: dict[torch.dtype, dict[int, TritonEngine]] = {}
        frozen: dict[tuple[torch.dtype, torch.dtype], list[FrozenEngine]] = {}
        for group in groups:
            fixed = group.frozen_engine
            if fixed is not None:
                frozen.setdefault((fixed.dtype, fixed.index_dtype), []).append(fixed)
            elif group.engine is not None and group.engine.joins:
                engine = cast("TritonEngine", group.engine)
                engines.setdefault(engine.dtype, {})[group.index] = engine
        self._solving: list[Team] = []
        self._fixed: list[FrozenTeam] = []
        if any(len(some) > 1 for some in (*engines.values(), *frozen.values())):
            from spartan.kernels.team import FrozenTeam, Team

            self._solving = [Team(some, owners, out) for some in engines.values() if len(some) > 1]
            self._fixed = [FrozenTeam(some, len(owners)) for some in frozen.values() if len(some) > 1]

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, what kernels do for many groups is left to the end, and then launched for all of them."""
        with ExitStack() as stack:
            for team in (*self._solving, *self._fixed):
                stack.enter_context(team.at_once())
            yield

    @contextmanager
    def expecting(self, asks: Mapping[int, tuple[float, float | None]]) -> Iterator[None]:
        """Inside, groups are likely to ask for masks with these budgets k and β, None or infinite for a hard mask."""
        hard = {g: (k, None if beta is not None and math.isinf(beta) else beta) for g, (k, beta) in asks.items()}
        with ExitStack() as stack:
            for team in self._solving:
                stack.enter_context(team.expecting(hard))
            yield


def paths(groups: Sequence[Group]) -> str:
    """What does the work of the groups: kernels, or plain torch and why."""
    found: dict[str, int] = {}
    for group in groups:
        found[group.path] = found.get(group.path, 0) + 1
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{path}: {n} of {len(groups)} groups" for path, n in found.items())


def _sides(group: Group) -> list[tuple[int, int]] | None:
    """The rows and columns of a unit of each target, seen as a matrix; None where units are nothing of the kind."""
    found = [unit_sides(group.pattern, target.shape) for target in group.targets]
    sides = [side for side in found if side is not None]
    return sides if len(sides) == len(found) else None
