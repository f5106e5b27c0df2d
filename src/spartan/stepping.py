"""What `optimizer.step()` does while a sparsifier is attached, and what a sparsifier refuses to do."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from spartan.following import check_callbacks
from spartan.step.run import skipped, without_update
from spartan.step.wrap import only_creates_state

if TYPE_CHECKING:
    from spartan.sparsifier import Sparsifier


def step(
    self: "Sparsifier", optimizer: Optimizer, update: Callable[..., Any], closure: Callable[[], Any] | None
) -> Any:
    """What `optimizer.step()` does now."""
    check_alive(self, "optimizer.step")
    run, before = self._run, self._run.at.step
    me = next((j for j, other in enumerate(self._attachment.optimizers) if other is optimizer), None)
    if me is None:
        raise RuntimeError(
            "this optimizer is a copy of one that a sparsifier is attached to. Copy model, optimizer and sparsifier "
            "together, or attach() a sparsifier of its own to the copy."
        )
    mine = self._mine[me]
    if closure is None and only_creates_state(optimizer, run.guard.agree):
        with torch.no_grad():
            run.weights.put(mine)  # the state is that of θ, which stays as it is
        try:
            return update()
        finally:
            run.write(anew=False)
    self._notices.begin()
    run.guard.look()
    if self.method.identity:
        result, mine = update() if closure is None else update(closure), []
    else:
        check_callbacks(self)
        if self.method.replaces(run.at):
            result, mine = without_update(run, optimizer, mine, closure), []
        else:
            result = run.step(optimizer, mine, update, closure)
    run.finish(optimizer, mine, not skipped(optimizer) and self._attachment.advances(me))
    self._notices.look(run)
    if run.at.step > before:
        for average in self._averages:
            average.update()
    return result


def check_alive(self: "Sparsifier", what: str) -> None:
    """Refuse what cannot be done any more, or not now."""
    if self._final is not None:
        raise RuntimeError(
            f"{what}() after finalize(): the dense weights are gone, and a further step would undo the sparsity. "
            "Sparsifier.from_sparse(model) trains on with these zeros; detach() gives the optimizer back its own step."
        )
    if self._lent:
        raise RuntimeError(f"{what}() inside dense_weights(): leave the block first, so that the model holds w")
