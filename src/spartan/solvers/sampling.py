"""Computes on what methods keep per unit: entry by entry, with random numbers, and within budgets."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spartan.problem.schedules import Moment
from spartan.solvers.base import Grads
from spartan.solvers.clipping import within_budget
from spartan.solvers.masks import Masks
from spartan.solvers.units import random_units

EDGE = 1e-7  # random numbers are drawn within what float32 tells from 0 and 1


class Sampling(Masks):
    """Vectors with an entry per unit, by name."""

    def random(self, at: Moment) -> Tensor:
        """A random number in [0, 1) per unit, of this run and step, for what is drawn at every one; kernels draw others."""
        return random_units(self, at)

    def update(
        self,
        names: Sequence[str],
        function: Callable[..., Sequence[Tensor]],
        read: Sequence[str],
        grads: Grads | None = None,
        at: Moment | None = None,
    ) -> None:
        """What is kept per unit under these names ← f(what is kept or learned under others), entry by entry.

        f is also given Σ g·θ of every unit where there are gradients, and a random number of each for a moment.
        """
        units, learned = self.state.per_unit, self.state.learned
        given = [units[name] if name in units else learned[name].detach() for name in read]
        given += [] if grads is None else [self.products(grads)]
        given += [] if at is None else [self.random(at).to(self.dtype)]
        units.update(zip(names, function(*given), strict=True))

    def within_budget(self, s: Tensor) -> Tensor:
        """The nearest numbers in [0, 1], one per unit, whose cost fits the budgets; s may be changed in place."""
        return within_budget(self, s, self.k)

    def sample(self, s: str, m: str, beta: float, at: Moment) -> None:
        """m ← sigmoid(β·(logit s + logit U)), U drawn evenly: 1 with probability s, the surer the larger β."""
        kind = torch.finfo(self.dtype)
        least, most = kind.tiny, 1.0 - 0.5 * kind.eps

        def drawn(s: Tensor, u: Tensor) -> list[Tensor]:
            # A certain unit stays certain, by itself: CPUs take a hundred times as long for the logarithm of 0.
            m = torch.logit(s.clamp(least, most)).add_(torch.logit(u, EDGE)).mul_(beta).sigmoid_()
            return [torch.maximum(m.mul_(s.ceil()), s.floor())]

        self.update([m], drawn, [s], at=at)

    def sample_gradient(self, s: str, m: str, out: str, beta: float, grads: Grads) -> None:
        """∂L/∂s of every unit where w = m·θ: Σ g·θ · βm(1−m)/(s(1−s))."""
        least = torch.finfo(self.dtype).tiny

        def slope(s: Tensor, m: Tensor, pull: Tensor) -> list[Tensor]:
            spread = (s * (1.0 - s)).clamp_(min=least)  # where s is 0 or 1, so is m
            return [(beta * m).mul_(1.0 - m).div_(spread).mul_(pull)]

        self.update([out], slope, [s, m], grads=grads)

    def adam(self, names: Sequence[str], rate: float, betas: tuple[float, float], eps: float, t: int) -> None:
        """Adam's t-th step of s: `names` are those of s, of its two moments and of its gradient, which goes."""
        (one, two), read = betas, list(names)

        def step(s: Tensor, mean: Tensor, square: Tensor, grad: Tensor) -> list[Tensor]:
            mean = torch.lerp(mean, grad, 1.0 - one)
            square = torch.lerp(square, grad * grad, 1.0 - two)
            scale = (square / (1.0 - two**t)).sqrt_().add_(eps)
            return [s - (mean / (1.0 - one**t)).mul_(rate).div_(scale), mean, square]

        self.update(read[:3], step, read)
        del self.state.per_unit[read[3]]
