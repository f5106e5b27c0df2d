"""What the solver sends: little, in few rounds, with one budget or hundreds, and what it finds is what one process finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spartan import Sparsifier
from spartan.distributed import Ranks
from spartan.ops.parts import Part
from spartan.ops.select import SORT_ALL, Boundary, boundary
from spartan.problem.problem import Segment
from spartan.solvers.sharded import Memory, ShardedPools, share_of
from tests.distributed.cases import METHODS, weights
from tests.distributed.workers import on

LIMIT = 64 * 1024


@contextmanager
def counting() -> Iterator[list[int]]:
    """The bytes of each reduction inside."""
    real, found = dist.all_reduce, []

    def all_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(x.numel() * x.element_size())
        return real(x, *args, **kwargs)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield found
    finally:
        dist.all_reduce = real


# ---------------------------------------------------------------------- the search

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": torch.abs,
    "signed": lambda x: x,
    "ties": lambda x: x.bfloat16().float(),
    "many ties": lambda x: (x * 2).round(),
    "one value": torch.zeros_like,
    "mostly zero": lambda x: torch.where(x > 1.5, x, -0.0),
    "some at -∞": lambda x: torch.where(x > 0, x, -math.inf),
    "far apart": lambda x: x * 10.0 ** (30 * x),
    "float64": lambda x: x.double().exp(),
}


class Sharded:
    """The parts of a problem that a search needs, with units wherever a random number puts them."""

    def __init__(self, segments: list[list[tuple[Tensor, float]]], cuts: list[Tensor], rank: int) -> None:
        whole = [x for segment in segments for x in segment]
        mine = [(cut % dist.get_world_size() == rank).nonzero().flatten() for cut in cuts]
        self.problem, self.device, self.mine = self, torch.device("cpu"), mine
        self.ranks = Ranks([dist.group.WORLD], [True] * len(whole))
        self.units, self.all_units = [len(at) for at in mine], [x.numel() for x, _ in whole]
        self.unit_costs = [cost for _, cost in whole]
        self.values = torch.cat([x[at] for (x, _), at in zip(whole, mine, strict=True)])
        self.segments, self.first_position, first = [], [], 0
        for segment in segments:
            members = tuple(range(first, first + len(segment)))
            total = math.fsum(x.numel() * cost for x, cost in segment)
            self.segments.append(Segment(members, 0.0, total, total))
            self.first_position += [sum(x.numel() for x, _ in segment[:i]) for i in range(len(segment))]
            first += len(segment)
        self.slices = [slice(sum(self.units[:i]), sum(self.units[: i + 1])) for i in range(len(whole))]

    def members(self, segment: int) -> tuple[int, ...]:
        return self.segments[segment].targets

    def positions(self, i: int, device: torch.device, which: Tensor) -> Tensor:
        return self.mine[i][which] + self.first_position[i]


def same(found: tuple[Boundary, tuple[float, float]], expected: Boundary, u: Tensor) -> bool:
    edge, ends = found
    a, b = edge.threshold, expected.threshold
    # One process looks for the next values near the threshold only, where there are many.
    gaps = (edge.gap_above, edge.gap_below) == (expected.gap_above, expected.gap_below) or u.numel() > SORT_ALL
    exact = (a.value, a.cut) == (b.value, b.cut)
    close = math.isclose(a.cost, b.cost) and math.isclose(edge.fraction, expected.fraction, abs_tol=1e-6)
    return exact and gaps and close and (math.isinf(a.value) or ends == (float(u.min()), float(u.max())))


def searches(rank: int) -> list[str]:
    """Every kind of scores in three segments at once: with one cost, with another, and with both."""
    wrong = []
    for budget in (None, 200, 10_000):  # of so many segments, in bytes
        for name, score in SCORES.items():
            memory: list[Memory] = []  # it goes on from the last search, whether that helps or not
            for case in range(6):
                torch.manual_seed(case)
                n = (1, 2, 3, 40, 1000, 150_000 if budget is None else 5000)[case]
                u = [list(score(torch.randn(n)).split(max(1, n // 3))) for _ in range(3)]
                prices = [[1.0] * len(u[0]), [0.3] * len(u[1]), [(1.0, 0.25)[i % 2] for i in range(len(u[2]))]]
                segments = [list(zip(x, c, strict=True)) for x, c in zip(u, prices, strict=True)]
                cuts = [torch.randint(1 + case % 4, (x.numel(),)) for x in (*u[0], *u[1], *u[2])]
                sharded = Sharded(segments, cuts, rank)
                pools = ShardedPools(sharded)  # type: ignore[arg-type]
                pools.share = pools.share if budget is None else share_of(budget)
                for part in (0.0, 0.1, 1 / 3, 0.999):
                    pools._memory = memory or pools._memory
                    k = {s: part * segment.total for s, segment in enumerate(sharded.segments)}
                    found = pools.boundaries(sharded.values, k)
                    memory = pools._memory
                    for s, segment in enumerate(segments):
                        expected = boundary([Part(x, c) for x, c in segment], k[s])
                        if not same(found[s], expected, torch.cat([x for x, _ in segment])):
                            wrong.append(f"{name}, {budget} segments, case {case}, segment {s}, {part} of {n}")
    return wrong


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_threshold_is_that_of_one_process(world: int) -> None:
    for wrong in on(world, searches):
        assert wrong == []


# ---------------------------------------------------------------------- whole models


class Deep(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 1))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return self.head(x)


STEPS, BATCH = 6, 8


def deep(rank: int, sharded: bool, layers: int, budget: str) -> tuple[list[dict[str, Tensor]], list[int], Sparsifier]:
    """The weights and the bytes of every step."""
    torch.manual_seed(0)
    model = Deep(layers, 12).double()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    s = Sparsifier(model, 0.8, STEPS + 2, budget=budget, warmup=0.3, finetune=0.1)
    o = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    s.attach(o)
    found, sent = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        x, y = torch.randn(BATCH, 12, dtype=torch.float64), torch.randint(3, (BATCH,))
        part = slice(rank, None, dist.get_world_size()) if sharded else slice(None)
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        o.step()
        o.zero_grad()
        found.append(weights(model))
        sent.append(s.stats.bytes_sent)
    return found, sent, s


def many_layers(rank: int, layers: int, budget: str) -> dict[str, Any]:
    alone, _, _ = deep(rank, False, layers, budget)
    many, sent, s = deep(rank, True, layers, budget)
    same = [all(torch.equal(a[n] != 0, b[n] != 0) for n in a) for a, b in zip(alone, many, strict=True)]
    off = max(float((a[n] - b[n]).abs().max()) for a, b in zip(alone, many, strict=True) for n in a)
    # The masks of this moment once more.
    (solver,) = s._run.weights.solving
    before = solver.solution()
    with torch.no_grad(), counting() as sizes:
        s._run.method.choose(solver, s._run.at)
    return {"same": same, "off": off, "sent": sent, "again": before == solver.solution(), "rounds": len(sizes)}


@pytest.mark.parametrize(("layers", "budget"), [(200, "erk"), (3, "global")])
def test_a_step_stays_under_64_kib(layers: int, budget: str) -> None:
    first, second = on(2, many_layers, layers, budget)
    assert first["sent"] == second["sent"]
    assert all(0 < sent <= LIMIT for sent in first["sent"]), first["sent"]
    for found in (first, second):
        assert found["same"] == [True] * STEPS
        assert found["off"] <= 1e-12
        assert found["again"], "masks depend on who else is solved"
        assert found["rounds"] <= 12


def rounds(rank: int, layers: int, budget: str) -> list[int]:
    """The reductions of every step, masks and gradients."""
    torch.manual_seed(0)
    model = Deep(layers, 12).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    s = Sparsifier(model, 0.8, STEPS, budget=budget, warmup=0.0, finetune=0.0)
    o = torch.optim.SGD(model.parameters(), lr=0.02)
    s.attach(o)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        nn.functional.cross_entropy(
            model(torch.randn(BATCH, 12, dtype=torch.float64)), torch.randint(3, (BATCH,))
        ).backward()
        with counting() as sizes:
            o.step()
        o.zero_grad()
        found.append(len(sizes))
    return found


def test_the_reductions_of_a_step_do_not_depend_on_the_number_of_segments() -> None:
    """With a budget for each of 3, 30 and 100 layers a step takes as many as with one, but for a round of the search."""
    one = on(2, rounds, 100, "global")[0]
    for layers in (3, 30, 100):
        many = on(2, rounds, layers, "erk")[0]
        assert all(abs(a - b) <= 3 for a, b in zip(one, many, strict=True)), (layers, one, many)
        assert max(many) <= 14


@pytest.mark.parametrize(
    "method", ["topkast", "feather", "paced", "st3", "rigl", "movement", "probmask", "str", "spartan-learned"]
)
def test_nor_do_those_of_other_methods(method: str) -> None:
    few, many = (on(2, rounds_of, layers, method)[0] for layers in (4, 40))
    assert all(abs(a - b) <= 3 for a, b in zip(few, many, strict=True)), (few, many)


def rounds_of(rank: int, layers: int, method: str) -> list[int]:
    torch.manual_seed(0)
    model = Deep(layers, 12).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    s = Sparsifier(model, 0.8, STEPS, METHODS[method], budget="uniform", warmup=0.0, finetune=0.0)
    o = torch.optim.SGD(model.parameters(), lr=0.02)
    s.attach(o)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        model(torch.randn(BATCH, 12, dtype=torch.float64)).square().mean().backward()
        with counting() as sizes:
            o.step()
        o.zero_grad()
        found.append(len(sizes))
    return found
