"""Spartan: soft top-k masking and dual averaging (the paper's Algorithm 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method, masked, masked_gradients, straight_through, with_zeros
from spartan.methods.registry import register
from spartan.ops.soft_topk import Dual
from spartan.schedules import Moment, Schedule, as_schedule, linear

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine


@register
@dataclass(frozen=True)
class Spartan(Method):
    """Spartan: a soft top-k mask that sharpens over training, projected to the exact budget in the forward pass.

        σ(θ) = θ ⊙ softtopk(|θ|, k, β)         soft masking
        θ̃    = Π_k(σ(θ))                       projection onto the budget
        θ ← θ − η · ∇σ(θ) ∇L(θ̃)                dual averaging: the gradient ignores the projection

    β grows from 1 to `beta.end`, from exploring sparsity patterns (β = 0 is Top-KAST) to training one (β → ∞ is IMP).

    Args:
        beta: the sharpness over training, a schedule or a number; `inf` is the hard mask.
        project: False leaves out the projection (the paper's ablation): the model is soft-masked, and not sparse,
            until finetuning begins with the hard mask of that moment.
        scale_beta: with blocks of h·w entries, scale the end of β by √(h·w), as the paper does.
        solver: "newton", or "sinkhorn" for the paper's iteration (tolerance 0.01, at most 100 iterations).
        init: where Sinkhorn starts: "cold" (the default), "cached" (the last step's dual) or "threshold" (the hard
            threshold, the paper's "sorting").

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=Spartan(beta=linear(1, 20)), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    beta: Schedule | float = linear(1.0, 10.0)
    project: bool = True
    scale_beta: bool = True
    solver: str = "newton"
    init: str | None = None

    name = "spartan"
    year = 2022
    mask_rule = "soft top-k of |θ| at sharpness β, projected to the top k"
    gradient_rule = "∇σ(θ)·g: through the soft mask, straight through the projection"
    reference = "Tai, Tian & Lim, Spartan: Differentiable sparsity via regularized transportation, NeurIPS 2022"

    def __post_init__(self) -> None:
        beta = as_schedule(self.beta)
        if not (beta.start >= 0 and beta.end >= 0):
            raise ValueError(f"Spartan: beta={self.beta!r}; the sharpness must be at least 0 throughout")
        if self.solver not in ("newton", "sinkhorn"):
            raise ValueError(f'Spartan: solver={self.solver!r} is unknown; "newton" and "sinkhorn" are accepted')
        starts = (None,) if self.solver == "newton" else (None, "cold", "cached", "threshold")
        if self.init not in starts:
            raise ValueError(f"Spartan: init={self.init!r} with solver={self.solver!r}; accepted: {starts}")

    @property
    def sparse_from(self) -> Literal["warmup", "finetune"]:  # type: ignore[override]
        """From when the model is truly sparse."""
        return "warmup" if self.project else "finetune"

    @property
    def refuses_nm(self) -> str:  # type: ignore[override]
        """Newton's method solves one mask per group of m."""
        return "" if self.solver == "newton" else "solver='sinkhorn' iterates on a single dual; use solver='newton'"

    def beta_at(self, group: Group, at: Moment) -> float:
        """β, its end scaled for units of one size n by √n: a block's mean magnitude varies √n times less."""
        beta = as_schedule(self.beta)
        if self.scale_beta and len(set(group.sizes)) == 1:
            beta = beta.scaled(math.sqrt(group.sizes[0]))
        return beta.at(at.progress)

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """The dual of the soft mask and the threshold of the hard one."""
        beta = self.beta_at(group, at)
        if math.isinf(beta):
            group.threshold, group.dual = group.top(thetas, group.k), None
        elif self.solver == "newton":
            group.threshold, group.dual = group.soft_top(thetas, group.k, beta)
        else:
            scores = group.scores(thetas)
            group.threshold = group.select(scores, group.k)
            cached = float(group.dual.mu) if self.init == "cached" and isinstance(group.dual, Dual) else None
            group.dual = group.sinkhorn(scores, group.k, beta, init="threshold" if self.init == "threshold" else cached)

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ̃ = Π_k(θ ⊙ softtopk(|θ|)), straight through the projection."""
        u = group.scores(thetas)
        keep = group.expand(self.keep(group, thetas))
        if group.dual is None:  # β = inf
            return [masked(theta, kept) for theta, kept in zip(thetas, keep, strict=True)]
        m = group.expand(group.soft_masks(u))
        sigma = [theta * mask.to(theta.dtype) for theta, mask in zip(thetas, m, strict=True)]
        if not self.project:
            return sigma
        return [straight_through(s, masked(s.detach(), kept)) for s, kept in zip(sigma, keep, strict=True)]

    @torch.no_grad()
    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(G − c·a₁/a₂), with G = Σ g·θ over each unit (Algorithm 5)."""
        if group.dual is None:
            keep = group.expand(self.keep(group, thetas))
            return masked_gradients(grads, keep)
        if all(g is None for g in grads):
            return list(grads)
        masks = group.masks(group.scores(thetas))
        slopes = [m - m * m for m in masks]
        pulls = [
            torch.zeros_like(s) if g is None else group.pattern.reduce(g.to(s.dtype) * theta.to(s.dtype))
            for g, theta, s in zip(grads, thetas, slopes, strict=True)
        ]
        back = group.pull_back(pulls, slopes)
        found: list[Tensor | None] = []
        for i, (theta, g) in enumerate(zip(thetas, grads, strict=True)):
            pulls[i].sub_(back[i])
            pulls[i].mul_(slopes[i]).mul_(group.dual.beta * group.factors[i])
            through_mask = group.pattern.expand(pulls[i], theta.shape) * theta.sign().to(pulls[i].dtype)
            if g is not None:
                through_mask = through_mask.addcmul_(group.pattern.expand(masks[i], theta.shape), g.to(masks[i].dtype))
            found.append(through_mask.to(theta.dtype))
        return found

    def write_fast(self, group: Group, thetas: Sequence[Tensor], engine: Engine) -> bool:
        """[kept] ⊙ m ⊙ θ."""
        if not (self.project and self.solver == "newton" and engine.has(thetas)):
            return False
        engine.project(soft=group.dual is not None)
        return True

    def transform_fast(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], engine: Engine
    ) -> bool:
        """The same formula; a weight that the loss did not reach still feels the others through the shared budget."""
        if self.solver != "newton" or not engine.has(thetas):
            return False
        if group.dual is None:
            engine.where_kept(grads)
        else:
            engine.through_mask(with_zeros(group, grads))
        return True

    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """The soft mask on the kept units, so that w does not jump; the hard one in the ablation."""
        keep = self.keep(group, thetas)
        if group.dual is None or not self.project:
            return super().freeze(group, thetas, at)
        soft = group.masks(group.scores(thetas))
        return [masked(m, kept) for m, kept in zip(soft, keep, strict=True)]
