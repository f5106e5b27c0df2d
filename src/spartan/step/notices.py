"""Says, once each, what a user would otherwise find out at the end: layers left out, unfrozen too late, or emptied."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spartan.methods.base import Method
from spartan.problem.coverage import Coverage
from spartan.problem.problem import Problem
from spartan.problem.schedules import Phase
from spartan.problem.targets import Target, some_names
from spartan.problem.zeros import zeros_of
from spartan.step.run import Run

HALF = 0.5  # targets that are less than this of all weights deserve a word
MANY = 0.2  # so many zeros are no accident
ALMOST_NONE = 1e-3  # a layer that keeps less is as good as empty


class SparseAlready(NamedTuple):
    """Weights that came sparse: what to say at the first step, and whether the method must not take it."""

    message: str
    refused: bool


def sparse_already(method: Method, targets: Sequence[Target]) -> SparseAlready | None:
    """Whether weights are sparse already and the method would begin anew, unless a state is loaded before the first step.

    Tensors that are zero altogether tell nothing: some layers begin so, LoRA's among them.
    """
    pairs = [(n, t.numel) for n, t in zip(zeros_of(targets), targets, strict=True) if n < t.numel]
    zeros, whole = sum(n for n, _ in pairs), sum(n for _, n in pairs)
    if method.keeps_zeros or zeros <= MANY * whole:
        return None
    found = f"{zeros / whole:.1%} of the weights were zero already, so they are probably a checkpoint of a sparse run"
    ways = (
        "To go on with that run, load all of it, the optimizer's state or sparsifier.load_state_dict() too; to train with "
        "these zeros as they are, Sparsifier.from_sparse(model)"
    )
    if method.random:
        return SparseAlready(
            f"model: {found}; method={method.name!r} draws masks at random, which destroys it. {ways}", True
        )
    return SparseAlready(f"{found}; {method.name} begins anew at step 0. {ways}", False)


def check_decay(method: Method, group: Mapping[str, Any]) -> None:
    """Warn of learned parameters, in this group of the optimizer, whose weight decay is to make the model sparse."""
    if method.sparse_by_decay and not group.get("weight_decay"):
        warnings.warn(
            f"{method!r} gets sparse by the weight decay of what it learns, and the optimizer gives it none: the model will "
            "stay dense. Give the weights a weight decay, which it takes over, or set its own, such as decay=5e-4",
            UserWarning,
            stacklevel=3,
        )


class Notices:
    """What has been said of a run, and what is still to be looked for.

    Args:
        coverage: the model's targets and the rest.
        by_name: whether the user chose the targets, and so knows what is left out.
        found: what to say at the first step, unless a state has been loaded by then.
    """

    def __init__(self, coverage: Coverage, by_name: bool, found: SparseAlready | None) -> None:
        self.coverage, self.sparse_already = coverage, found
        self._frozen = list(coverage.frozen)
        self._phase: Phase | None = None  # in which layers were last counted
        self._told = False
        if coverage.share > HALF and not by_name:
            warnings.warn(
                f"the sparsifier leaves out {coverage}: the sparsity is one of the other {1 - coverage.share:.1%}. Name "
                "what is to be sparse with include=, or what is to stay dense with exclude=",
                UserWarning,
                stacklevel=3,
            )

    def begin(self) -> None:
        """Before a step: say, or refuse, that it begins anew on weights that are sparse already."""
        found = self.sparse_already
        if found is None:
            return
        if found.refused:
            raise ValueError(found.message)
        self.sparse_already = None
        warnings.warn(found.message, UserWarning, stacklevel=5)

    def look(self, run: Run) -> None:
        """After a step: what has changed. Layers are counted where that makes nobody wait for an accelerator."""
        if self._frozen:
            self.unfrozen()
        at = run.at
        if at.phase == self._phase or at.step < run.method.sparse_at(at):
            return
        self._phase = at.phase
        if run.weights.frozen or run.weights.bad.device.type == "cpu":
            self.emptied(run)

    def unfrozen(self) -> None:
        """Warn of layers that can be trained now, but could not when targets were chosen."""
        found = [target for target in self._frozen if target.parameter.requires_grad]
        if found:
            self._frozen = []
            warnings.warn(
                f"{some_names(found)} could not be trained when the sparsifier was built, and now can be: what is no "
                "target stays dense. Build the sparsifier after unfreezing layers, or say with exclude= that they are to "
                "stay dense",
                UserWarning,
                stacklevel=5,
            )

    def emptied(self, run: Run) -> None:
        """Warn of layers of which the final density leaves nothing, or next to nothing."""
        found = [] if self._told else nearly_empty(run.problem, run.kept_units())
        if found:
            self._told = True
            names = some_names([run.problem.targets[i] for i in found])
            warnings.warn(
                f"next to nothing is left of {names}: the network may be cut in two there. min_density= keeps a part of "
                "every layer that shares a budget; exclude= leaves a layer dense",
                UserWarning,
                stacklevel=5,
            )


def nearly_empty(problem: Problem, kept: Sequence[int]) -> list[int]:
    """The targets that keep nothing, or under a thousandth of themselves and a tenth of what their budget leaves."""
    found = []
    for i, (units, whole, s) in enumerate(zip(kept, problem.all_units, problem.segment_of, strict=True)):
        segment = problem.segments[s]
        if units < whole * min(ALMOST_NONE, 0.1 * (1.0 - segment.sparsity)) or not units:
            found.append(i)
    return found
