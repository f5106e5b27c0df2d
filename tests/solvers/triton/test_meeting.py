"""Programs that meet: on a GPU they run side by side, in the interpreter only one does. Here each has a process of its own.

The processes share what the programs of a launch share, and their atomic operations are those of the machine.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from spartan.ops.parts import Part
from spartan.ops.select import Threshold, boundary
from spartan.ops.soft_topk import residual_at
from spartan.solvers.triton import topk
from spartan.solvers.triton.state import CUT
from spartan.solvers.triton.topk import TopK
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's programs run side by side anyway")

PROGRAMS = 3
SIZES, OWNERS, COSTS = [9_000, 33, 0, 20_001, 5_000, 1], [0, 0, 0, 2, 2, 3], [1.0, 2.5, 1.0, 1.0, 0.25, 1.0]
BUDGETS = {0: 900.0, 1: 0.0, 2: 2_000.25, 3: 1.0}  # the second segment is empty
BETAS = [10.0, 11.0, None, 12.0]


class Done(BaseException):
    """The one program of this process has run."""


def values(step: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=rng) for n in SIZES]
    tensors[3] = (tensors[3] * 8).round() / 8  # ties, in several programs' shares
    return [t * (1.0 + 0.002 * step) for t in tensors]


def build() -> TopK:
    topk._programs = lambda entries, device: PROGRAMS
    found = TopK(SIZES, COSTS, [1.0] * len(SIZES), DEVICE, OWNERS, 4)
    assert len(found.pieces.shares) == PROGRAMS + 1
    return found


def run_program(index: int, shared: dict[str, Tensor], barrier: Any) -> None:
    """All launches of one program."""
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    solver = build()
    for name in ("counts", "above", "sums", "arrived"):
        setattr(solver, name, shared[name])
    states = solver.states
    states.floats, states.ints = shared["floats"], shared["ints"]
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    place = builder.set_grid_idx
    turns: list[int] = []

    def mine_only(x: int, y: int, z: int) -> None:
        if not turns:
            raise Done
        place(turns.pop(), y, z)

    builder.set_grid_idx = mine_only
    executor._restore_args_dev = lambda *_: None  # it would copy shared memory onto itself
    for step, beta in enumerate(BETAS):
        if index == 0:
            solver._tell(list(BUDGETS.values()), None if beta is None else [beta] * 4)
            turns.append(0)
            states.fetch()
        barrier.wait(300)
        now = values(step)
        turns.append(index)
        where = solver.addresses.of(now)
        with suppress(Done):
            solver._launch(where, torch.float32, beta is not None, step == 0, 1.0)
        barrier.wait(300)
        if index == 0:
            shared["found"][step] = states.floats
            shared["found_ints"][step] = states.ints
        barrier.wait(300)


def test_programs_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four groups: one is empty, one has ties in the shares of several programs; from nothing and from the last step."""
    monkeypatch.setattr(topk, "_programs", topk._programs)  # and back
    solver = build()
    states = solver.states
    shared = {name: getattr(solver, name) for name in ("counts", "above", "sums", "arrived")}
    shared |= {"floats": states.floats, "ints": states.ints}
    shared["found"] = torch.zeros(len(BETAS), *states.floats.shape, dtype=torch.float64)
    shared["found_ints"] = torch.zeros(len(BETAS), *states.ints.shape, dtype=torch.int64)
    for tensor in shared.values():
        tensor.share_memory_()
    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(PROGRAMS)
    processes = [context.Process(target=run_program, args=(i, shared, barrier)) for i in range(PROGRAMS)]
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for process in processes:
            process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * PROGRAMS
    for step, beta in enumerate(BETAS):
        states.floats.copy_(shared["found"][step])
        states.ints.copy_(shared["found_ints"][step])
        for g, k in BUDGETS.items():
            if g == 1:
                continue
            mine = [i for i, owner in enumerate(OWNERS) if owner == g]
            parts = [Part(values(step)[i].abs(), COSTS[i]) for i in mine]
            edge, saved, start = boundary(parts, k), states.selection().saved()[g], 0
            found = Threshold(saved["value"], int(saved["cut"]))
            for part in parts:
                assert torch.equal(found.keep(part.u, start), edge.threshold.keep(part.u, start))
                start += part.u.numel()
            if beta is not None and g != 3:
                assert residual_at(states.duals([beta] * 4).each()[g], parts, k) <= 1e-6
    # One program in all finds the same places to cut.
    topk._programs = lambda entries, device: 1
    alone = TopK(SIZES, COSTS, [1.0] * len(SIZES), DEVICE, OWNERS, 4)
    for step, beta in enumerate(BETAS):
        alone.solve(values(step), list(BUDGETS.values()), None if beta is None else [beta] * 4)
        assert torch.equal(alone.states.ints[:, CUT.value], shared["found_ints"][step][:, CUT.value])
