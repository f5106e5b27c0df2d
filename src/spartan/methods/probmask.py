"""ProbMask: a learned probability per unit; the expected cost of what they sample is the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods._masks import random_ranks
from spartan.methods.base import Method
from spartan.methods.registry import register
from spartan.ops.parts import Parts, Spread
from spartan.schedules import Moment, Schedule, as_schedule, linear

# Passes of the projection.
PASSES = 16
# Adam's, as everywhere.
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@register
@dataclass(frozen=True)
class ProbMask(Method):
    """ProbMask: learn the probability that a unit is kept, train on sampled soft masks, keep the most probable.

        m = sigmoid((logit(s) + ξ)/τ),  ξ ~ Logistic(0, 1)       a new sample every step; Bernoulli(s) as τ → 0
        w = θ ⊙ m
        θ ← θ − η · m ⊙ ∇L(w)
        s ← Π(s − η_s · Adam(∂m/∂s · Σ ∇L(w) ⊙ θ))               summed over each unit
        Π: the nearest point of {0 ≤ s ≤ 1, Σ c·s ≤ k}            s ← min(max(s − v·c, 0), 1) with one shift v

    Every s starts at 1. The budget k stays whole for a while, then falls as a cubic; τ falls until finetuning, when the
    k units of largest s are kept and the others are gone: until then the model is soft-masked, not sparse, and `density`
    counts what would be kept now. Once s is 0 or 1 a unit's mask no longer varies, and its s no longer learns.

    The method runs Adam for s itself, whatever optimizer trains the weights, with the learning rate falling to 0 as a
    cosine until finetuning. The paper finetunes the best of ten sampled masks, whose cost is k on average only.

    Args:
        score_lr: η_s at the start. None is the paper's 0.006 for runs of its 58,800 steps or more; shorter ones take as much
            longer strides, up to 0.2, or the probabilities would not get to 0 and 1 in time.
        temperature: τ over training, a schedule or a number.
        hold: fraction of the warm-up before the budget begins to fall.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=20, method=ProbMask()).attach(optimizer)
        >>> for _ in range(20):
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> int((model.weight != 0).sum())
        16
    """

    score_lr: float | None = None
    temperature: Schedule | float = linear(1.0, 0.03)
    hold: float = 4 / 15

    name = "probmask"
    year = 2021
    mask_rule = "sampled by learned probabilities, softly; in the end the most probable"
    gradient_rule = "m·g, m the sampled mask; for the probabilities ∂m/∂s · Σ g·θ over each unit"
    needs = "one probability per unit, with Adam's two moments, and the sampled mask"
    reference = (
        "Zhou, Zhang, Xu & Zhang, Effective sparsification of neural networks with global sparsity constraint, "
        "CVPR 2021"
    )
    sparse_from = "finetune"
    random = True
    # Of 300 epochs, the budget falls from 48 to 180; 20 more at 1% of the learning rate finetune.
    warmup = 0.5625
    finetune = 0.0625

    def __post_init__(self) -> None:
        if self.score_lr is not None and not 0 <= self.score_lr < math.inf:
            raise ValueError(f"ProbMask: score_lr={self.score_lr!r}; None or a learning rate of at least 0 is needed")
        tau = as_schedule(self.temperature)
        if not (tau.start > 0 and tau.end > 0):
            raise ValueError(f"ProbMask: temperature={self.temperature!r}; it must be greater than 0 throughout")
        if not 0 <= self.hold < 1:
            raise ValueError(f"ProbMask: hold={self.hold!r} is not a fraction of the warm-up; it must lie in [0, 1)")

    @property
    def ramp(self) -> Schedule:  # type: ignore[override]
        """Nothing is asked for while it holds, then a cubic."""
        return Held(0.0, 1.0, "cubic", self.hold)

    def beta_at(self, group: Group, at: Moment) -> float:
        """1/τ."""
        return 1.0 / as_schedule(self.temperature).at(at.progress)

    def score_lr_at(self, at: Moment) -> float:
        """η_s."""
        start = self.score_lr
        if start is None:
            start = min(0.2, 6e-3 * max(1.0, 58_800 / max(1, at.freeze_step)))
        return start * (0.5 + 0.5 * math.cos(math.pi * at.progress))

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """s = 1, with no moments yet."""
        for i, u in enumerate(group.scores(thetas)):
            group.tensors[f"s{i}"] = torch.ones_like(u)
            group.tensors[f"mean{i}"] = torch.zeros_like(u)
            group.tensors[f"square{i}"] = torch.zeros_like(u)
        group.tensors["updates"] = torch.zeros((), dtype=torch.float64, device=thetas[0].device)

    def observe(self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment) -> None:
        """∂L/∂s, kept for `choose`: a step that a loss scaler skips must not count."""
        sharpness = self.beta_at(group, at)
        for i, (theta, g) in enumerate(zip(thetas, grads, strict=True)):
            s, m = group.tensors[f"s{i}"], group.tensors[f"m{i}"]
            if g is None:
                group.tensors[f"grad{i}"] = torch.zeros_like(s)
                continue
            spread = s * (1.0 - s)
            slope = torch.where(spread > 0, sharpness * m * (1.0 - m) / spread, 0.0)
            group.tensors[f"grad{i}"] = slope * group.pattern.reduce(g.to(s.dtype) * theta.to(s.dtype))

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """Update the probabilities if there is a gradient, project them, and sample a mask."""
        tensors = group.tensors
        if "grad0" in tensors:
            self._adam(group, at)
        for i, s in enumerate(project(group, _probabilities(group))):
            tensors[f"s{i}"] = s
        sharpness = self.beta_at(group, at)
        for i, drawn in enumerate(random_ranks(group, thetas, at)):
            s = tensors[f"s{i}"]
            # Within what float32 tells from 0 and 1, so that a certain unit stays certain.
            noise = torch.logit(drawn.to(s.dtype), 1e-7)
            tensors[f"m{i}"] = torch.sigmoid((torch.logit(s) + noise) * sharpness)
        if at.phase == "finetune":
            group.threshold = group.select(self.ranked(group, thetas), group.k)

    def _adam(self, group: Group, at: Moment) -> None:
        """s ← s − η_s · Adam(∂L/∂s); tensors are replaced, so that a failed step can go back to the old ones."""
        tensors = group.tensors
        rate = self.score_lr_at(at)
        tensors["updates"] = t = tensors["updates"] + 1.0
        unbias, unbias_square = 1.0 - BETA1**t, 1.0 - BETA2**t
        for i, s in enumerate(_probabilities(group)):
            grad = tensors.pop(f"grad{i}")
            tensors[f"mean{i}"] = mean = torch.lerp(tensors[f"mean{i}"], grad, 1.0 - BETA1)
            tensors[f"square{i}"] = square = torch.lerp(tensors[f"square{i}"], grad * grad, 1.0 - BETA2)
            tensors[f"s{i}"] = s - rate * (mean / unbias) / ((square / unbias_square).sqrt() + EPS)

    def ranked(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """s; where it is 0 the larger weights come first, below every other unit."""
        pairs = zip(_probabilities(group), group.scores(thetas), strict=True)
        return [torch.where(s > 0, s, -1.0 / (1.0 + u)) for s, u in pairs]

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """The units of largest s."""
        ranks = self.ranked(group, thetas)
        return group.keep(ranks, group.threshold or group.select(ranks, group.k))

    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """The kept units, whole; nothing else is needed any more."""
        mask = super().freeze(group, thetas, at)
        group.tensors.clear()
        return mask

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """θ ⊙ m."""
        m = group.expand([group.tensors[f"m{i}"] for i in range(len(thetas))])
        return [theta * mask.to(theta.dtype) for theta, mask in zip(thetas, m, strict=True)]

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """m ⊙ g."""
        m = group.expand([group.tensors[f"m{i}"] for i in range(len(thetas))])
        return [None if g is None else g * mask.to(g.dtype) for g, mask in zip(grads, m, strict=True)]


@dataclass(frozen=True, repr=False)
class Held(Schedule):
    """A schedule that stays at its start for a fraction of the progress."""

    hold: float = 0.0

    def at(self, progress: float) -> float:
        """The value at a progress between 0 and 1."""
        return super().at((progress - self.hold) / (1.0 - self.hold))


def _probabilities(group: Group) -> list[Tensor]:
    return [group.tensors[f"s{i}"] for i in range(len(group.shapes))]


def project(group: Group, s: Sequence[Tensor]) -> list[Tensor]:
    """The nearest probabilities in [0, 1] whose expected cost fits the budget `group.k`.

        min(max(s − v·c, 0), 1) with the smallest v ≥ 0 for which Σ c·s ≤ k

    v is found on the device, without waiting for it.
    """
    v = _shift(group.parts(s), group.k, max(group.unit_costs))
    return [(x - v * (c / max(group.unit_costs))).clamp(0.0, 1.0) for x, c in zip(s, group.unit_costs, strict=True)]


def _shift(parts: Parts, k: float, unit: float) -> Tensor:
    """v, with costs in multiples of `unit`, by bracketed Newton on the piecewise linear Σ c·s(v) = k.

    The number of passes is fixed, so that nothing waits for the device; of all passes the best counts.
    """
    v = low = best = torch.zeros((), dtype=torch.float64, device=parts[0].u.device)
    ends = [(part.u / (part.c / unit)).max().double() for part in parts if part.u.numel()]  # a shard may be empty
    high = torch.stack([torch.zeros_like(v), *ends]).max()
    ranks = parts.ranks if isinstance(parts, Spread) else None
    if ranks is not None:
        high = ranks.largest(high)
    last = least = torch.full_like(v, math.inf)
    for _ in range(PASSES):
        excess, slope = torch.zeros_like(v), torch.zeros_like(v)
        for u, c in parts:
            x = u - v * (c / unit)
            excess = excess + _weigh(x.clamp(0.0, 1.0), c)
            slope = slope + _weigh((x > 0) & (x <= 1), c * c / unit)  # to the right: a whole unit gives way too
        if ranks is not None:
            excess, slope = ranks.sum(torch.stack((excess, slope))).unbind()
        excess = excess - k
        off = excess.abs()
        best, least = torch.where(off < least, v, best), torch.minimum(off, least)
        low, high = torch.where(excess > 0, v, low), torch.where(excess > 0, high, v)
        step = v + excess / slope
        fast = (step > low) & (step < high) & (off < 0.5 * last)
        v, last = torch.where(fast, step, 0.5 * (low + high)), off
    return best


def _weigh(x: Tensor, c: float | Tensor) -> Tensor:
    """Σ c·x, in float64."""
    return (x * c).sum(dtype=torch.float64) if isinstance(c, Tensor) else x.sum(dtype=torch.float64) * c
