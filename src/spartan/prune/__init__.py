"""Prunes a model once, by magnitude or by what calibration data say (`spartan.prune`)."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import nn

from spartan.following import check_free
from spartan.problem.budgets import Budget
from spartan.problem.costs import Cost
from spartan.problem.patterns import Pattern
from spartan.problem.problem import make_problem
from spartan.problem.targets import Globs, unwrap
from spartan.problem.zeros import zeros_of
from spartan.prune.batches import read_batches
from spartan.prune.calibrated import CRITERIA, Calibrated, check, prune_with_data
from spartan.prune.devices import Mover
from spartan.prune.magnitude import prune_by_magnitude
from spartan.prune.memory import PeakMemory
from spartan.prune.options import PruneOptions
from spartan.prune.report import PrunedLayer, PruneReport
from spartan.wording import nearest

M = TypeVar("M", bound=nn.Module)


@overload
def prune(model: M, sparsity: float, *, report: Literal[False] = False, **options: Unpack[PruneOptions]) -> M: ...


@overload
def prune(
    model: M, sparsity: float, *, report: Literal[True], **options: Unpack[PruneOptions]
) -> tuple[M, PruneReport]: ...


def prune(
    model: M,
    sparsity: float,
    *,
    criterion: str = "magnitude",
    calibration: Iterable[Any] | None = None,
    pattern: Pattern | None = None,
    cost: Cost | Mapping[str, float] | None = None,
    budget: Budget | None = None,
    include: Globs = None,
    exclude: Globs = None,
    count: str = "targets",
    device: str | torch.device | None = None,
    blocks: Globs = None,
    undo: bool = True,
    progress: bool | None = None,
    report: bool = False,
) -> M | tuple[M, PruneReport]:
    """Set weights to zero, in place, to an exact budget, without training. Returns the model.

    `criterion="magnitude"` keeps the weights of largest magnitude. `"wanda"` and `"sparsegpt"` look at the inputs that
    every layer gets on calibration data; SparseGPT also changes the weights that it keeps, to make up for the others.
    These two go through the model block by block, each with the inputs that the pruned blocks before it give. If
    anything goes wrong, or the run is interrupted, the model is left as it was. Weights that cannot be trained are
    pruned only where none can.

    Args:
        model: any module; only the values of its target weights change.
        sparsity: fraction of the counted weights (with a cost: of the cost) that goes, in [0, 1).
        criterion: "magnitude", "wanda" or "sparsegpt".
        calibration: batches, each a tensor, a tuple of arguments or a dict of keyword arguments of the model. All are
            used, and all are held in memory.
        pattern, cost, include, exclude, count: as for `Sparsifier`.
        budget: "global", "balanced", "uniform", "erk" or {glob: sparsity}; by default "global" for magnitudes
            and "uniform" for the others, whose scores mean something within a layer only.
        device: where to run the model, of which one block at a time is moved there; None runs it where it is.
        blocks: globs over names of modules that are the blocks; None finds chains of modules of one class, and () runs the
            model as a whole, with the statistics of all layers in memory at once.
        undo: keep a copy in main memory of weights that are pruned, until all are, to restore the model from. Without it
            an error says which weights are pruned.
        progress: whether progress is shown on stderr; None shows it on a terminal.
        report: whether to return a `PruneReport` too: layers, blocks, time and peak memory.

    Example:
        >>> model = prune(torch.nn.Linear(10, 10), sparsity=0.9)
        >>> int((model.weight != 0).sum())
        10
        >>> model = prune(torch.nn.Linear(10, 10), 0.5, criterion="wanda", calibration=[torch.randn(8, 10)])
        >>> (model.weight != 0).sum(1)
        tensor([5, 5, 5, 5, 5, 5, 5, 5, 5, 5])
    """
    started = time.monotonic()
    if criterion not in ("magnitude", *CRITERIA):
        hint = nearest(criterion, ["magnitude", *CRITERIA])
        raise ValueError(f'criterion={criterion!r} is unknown{hint}; "magnitude", "wanda" and "sparsegpt" are accepted')
    by_data = criterion in CRITERIA
    for name, given in (("calibration", calibration), ("device", device), ("blocks", blocks)):
        if given is not None and not by_data:
            raise ValueError(
                f"{name} is given, and criterion='magnitude' runs no data through the model; leave {name} out, or pass "
                'criterion="wanda" or "sparsegpt"'
            )
    if budget is None:
        budget = "uniform" if by_data else "global"
    problem = make_problem(
        model, sparsity, pattern=pattern, cost=cost, budget=budget, include=include, exclude=exclude, count=count,
        frozen_too=True,
    )  # fmt: skip
    check_free(problem.targets)
    if by_data:
        layouts, batches = check(problem, criterion, budget), read_batches(calibration, criterion)
        mover = Mover(unwrap(model), device)
        peak = PeakMemory(mover.device) if report else None
        done = prune_with_data(model, layouts, criterion, batches, mover, blocks, undo, progress)
    else:
        batches, peak = [], PeakMemory(problem.targets[0].local.device) if report else None
        prune_by_magnitude(problem)
        pairs = zip(problem.targets, zeros_of(problem.targets) if report else [], strict=report)
        done = Calibrated([PrunedLayer(t.name, t.numel, t.numel - zeros) for t, zeros in pairs], [], "")
    if peak is None:
        return model
    how = tuple(done.layers), tuple(done.blocks), done.why_whole, len(batches)
    return model, PruneReport(criterion, *how, time.monotonic() - started, peak.where, peak.bytes())
