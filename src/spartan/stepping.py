"""What `optimizer.step()` does while a sparsifier is attached, what ends its work, and what it refuses to do."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from spartan.following import check_callbacks, release
from spartan.problem.zeros import UnitCount, too_full
from spartan.step import look
from spartan.step.run import without_update
from spartan.step.scaling import ask_scaler
from spartan.step.stats import Layer
from spartan.step.wrap import only_creates_state

if TYPE_CHECKING:
    from spartan.sparsifier import Sparsifier


def step(
    self: "Sparsifier", optimizer: Optimizer, update: Callable[..., Any], closure: Callable[[], Any] | None
) -> Any:
    """What `optimizer.step()` does now."""
    check_alive(self, "optimizer.step")
    run, before = self._run, self._run.at.step
    me = self._attachment.number_of(optimizer)
    mine = self._mine[me]
    if closure is None and not optimizer.state and only_creates_state(optimizer, run.guard.agree):
        with torch.no_grad():
            run.weights.put(mine)  # the state is that of θ, which stays as it is
        try:
            return update()
        finally:
            run.write(anew=False)
    self._notices.begin()
    run.guard.look()
    skipped = ask_scaler(optimizer)
    if self.method.identity:
        result, mine = update() if closure is None else update(closure), []
    with torch.no_grad():
        if not self.method.identity:
            check_callbacks(self)
            if self.method.replaces(run.at):
                result, mine = without_update(run, optimizer, mine, closure), []
            else:
                result = run.step(optimizer, mine, update, closure, skipped)
        left_out = skipped()
        run.finish(optimizer, mine, left_out, advance=not left_out and self._attachment.advances(me))
    self._notices.look(run)
    if run.at.step > before:
        for average in self._averages:
            average.update()
    return result


def finalize(self: "Sparsifier") -> None:
    """Drop θ and leave the model as it is, exactly sparse; an error says why it is not."""
    check_alive(self, "finalize")
    self._run.guard.look(wait=True)
    average = next((follower for follower in self._followers if follower.moved_in()), None)
    if average is None:
        self._run.check_model(look=True)
    else:
        average.become()
    at = self._run.at
    if at.step < sparse_at(self):
        raise RuntimeError(
            f"finalize() at step {at.step} of {at.total_steps}: {self.method.name} reaches the target density at "
            f"step {sparse_at(self)}; train on, or build the sparsifier with fewer total_steps"
        )
    self._notices.unfrozen()
    self._notices.emptied(self._run)
    for follower in self._followers:
        follower.write()  # its last update may be from before the last budget
    _let_go(self, self.layers())


def finalize_with(self: "Sparsifier", source: str) -> None:
    """Drop θ and leave the model with the weights that somebody has loaded into it from a checkpoint of this run.

    An error says so, and where they are from, if they hold fewer zeros than was asked for.
    """
    check_alive(self, "finalize")
    problem, method = self._run.problem, self.method
    self._run.guard.reshard()
    count = UnitCount.of(problem)
    if found := [] if method.identity or method.sparse_from == "never" else too_full(problem, count):
        raise RuntimeError(f"{source} holds fewer zeros than asked for: they are {'; '.join(found[:8])}")
    _let_go(self, Layer.of(problem, count.kept, self._flops))


def discard(self: "Sparsifier") -> None:
    """Give a run up: the model gets its dense weights back, unless somebody has loaded others into it since."""
    if self._final is None:
        try:
            self._run.check_model()
        except RuntimeError:
            pass  # a checkpoint, of another run or of an earlier step
        else:
            with torch.no_grad():
                self._run.weights.put(range(len(self._targets)))
        _let_go(self, self.layers())
    self.detach()


def sparse_at(self: "Sparsifier") -> int:
    """The step from which on the model is as sparse as it is to be."""
    return self.method.sparse_at(self._run.at)


def _let_go(self: "Sparsifier", layers: list[Layer]) -> None:
    self._final = self.stats, layers, look.path(self._run.weights, self._run.at)
    self._run.gradients.close()
    self._run.weights.drop()
    self._attachment.close()
    release(self._targets)


def check_alive(self: "Sparsifier", what: str) -> None:
    """Refuse what cannot be done any more, or not now."""
    if self._final is not None:
        raise RuntimeError(
            f"{what}() after finalize(): the dense weights are gone, and a further step would undo the sparsity. "
            "Sparsifier.from_sparse(model) trains on with these zeros; detach() gives the optimizer back its own step."
        )
    if self._lent:
        raise RuntimeError(f"{what}() inside dense_weights(): leave the block first, so that the model holds w")
