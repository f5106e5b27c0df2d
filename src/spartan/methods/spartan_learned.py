"""Spartan with learned values: the soft mask has parameters of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spartan.groups import Group
from spartan.methods.base import Method, masked, straight_through
from spartan.methods.registry import register
from spartan.schedules import Moment, Schedule, as_schedule, linear


@register
@dataclass(frozen=True)
class SpartanLearned(Method):
    """Spartan with learned values: the soft top-k mask ranks auxiliary parameters φ instead of magnitudes.

        σ(θ; φ) = θ ⊙ softtopk(φ, k, β)             soft masking
        θ̃       = Π_k(σ(θ; φ))                      projection onto the budget: the k units of largest φ
        θ ← θ − η · ∂σ/∂θ · ∇L(θ̃)                   dual averaging, for both: the gradient ignores the projection
        φ ← φ − η · ∂σ/∂φ · ∇L(θ̃)

    The paper names this extension without an experiment; what follows is this library's. φ holds one number per unit and
    starts at its magnitude (the value per cost by which Spartan ranks), so that the first mask is Spartan's. It is
    trained by the optimizer of the weights, without weight decay, which would only soften the mask.

    Magnitudes drift apart while the weights train, and the same β gives Spartan a mask that sharpens; φ moves through
    the mask alone, which a soft mask hardly lets it: at Spartan's own β the mask stays soft and the weights small. So β is
    counted in units of 1/φ̄, φ̄ the mean of φ at the start: then it means the same for weights of any size, and the
    values of φ move at the pace of the weights.

    Args:
        beta: the sharpness over training, a schedule or a number; `inf` is the hard mask, which teaches φ nothing.
        scale_beta: with blocks of h·w entries, scale the end of β by √(h·w), as Spartan does.
        relative: False takes β as it is, as Spartan does.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=10, method=SpartanLearned(), warmup=0)
        >>> int((model.weight != 0).sum())
        16
    """

    beta: Schedule | float = linear(1.0, 10.0)
    scale_beta: bool = True
    relative: bool = True

    name = "spartan-learned"
    year = 2022
    mask_rule = "soft top-k of learned values φ at sharpness β, projected to the top k"
    gradient_rule = "∇σ(θ; φ)·g for θ and φ: through the soft mask, straight through the projection"
    needs = "one learned value per unit"
    reference = "Tai, Tian & Lim, Spartan: Differentiable sparsity via regularized transportation, NeurIPS 2022"
    refuses_nm = ""
    learned_options = {"weight_decay": 0.0}  # noqa: RUF012

    def __post_init__(self) -> None:
        beta = as_schedule(self.beta)
        if not (beta.start >= 0 and beta.end >= 0):
            raise ValueError(f"SpartanLearned: beta={self.beta!r}; the sharpness must be at least 0 throughout")

    def beta_at(self, group: Group, at: Moment) -> float:
        """β, its end scaled for units of one size n by √n, over the mean of φ at the start."""
        beta = as_schedule(self.beta)
        if self.scale_beta and len(set(group.sizes)) == 1:
            beta = beta.scaled(math.sqrt(group.sizes[0]))
        return beta.at(at.progress) / (float(group.tensors["scale"]) if self.relative else 1.0)

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """φ = |θ|, per unit."""
        scores = [u.detach() for u in group.scores(thetas)]
        for i, u in enumerate(scores):
            group.learned[f"phi{i}"] = nn.Parameter(u.clone())
        if self.relative:
            mean = float(group.sum_over_ranks([u.double().sum() for u in scores]).sum()) / sum(group.all_units)
            group.tensors["scale"] = torch.tensor(mean or 1.0, dtype=torch.float64)

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """The dual of the soft mask and the threshold of the hard one."""
        scores, beta = _phi(group), self.beta_at(group, at)
        edge = group.boundary(scores, group.k)
        group.threshold = edge.threshold
        group.dual = None if math.isinf(beta) else group.solve(scores, group.k, beta, start=edge)

    def ranked(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """φ."""
        return _phi(group)

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """The units of largest φ."""
        assert group.threshold is not None
        return group.keep(_phi(group), group.threshold)

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ̃ = Π_k(θ ⊙ softtopk(φ)), straight through the projection."""
        keep = group.expand(self.keep(group, thetas))
        if group.dual is None:  # β = inf
            return [masked(theta, kept) for theta, kept in zip(thetas, keep, strict=True)]
        m = group.expand(group.soft_masks(list(group.learned.values())))
        sigma = [theta * mask.to(theta.dtype) for theta, mask in zip(thetas, m, strict=True)]
        return [straight_through(s, masked(s.detach(), kept)) for s, kept in zip(sigma, keep, strict=True)]

    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """The soft mask on the kept units, so that w does not jump."""
        if group.dual is None:
            return super().freeze(group, thetas, at)
        keep = self.keep(group, thetas)
        return [masked(m, kept) for m, kept in zip(group.masks(_phi(group)), keep, strict=True)]


def _phi(group: Group) -> list[Tensor]:
    return [phi.detach() for phi in group.learned.values()]
