"""Powerpropagation: weights are powers of what is trained, under any other method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods.acdc import ACDC
from spartan.methods.base import Method
from spartan.methods.registry import as_method, register
from spartan.schedules import Moment


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
        if inner.grows_from_zero or isinstance(inner, ACDC):
            raise ValueError(
                f"Powerprop: method={inner.name!r} restarts weights from zero, where a power has no slope and nothing "
                "would move them; topkast, imp, spartan and others that keep θ are accepted"
            )
        object.__setattr__(self, "method", inner)
        for fact in ("sparse_from", "budget", "warmup", "finetune", "ramp", "refuses_nm", "learned_options", "linear"):
            object.__setattr__(self, fact, getattr(inner, fact))

    @property
    def inner(self) -> Method:
        """The inner method."""
        assert isinstance(self.method, Method)
        return self.method

    def beta_at(self, group: Group, at: Moment) -> float | None:
        """The sharpness in use."""
        return self.inner.beta_at(group, at)

    def psi(self, thetas: Sequence[Tensor]) -> list[Tensor]:
        """ψ = sign(θ)·|θ|^α: what the inner method sees, differentiable in θ."""
        return [_Power.apply(theta, self.alpha) for theta in thetas]

    def slope(self, theta: Tensor) -> Tensor:
        """dψ/dθ = α|θ|^(α−1)."""
        return self.alpha * theta.abs().pow(self.alpha - 1.0)

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """θ = sign(w)·|w|^(1/α), in place, in the dense weights that the run owns."""
        for theta in thetas:
            theta.copy_(theta.sign() * theta.abs().pow(1.0 / self.alpha))
        psi = self.psi(thetas)
        self.inner.setup(group, psi, at)
        self._check_untouched(psi)

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """The inner method's choice."""
        psi = self.psi(thetas)
        self.inner.choose(group, psi, at)
        self._check_untouched(psi)

    def _check_untouched(self, psi: Sequence[Tensor]) -> None:
        """What an inner method writes into ψ would be lost."""
        if any(p._version for p in psi):
            raise RuntimeError(
                f"Powerprop: {self.inner.name} changes the dense weights themselves, which cannot go through a power; "
                "use it by itself"
            )

    def observe(self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment) -> None:
        """The inner method looks at the gradients for w."""
        self.inner.observe(group, self.psi(thetas), grads, at)

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """w = f(ψ)."""
        return self.inner.weights(group, self.psi(thetas), at)

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """The inner method's gradient for ψ, times dψ/dθ."""
        found = self.inner.gradient(group, self.psi(thetas), grads, at)
        return [None if g is None else g * self.slope(theta) for g, theta in zip(found, thetas, strict=True)]

    def penalty(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor] | None:
        """The inner method's penalty on ψ, times dψ/dθ."""
        found = self.inner.penalty(group, self.psi(thetas), at)
        return None if found is None else [p * self.slope(theta) for p, theta in zip(found, thetas, strict=True)]

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """What the inner method keeps."""
        return self.inner.keep(group, self.psi(thetas))

    def ranked(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """What the inner method ranks."""
        return self.inner.ranked(group, self.psi(thetas))

    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """s·m per unit, with θ ← ψ/s in place: w = θ·(s·m) is what it was."""
        psi = self.psi(thetas)
        masks = self.inner.freeze(group, psi, at)
        slopes = [group.pattern.reduce(self.slope(t)) / n for t, n in zip(thetas, group.sizes, strict=True)]
        slopes = [torch.where(s > 0, s, 1.0) for s in slopes]  # a unit of zeros has none
        for theta, p, s in zip(thetas, psi, group.expand(slopes), strict=True):
            theta.copy_(p / s)
        group.dual = None  # the fixed mask is no soft mask between 0 and 1 any more, and must not be shown as one
        return [m * s for m, s in zip(masks, slopes, strict=True)]


class _Power(torch.autograd.Function):
    """sign(x)·|x|^α. Autograd of the expression has no slope at 0 for α < 2: ∞ · 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return x * x.abs().pow(alpha - 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.alpha * x.abs().pow(ctx.alpha - 1.0), None
