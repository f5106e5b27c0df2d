"""Powerpropagation: weights are powers of what is trained, under any other method."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

from spartan.methods.base import Method
from spartan.methods.registry import as_method, register
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment
from spartan.problem.targets import Target
from spartan.solvers.base import Grads
from spartan.solvers.forms import Form
from spartan.solvers.torch import TorchSolver


@register
@dataclass(frozen=True)
class Powerprop(Method):
    """Powerpropagation: another method on ψ = θ|θ|^(α−1) in the place of θ; large weights learn faster.

        ψ = sign(θ)·|θ|^α,  w = f(ψ)                  f: the inner method, its masks, budget and schedule
        θ ← θ − η · α|θ|^(α−1) ⊙ ∇f(ψ)ᵀ ∇L(w)         weight decay and momentum act on θ

    What f asks of its dense weights, a penalty included, it asks of ψ. θ starts at sign(w)·|w|^(1/α), so that the model
    starts unchanged. A weight that is zero gets no gradient and stays zero; methods that restart weights from zero
    (AC/DC, RigL, SET) are therefore refused, and a layer that is initialised to zero belongs into `exclude`.

    Finetuning goes on along the tangent: with s = α|θ|^(α−1) fixed (its mean over each unit) and f's mask m,
    w = θ'·s·m from θ' = ψ/s. w does not jump, gradients and momentum keep their scale, and how fast weights learn
    relative to one another stays as it is. For single weights θ' = θ/α, so that weight decay is α times weaker there,
    and an average of θ (`dense_weights`) should not run across that step. `finetune=0` leaves all this out.

    Args:
        method: the inner method, by name or as an object; the paper's is Top-KAST.
        alpha: α ≥ 1; 1 is the inner method by itself.
        method_args: settings of the inner method, where it is given by name.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=Powerprop("topkast"), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    method: str | Method | type[Method] = "topkast"
    alpha: float = 2.0
    method_args: InitVar[Mapping[str, Any] | None] = None

    name = "powerprop"
    year = 2021
    mask_rule = "the inner method's, for θ|θ|^(α−1)"
    gradient_rule = "the inner method's, times α|θ|^(α−1)"
    needs = "an inner method; topkast by default"
    reference = "Schwarz et al., Powerpropagation: A sparsity inducing weight reparameterisation, NeurIPS 2021"
    refuses_nm = ""  # by its inner method

    def __post_init__(self, method_args: Mapping[str, Any] | None) -> None:
        if not 1 <= self.alpha < math.inf:
            raise ValueError(f"Powerprop: alpha={self.alpha!r} is not a power of the weights; a number ≥ 1 is needed")
        inner = as_method(self.method, method_args)
        if isinstance(inner, Powerprop):
            raise ValueError(f"Powerprop: method={inner!r} is a power already; multiply the two alpha instead")
        if inner.restarts:
            raise ValueError(
                f"Powerprop: method={inner.name!r} restarts weights from zero, where a power has no slope and nothing "
                "would move them; topkast, imp, spartan and others that keep θ are accepted"
            )
        if inner.rewrites:
            raise ValueError(
                f"Powerprop: method={inner!r} changes the dense weights by itself, which cannot go through a power; "
                "topkast, imp, spartan and others that leave θ to the optimizer are accepted"
            )
        object.__setattr__(self, "method", inner)
        object.__setattr__(self, "power", float(self.alpha))
        same = ("sparse_from", "budget", "warmup", "finetune", "ramp", "refuses_nm", "learned_options")
        for fact in (*same, "random", "keeps_zeros", "sparse_by_decay", "clip", "apart"):
            object.__setattr__(self, fact, getattr(inner, fact))

    @property
    def inner(self) -> Method:
        """The inner method."""
        assert isinstance(self.method, Method)
        return self.method

    def begun(self, problem: Problem) -> float:
        """As the inner method."""
        return self.inner.begun(problem)

    def setup(self, solver: TorchSolver, at: Moment) -> None:
        """θ = sign(w)·|w|^(1/α); what the solver shows the inner method from then on is ψ."""
        solver.rewrite(lambda _, theta: theta.sign() * theta.abs().pow(1.0 / self.alpha))
        with self._untouched(solver):
            self.inner.setup(solver, at)

    @contextmanager
    def _untouched(self, solver: TorchSolver) -> Iterator[None]:
        """What an inner method writes into θ would not be what it means: it sees ψ."""
        before = [theta._version for theta in solver.theta.views]
        yield
        if before != [theta._version for theta in solver.theta.views]:
            raise RuntimeError(
                f"Powerprop: {self.inner.name} changes the dense weights themselves, which cannot go through a power; "
                "use it by itself"
            )

    def check(self, problem: Problem) -> None:
        """The inner method's."""
        self.inner.check(problem)

    def beta_at(self, problem: Problem, at: Moment) -> list[float] | None:
        """The inner method's."""
        return self.inner.beta_at(problem, at)

    def choose(self, solver: TorchSolver, at: Moment) -> None:
        """The inner method's."""
        with self._untouched(solver):
            self.inner.choose(solver, at)

    def resample(self, solver: TorchSolver, at: Moment, number: int) -> None:
        """The inner method's."""
        self.inner.resample(solver, at, number)

    def passes(self, at: Moment) -> int:
        """The inner method's."""
        return self.inner.passes(at)

    def scale(self, target: Target) -> float:
        """The inner method's."""
        return self.inner.scale(target)

    def held(self, solver: TorchSolver) -> Tensor | None:
        """The inner method's."""
        return self.inner.held(solver)

    def observes(self, at: Moment) -> bool:
        """If the inner method does."""
        return self.inner.observes(at)

    def observe(self, solver: TorchSolver, grads: Grads, at: Moment) -> None:
        """The inner method's."""
        self.inner.observe(solver, grads, at)

    def form(self, solver: TorchSolver, at: Moment) -> Form:
        """The inner method's; the solver applies it to ψ, and the chain rule to gradients."""
        return self.inner.form(solver, at)

    def keep(self, solver: TorchSolver, at: Moment) -> Tensor:
        """The inner method's."""
        return self.inner.keep(solver, at)

    def freeze(self, solver: TorchSolver, at: Moment) -> tuple[Tensor, Tensor]:
        """s·m per unit, with θ ← ψ/s: w = θ·(s·m) is what it was."""
        kept, mask = self.inner.freeze(solver, at)
        sizes = solver.of_targets(solver.constant(solver.problem.sizes)).to(mask.dtype)
        slope = solver.reduce([x.to(mask.dtype) for x in solver.slopes()]) / sizes
        slope = torch.where(slope > 0, slope, 1.0)  # a unit of zeros has none
        psi, scale = solver.per_target(solver.values()), solver.per_target(solver.spread(slope))
        solver.rewrite(lambda i, theta: psi[i] / scale[i])
        solver.dual = None  # the fixed mask is no soft mask between 0 and 1 any more, and must not be shown as one
        return kept, mask * slope
