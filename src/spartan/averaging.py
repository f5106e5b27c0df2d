"""Averages the dense weights θ over training, and projects the average when it is used.

An average of sparse weights is denser than each of them. So what is averaged is θ, with all other parameters of the model;
to evaluate, save or export the average, masks are chosen for it as for θ itself, and it is exactly as sparse.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spartan.distributed import like, local
from spartan.problem.targets import name_cleaner, unwrap
from spartan.scalars import as_plain
from spartan.solvers.theta import copy_all
from spartan.step import look
from spartan.step.run import Run

if TYPE_CHECKING:
    from spartan.sparsifier import Sparsifier


@torch.no_grad()
def project(run: Run, thetas: Sequence[Tensor]) -> list[Tensor]:
    """w of another θ, for the budgets of this moment; the model holds what it held before."""
    targets, before, kept = run.problem.targets, run.weights.snapshot(), run.kept
    copy_all([target.local for target in targets], thetas)
    run.weights.take(range(len(targets)))
    try:
        run.solve()
        run.weights.write(run.at)
        return [target.local.clone() for target in targets]
    finally:
        run.weights.restore(before)
        run.kept = kept
        run.write(anew=False)


class Average:
    """An exponential moving average of a model that is being trained sparse.

    Args:
        sparsifier: whose model; after each of its steps the average moves on.
        decay: what is left of the average at each step, in [0, 1).

    Example:
        >>> model = torch.nn.Linear(16, 16)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, warmup=0.0).attach(optimizer)
        >>> average = sparsifier.ema(0.9)
        >>> for _ in range(10):
        ...     model(torch.randn(8, 16)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> int((average.model().weight != 0).sum())
        64
    """

    def __init__(self, sparsifier: "Sparsifier", decay: float) -> None:
        decay = as_plain(decay)
        if not 0 <= decay < 1:
            raise ValueError(f"ema: decay={decay!r} is not what is left of an average; a number in [0, 1) is needed")
        self.decay, self.steps = float(decay), 0
        self._sparsifier, self._run = sparsifier, sparsifier._run
        self._targets = {id(t.parameter) for t in self._run.problem.targets}
        self._thetas = [theta.clone() for theta in look.thetas(self._run.weights)]
        self._others = {name: local(p).detach().clone() for name, p in self._rest().items()}

    def _rest(self) -> dict[str, nn.Parameter]:
        """The parameters that are no targets, by name."""
        model = unwrap(self._sparsifier.model)
        clean = name_cleaner(model)
        return {clean(name): p for name, p in model.named_parameters() if id(p) not in self._targets}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the present weights; the sparsifier does so after each step."""
        self.steps += 1
        now = [*look.thetas(self._run.weights), *(local(p).detach() for p in self._rest().values())]
        torch._foreach_lerp_([*self._thetas, *self._others.values()], now, 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Inside, the model holds the average, projected: exactly as sparse as it is asked to be. Then its own weights."""
        run = self._run
        if self._sparsifier._final is not None:
            raise RuntimeError("the average after finalize(): the dense weights are gone. Take average.model() before.")
        run.check_model()
        weights, rest = project(run, self._thetas), [local(p).detach() for p in self._rest().values()]
        own = [x.clone() for x in rest]
        self._sparsifier._lent = run.gradients.paused = True
        try:
            with torch.no_grad():
                for target, w in zip(run.problem.targets, weights, strict=True):
                    target.local.copy_(w)
                for mine, x in zip(rest, self._others.values(), strict=True):
                    mine.copy_(x)
            yield self._sparsifier.model
        finally:
            self._sparsifier._lent = run.gradients.paused = False
            with torch.no_grad():
                for mine, x in zip(rest, own, strict=True):
                    mine.copy_(x)
            run.write()

    def model(self) -> nn.Module:
        """A copy of the model with the average, projected."""
        with self.applied() as model:
            return copy.deepcopy(unwrap(model))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; tensors are not copied."""
        rest, pairs = self._rest(), zip(self._run.problem.targets, self._thetas, strict=True)
        thetas = {target.name: like(target.parameter, theta) for target, theta in pairs}
        return {"steps": self.steps, "theta": thetas, "others": {n: like(rest[n], x) for n, x in self._others.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same model."""
        names = [t.name for t in self._run.problem.targets]
        if set(state["theta"]) != set(names) or set(state["others"]) != set(self._others):
            raise ValueError("the state of the average belongs to another model; pass what its state_dict() gave")
        self.steps = int(state["steps"])
        for name, theta in zip(names, self._thetas, strict=True):
            theta.copy_(local(state["theta"][name]))
        for name, x in self._others.items():
            x.copy_(local(state["others"][name]))
