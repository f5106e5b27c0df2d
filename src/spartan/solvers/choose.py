"""Chooses the solver of each part of the problem: the first that can."""

from collections.abc import Sequence

from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import Flags, why_no_kernels
from spartan.solvers.chunks.rows import ChunkRows
from spartan.solvers.chunks.solver import ChunkSolver
from spartan.solvers.chunks.units import ChunkUnits
from spartan.solvers.frozen import FrozenSolver
from spartan.solvers.sharded import ShardedSolver
from spartan.solvers.torch import TorchSolver


def solver_for(problem: Problem, flags: Flags, kernels: str, alias: bool = False) -> TorchSolver:
    """The solver of a part; with `alias`, where w = θ always and nothing is to be done, plain torch."""
    why = "nothing to do" if alias else why_no_kernels(problem, kernels)
    kinds: list[type[TorchSolver]] = [in_chunks(problem), ShardedSolver]
    if not why:  # Triton is imported where it runs
        from spartan.solvers.triton.blocks import BlockSolver
        from spartan.solvers.triton.rows import RowSolver
        from spartan.solvers.triton.shards import ShardedBlocks, ShardedRuns, ShardedSingles
        from spartan.solvers.triton.single import TritonSolver

        whole: list[type[TorchSolver]] = [TritonSolver, BlockSolver, RowSolver]
        sharded: list[type[TorchSolver]] = [ShardedSingles, ShardedBlocks, ShardedRuns]
        kinds = [*(whole if problem.ranks.alone else sharded), *kinds]
    reasons = [why] if why else []
    # On a CPU nobody expects kernels; why not chunks is the question.
    on_cpu = problem.targets[0].parameter.device.type == "cpu" and kernels == "auto" and not alias
    for kind in [] if alias else kinds:
        reason = kind.why_not(problem, kernels)
        if not reason:
            solver = kind(problem, flags)
            solver.why = reasons[0] if kind is ShardedSolver and not on_cpu else ""
            return solver
        reasons.append(reason)
    solver = TorchSolver(problem, flags, alias)
    solver.why = reasons[1 if on_cpu else 0]
    return solver


def in_chunks(problem: Problem) -> type[TorchSolver]:
    """What goes through weights of this pattern in pieces, on a CPU."""
    if problem.pattern.single:
        return ChunkSolver
    return ChunkUnits if problem.pattern.rows is None else ChunkRows


def frozen_solver_for(
    problem: Problem, flags: Flags, kernels: str, kept: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> FrozenSolver:
    """The solver of a part whose masks are fixed, from θ, the mask and the places of the kept entries of each target."""
    why = why_no_kernels(problem, kernels, frozen=True)
    if not why:
        from spartan.solvers.triton.frozen import FrozenTritonSolver

        return FrozenTritonSolver(problem, flags, kept)
    solver = FrozenSolver(problem, flags, kept)
    solver.why = why
    return solver
