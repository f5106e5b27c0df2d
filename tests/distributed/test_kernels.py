"""Kernels on weights in shards, through Triton's interpreter: what one process finds in plain torch, on all processes."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from spartan import IMP, NM, Block, Channel, Sparsifier, Spartan, TopKAST, linear
from spartan.methods import ST3, STR, Feather, Method, Movement, RigL, SpartanLearned  # type: ignore[attr-defined]
from spartan.solvers.forms import KEPT, VJP, Form, Mask, Shrunk, Stored, Where
from spartan.solvers.torch import TorchSolver
from spartan.state.sharded import load_sharded, save_sharded
from tests.contract.kinds import Hurried
from tests.distributed.cases import whole
from tests.distributed.workers import on
from tests.solvers.building import build, problem_of, set_theta, weights_of

# Triton is not to be imported here: processes ask for the interpreter before they do.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's; tests/gpu has the others"),
]


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels through the interpreter, in a process that has not imported Triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of infinite numbers
        yield


# ---------------------------------------------------------------------- one solver

SHAPES = [(7, 5), (1, 9), (16, 12), (5, 3, 2), (3, 40)]
PLACES: dict[str, list[Placement]] = {
    "rows": [Shard(0)] * 5,
    "columns": [Shard(1)] * 5,
    "mixed": [Shard(0), Replicate(), Shard(1), Shard(0), Replicate()],
}
KINDS: dict[str, Any] = {
    "one budget": {},
    "prices": {"prices": [1.0, 0.3, 1.0, 2.5, 0.1]},
    "segments": {"owners": [0, 1, 0, 2, 1], "prices": [1.0, 0.3, 1.0, 2.5, 0.7], "value_power": 0.5},
}


def tensors(seed: int, ties: bool) -> list[Tensor]:
    torch.manual_seed(seed)
    found = [torch.randn(shape) for shape in SHAPES]
    return [(2 * x).round() / 2 for x in found] if ties else found


def solvers(places: str, kind: str, seed: int, ties: bool, **options: Any) -> tuple[Any, Any]:
    """In plain torch on one process, and by kernels on all of them."""
    from spartan.solvers.triton.shards import ShardedSingles

    values, mesh = tensors(seed, ties), init_device_mesh("cpu", (dist.get_world_size(),))
    shards = [distribute_tensor(x, mesh, [place]) for x, place in zip(values, PLACES[places], strict=True)]
    settings = KINDS[kind] | options
    plain = build(TorchSolver, problem_of(values, **settings))
    return plain, build(ShardedSingles, problem_of(shards, **settings))


def full(solver: Any, units: Tensor) -> Tensor:
    """A number per unit here as one per unit of the whole weights."""
    found = []
    for i, here in enumerate(solver.problem.slices):
        target = solver.problem.targets[i]
        shard = target.unflatten(units[here].clone())
        parameter = target.parameter
        mine = type(parameter.data).from_local(
            shard, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
        found.append(mine.full_tensor().reshape(-1))
    return torch.cat(found)


def check_masks(plain: Any, fast: Any, k: list[float], beta: list[float] | None, what: str) -> list[str]:
    """What is wrong with what was solved for."""
    found = []
    for solver in (plain, fast):
        solver.solve(k, beta)
    form = Form()
    keep = full(fast, fast.kept(form).float()) != 0
    if not torch.equal(plain.kept(form), keep):
        found.append(f"{what}: {int((plain.kept(form) != keep).sum())} masks differ")
    if not torch.equal(plain.a.value, fast.a.value) or not torch.equal(plain.a.cut, fast.a.cut):
        found.append(f"{what}: {plain.solution()['a']} is not {fast.solution()['a']}")
    if not torch.allclose(plain.a.cost, fast.a.cost):
        found.append(f"{what}: costs {plain.a.cost.tolist()} and {fast.a.cost.tolist()}")
    fast.write(form)
    plain.write(form)
    for a, b in zip(weights_of(plain), weights_of(fast), strict=True):
        if not torch.equal(a, whole(b)):
            found.append(f"{what}: w differs")
    if beta is not None:
        m = full(fast, fast.pools.soft(fast.scores(), fast.dual))
        if not torch.allclose(m, plain.pools.soft(plain.scores(), plain.dual), atol=1e-4):
            found.append(f"{what}: the soft mask differs")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [x.tolist() for x in fast.decisive()])
    return found if everyone[0] == everyone[-1] else [*found, f"{what}: processes differ"]


# The interpreter is slow: some of these always, the rest with the slow tests.
SOME = [("rows", "segments", True), ("columns", "prices", True), ("mixed", "one budget", False)]
OTHERS = [(places, kind, ties) for places in PLACES for kind in KINDS for ties in (False, True)]
BUDGETS = ((0.3, 5.0), (0.31, 5.5), (0.0, None), (0.999, 50.0), (1.0, 1.0))


def searches(rank: int, cases: list[tuple[str, str, bool]]) -> list[str]:
    """Thresholds and soft masks, from nothing and from the last; wherever the weights lie, with ties and without."""
    wrong = []
    with interpreted():
        for places, kind, ties in cases:
            plain, fast = solvers(places, kind, 0, ties)
            for step, (part, beta) in enumerate(BUDGETS[: 2 if cases == SOME else None]):
                values = [x + 0.01 * step * x.sign() * (not ties) for x in tensors(0, ties)]
                set_theta(plain, values)
                mine = zip(values, fast.problem.targets, strict=True)
                set_theta(
                    fast,
                    [distribute_tensor(x, t.parameter.device_mesh, t.parameter.placements).to_local() for x, t in mine],
                )
                k = [part * segment.total for segment in plain.problem.segments]
                betas = None if beta is None else [beta] * len(k)
                wrong += check_masks(plain, fast, k, betas, f"{places}, {kind}, ties {ties}, {part}")
    return wrong


FORMS = {
    "kept": Form(Mask.ONE, KEPT, Where(0.1, 0.2, 0.3)),
    "soft": Form(Mask.SOFT, VJP.THROUGH),
    "unprojected": Form(Mask.SOFT, VJP.THROUGH, project=False),
    "b": Form(Mask.ONE, Where(1.0, 0.5, 0.0), Where(0.0, 0.1, 0.2)),
    "shrunk": Form(Shrunk(1.0), Where(1.0, 0.25, 0.25)),
    "shrunk, p": Form(Shrunk(2.5), Where(1.0, 0.25, 0.25)),
    "shrunk, rows": Form(Shrunk(1.0, row_scale=True), Where(1.0, 1.0, 1.0)),
    "stored": Form(Stored("A"), KEPT),
}


def forms(rank: int, cases: list[tuple[str, str, bool]]) -> list[str]:
    """w, gradients and decay as forms say, with ties across shards."""
    wrong = []
    with interpreted():
        for number, (places, kind, _) in enumerate(cases):
            few = [list(FORMS)[i] for i in range(number, len(FORMS), len(cases))]
            for name, form in ((name, FORMS[name]) for name in (few if cases == SOME else FORMS)):
                plain, fast = solvers(places, kind, 1, name != "soft")
                k = [0.3 * segment.total for segment in plain.problem.segments]
                torch.manual_seed(2)
                stored, grads = torch.rand(plain.count) < 0.4, [torch.randn(shape) for shape in SHAPES]
                grads[1] = torch.zeros_like(grads[1])
                for solver in (plain, fast):
                    solver.solve(k, [4.0] * len(k) if form.mask is Mask.SOFT else None)
                    if name == "b":
                        solver.b = solver.select([2 * x for x in k], solver.scores())
                targets = fast.problem.targets
                cut = [p.cut_out(stored[s]) for p, s in zip(fast.problem.places, plain.problem.slices, strict=True)]
                plain.state.per_unit["A"], fast.state.per_unit["A"] = stored, torch.cat(cut)
                placed = [(t.parameter.device_mesh, t.parameter.placements) for t in targets]
                given = [distribute_tensor(g, *at).to_local().clone() for g, at in zip(grads, placed, strict=True)]
                expected, turned = plain.turn(form, [g.clone() for g in grads]), fast.turn(form, given)
                plain.write(form)
                fast.write(form)
                if form.decay is not None:
                    plain.add_decay(form, expected)
                    fast.add_decay(form, turned)
                for i, (g, x) in enumerate(zip(expected, turned, strict=True)):
                    same = torch.allclose(distribute_tensor(g, *placed[i]).to_local(), x, rtol=1e-4, atol=1e-5)
                    wrong += [] if same else [f"{name}, {places}, {kind}: gradient {i}"]
                    w, its = plain.problem.targets[i].local, whole(targets[i].parameter)
                    if not torch.equal(w == 0, its == 0) or not torch.allclose(w, its, rtol=1e-4, atol=1e-6):
                        wrong.append(f"{name}, {places}, {kind}: w {i}")
    return wrong


def both(rank: int, cases: list[tuple[str, str, bool]]) -> list[str]:
    return searches(rank, cases) + forms(rank, cases)


@pytest.mark.parametrize("cases", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_what_one_process_finds(cases: list[tuple[str, str, bool]]) -> None:
    for wrong in on(2, both, cases):
        assert wrong == []


# ---------------------------------------------------------------------- whole runs

STEPS = 4
RUNS: dict[str, tuple[Method, dict[str, Any]]] = {
    "spartan": (Spartan(beta=linear(1, 20)), {}),
    "a budget per layer": (Spartan(beta=linear(1, 20)), {"budget": "uniform"}),
    "topkast": (TopKAST(backward_sparsity=0.25, exploration=1e-2), {}),
    "imp": (IMP(), {}),
    "st3": (ST3(), {}),
    "feather": (Feather(p=2.5), {}),
    "paced": (Hurried(), {}),
    "paced, in blocks": (Hurried(), {"pattern": Block(2, 2)}),
    "learned": (SpartanLearned(beta=linear(1, 5)), {}),
    "movement": (Movement(), {}),
    "rigl": (RigL(every=2, fraction=0.5), {}),
    "str": (STR(init=-2.0), {}),
    "blocks": (Spartan(beta=linear(1, 20)), {"pattern": Block(2, 2)}),
    "channels": (TopKAST(), {"pattern": Channel()}),
    "nm": (Spartan(), {"pattern": NM(1, 2), "sparsity": 0.5}),
}


FEW = ["spartan", "topkast", "st3", "learned", "blocks", "nm"]


class Small(nn.Module):
    def __init__(self, even: bool) -> None:
        super().__init__()
        a, b = (8, 4) if even else (7, 3)
        self.first, self.second = nn.Linear(12, a), nn.Linear(8, b)
        self.pad = not even

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(torch.cat((x, x[:, :1]), 1) if self.pad else x)


def started(name: str, sharded: bool, kernels: str) -> tuple[nn.Module, Sparsifier, torch.optim.Optimizer]:
    method, options = RUNS[name]
    torch.manual_seed(0)
    model = Small(even="pattern" in options)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {"sparsity": 0.7, "warmup": 0.25, "finetune": 0.25, **options}
    sparsifier = Sparsifier(model, total_steps=STEPS, method=method, kernels=kernels, **settings).attach(optimizer)
    return model, sparsifier, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, sharded: bool) -> dict[str, Tensor]:
    for step in steps:
        torch.manual_seed(step)
        x, y = torch.randn(8, 12), torch.randint(3, (8,))
        part = slice(dist.get_rank(), None, dist.get_world_size()) if sharded else slice(None)
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p) for name, p in model.named_parameters()}


def difference(a: dict[str, Tensor], b: dict[str, Tensor], bits: bool = False) -> str:
    for name in a:
        if not torch.equal(a[name] == 0, b[name] == 0):
            return f"the support of {name} differs"
        if not torch.allclose(a[name], b[name], *((0.0, 0.0) if bits else (1e-4, 1e-6))):
            return f"{name} differs by {float((a[name] - b[name]).abs().max()):.1e}"
    return ""


def runs(rank: int, names: list[str]) -> list[str]:
    """Runs of every kind in plain torch on one process, and by kernels on all of them."""
    wrong = []
    with interpreted():
        for name in names:
            plain, of_plain, optimizer = started(name, False, "torch")
            fast, of_fast, optimizer_fast = started(name, True, "triton")
            (part,) = of_fast._run.weights.parts
            if part.name != "triton":
                wrong.append(f"{name} runs by {part.path(None)}")
            for steps in (range(2), range(2, STEPS)):
                found = difference(train(plain, optimizer, steps, False), train(fast, optimizer_fast, steps, True))
                wrong += [f"{name}, {steps}: {found}"] if found else []
            if of_plain.stats.density != of_fast.stats.density or of_fast.stats.phase != "finetune":
                wrong.append(f"{name}: {of_plain.stats} is not {of_fast.stats}")
    return wrong


@pytest.mark.parametrize("names", [FEW, pytest.param(list(RUNS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_runs_are_those_of_one_process(names: list[str]) -> None:
    for wrong in on(2, runs, names):
        assert wrong == []


# ---------------------------------------------------------------------- going on

STOPPED = ("spartan", "rigl")


def saving(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """Runs that are saved on the way; what they come to, and what they come to when they go on from there."""
    found = {}
    with interpreted():
        for name in STOPPED:
            model, sparsifier, optimizer = started(name, True, "triton")
            train(model, optimizer, range(2), True)
            save_sharded(Path(folder) / name, model, optimizer, sparsifier)
            found[name] = train(model, optimizer, range(2, STEPS), True)
            found[f"{name}, again"] = goes_on(name, folder, "triton")
            found[f"{name}, in torch"] = goes_on(name, folder, "torch")
    return found


def goes_on(name: str, folder: str, kernels: str) -> dict[str, Tensor]:
    model, sparsifier, optimizer = started(name, True, kernels)
    load_sharded(Path(folder) / name, model, optimizer, sparsifier)
    return train(model, optimizer, range(2, STEPS), True)


def one_process(rank: int, folder: str) -> list[Any]:
    """With one process there are no shards: kernels as on plain weights, to the bit; and runs of two go on."""
    with interpreted():
        from spartan.solvers.triton.shards import InShards

        wrong: list[str] = []
        for name in ("spartan", "blocks"):
            model, sparsifier, optimizer = started(name, True, "triton")
            (part,) = sparsifier._run.weights.parts
            if part.name != "triton" or isinstance(part, InShards):
                wrong.append(f"{name}: {type(part).__name__}")
            plain, _, optimizer_plain = started(name, False, "triton")
            found = difference(
                train(plain, optimizer_plain, range(STEPS), False),
                train(model, optimizer, range(STEPS), True),
                bits=True,
            )
            wrong += [f"{name}: {found}"] if found else []
        return [wrong, {name: goes_on(name, folder, "triton") for name in STOPPED}]


def test_a_saved_run_goes_on(tmp_path: Path) -> None:
    first, second = on(2, saving, str(tmp_path))
    ((wrong, alone),) = on(1, one_process, str(tmp_path))
    assert wrong == []
    for name in STOPPED:
        assert difference(first[name], second[name], bits=True) == ""
        assert difference(first[name], first[f"{name}, again"], bits=True) == "", name
        assert difference(first[name], first[f"{name}, in torch"]) == "", name
        assert difference(first[name], alone[name]) == "", name
