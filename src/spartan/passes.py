"""Runs a batch through a model several times, each with masks of its own, where a method averages over them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from spartan.stepping import check_alive

if TYPE_CHECKING:
    from spartan.sparsifier import Sparsifier


def passes(sparsifier: "Sparsifier") -> Iterator[float]:
    """The passes over a batch that the method of a sparsifier wants of a step: for each, the share its loss counts for.

    Most methods want one, and get 1.0. `ProbMask` draws masks anew before every further one; make each a forward and a
    backward of its own, then one `optimizer.step()`. With micro-batches, all of them belong into every pass.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = spartan.Sparsifier(model, sparsity=0.75, total_steps=20, method="probmask").attach(optimizer)
        >>> shares = []
        >>> for _ in range(20):
        ...     x = torch.randn(4, 8)
        ...     for share in passes(sparsifier):
        ...         (share * model(x).square().mean()).backward()
        ...         shares.append(share)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> shares[0], len(shares)
        (0.5, 39)
    """
    check_alive(sparsifier, "passes")
    run = sparsifier._run
    wanted = run.method.passes(run.at)
    for number in range(wanted):
        if number:
            if any(map(run.gradients.fresh, range(len(run.problem.targets)))):
                raise RuntimeError(
                    "passes(): the gradients of the last pass are still those for w, so that masks cannot be drawn anew. "
                    "Let DDP add them up in the last backward of each pass, not of the step alone; where you add them up "
                    "over processes yourself, call sparsifier.backward() once that is done"
                )
            with torch.no_grad():
                for solver in run.weights.solving:
                    run.method.resample(solver, run.at, number)
            run.write()
        yield 1.0 / wanted
