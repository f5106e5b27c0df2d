"""What the solver sends: little, in few rounds, with one budget or hundreds, and what it finds is what one process finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import active_count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spartan import Sparsifier
from spartan.ops.collective import Ranks, side_by_side
from spartan.ops.parts import Part, Spread
from spartan.ops.select import SORT_ALL, Boundary, boundary
from spartan.sharding import Search
from tests.distributed.cases import weights
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


def split(u: list[Tensor], cost: float, rank: int, cuts: Tensor) -> Spread:
    """The units of this process: those that a random number gives it, all or none of them too."""
    mine = [(c % dist.get_world_size() == rank).nonzero().flatten() for c in cuts.split([x.numel() for x in u])]
    starts = [sum(x.numel() for x in u[:i]) for i in range(len(u))]
    where = [lambda index, at=at, start=start: at[index] + start for at, start in zip(mine, starts, strict=True)]
    parts = [Part(x[at], cost) for x, at in zip(u, mine, strict=True)]
    return Spread(parts, [x.numel() for x in u], Ranks([dist.group.WORLD], [True] * len(u)), where)


def same(found: Boundary, expected: Boundary, u: Tensor) -> bool:
    a, b = found.threshold, expected.threshold
    # One process looks for the next values near the threshold only, where there are many.
    gaps = (found.gap_above, found.gap_below) == (expected.gap_above, expected.gap_below) or u.numel() > SORT_ALL
    exact = (a.value, a.cut) == (b.value, b.cut)
    close = math.isclose(float(a.cost), float(b.cost)) and math.isclose(found.fraction, expected.fraction, abs_tol=1e-6)
    return exact and gaps and close and found.ends in (None, (float(u.min()), float(u.max())))


def searches(rank: int) -> list[str]:
    wrong = []
    for groups in (1, 200, 10_000):
        for name, score in SCORES.items():
            search = Search(groups)  # it goes on from the last search, whether that helps or not
            for case in range(6):
                torch.manual_seed(case)
                n = (1, 2, 3, 40, 1000, 150_000 if groups == 1 else 5000)[case % 6]
                u, cost = list(score(torch.randn(n)).split(max(1, n // 3))), (1.0, 0.3)[case % 2]
                cuts = torch.randint(1 + case % 4, (n,))
                for part in (0.0, 0.1, 1 / 3, 0.999):
                    k = part * n * cost
                    expected = boundary([Part(x, cost) for x in u], k)
                    if not same(search.boundary(split(u, cost, rank, cuts), k), expected, torch.cat(u)):
                        wrong.append(f"{name}, {groups} groups, case {case}, {part} of {n}")
    return wrong


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_threshold_is_that_of_one_process(world: int) -> None:
    for wrong in on(world, searches):
        assert wrong == []


# ---------------------------------------------------------------------- several jobs


def several_jobs(rank: int) -> list[Any]:
    everyone, half = Ranks([dist.group.WORLD], [True]), Ranks([dist.group.WORLD, dist.group.WORLD], [True])
    told: dict[int, list[Any]] = {}

    def job(i: int) -> None:
        assert not torch.is_grad_enabled()
        x = torch.full((i,), rank + 1.0)
        told[i] = everyone.sum(x).tolist()
        assert x.tolist() == told[i]  # in place
        for _ in range(i % 3):  # some ask for less than others
            told[i] += everyone.sum_told(torch.tensor([i + rank], dtype=torch.float64))
        told[i] += everyone.largest_told(torch.tensor([i * rank, -rank], dtype=torch.int32))
        told[i] += [int(everyone.smallest(torch.tensor(i + rank)))]
        told[i] += half.sum_told(torch.ones(1))

    with torch.no_grad():
        for i in range(1, 8):
            job(i)
        one_by_one, told = told, {}
        everyone.sent = 0
        with counting() as sent:
            side_by_side([partial(job, i) for i in range(1, 8)], everyone)
    # 1 sum in float32, 2 in float64, the largest, the smallest; and one over two dimensions of a mesh.
    return [told == one_by_one, len(sent), everyone.sent == sum(sent[:-2]), active_count()]


def test_jobs_share_their_reductions() -> None:
    first, second = on(2, several_jobs)
    assert first == second == [True, 1 + 2 + 1 + 1 + 2, True, 1]


def failing_jobs(rank: int) -> list[Any]:
    everyone = Ranks([dist.group.WORLD], [True])
    ended: list[str] = []

    def patient() -> None:
        try:
            everyone.sum(torch.ones(1))
            everyone.largest(torch.ones(1))
        finally:
            ended.append("patient")

    def failing() -> None:
        everyone.sum(torch.ones(1))
        raise ValueError("no such mask")

    try:
        side_by_side([patient, failing, patient], everyone)
    except ValueError as error:
        ended.append(str(error))
    alive = float(everyone.sum(torch.ones(1)))  # and the processes can still talk
    return [sorted(ended), alive, active_count()]


def test_the_error_of_one_job_ends_all() -> None:
    for found in on(2, failing_jobs):
        assert found == [["no such mask", "patient", "patient"], 2.0, 1]


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
    # The masks of this moment once more, with all groups side by side.
    run, jobs = s._run, []
    before = [(g.threshold, g.dual) for g in run.plan.groups]
    for group, thetas in run.groups():
        jobs.append(partial(run.method.choose, group, thetas, run.at))
    with torch.no_grad(), counting() as sizes:
        side_by_side(jobs, run.ranks)
    again = before == [(g.threshold, g.dual) for g in run.plan.groups]
    return {"same": same, "off": off, "sent": sent, "again": again, "rounds": len(sizes)}


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
