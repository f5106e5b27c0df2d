"""Computes on what methods keep per unit: entry by entry, with random numbers, and within budgets."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from spartan.ops.drawing import Key, key_of, uniform
from spartan.problem.schedules import Moment
from spartan.solvers.base import Grads
from spartan.solvers.clipping import within_budget
from spartan.solvers.masks import Masks


class Sampling(Masks):
    """Vectors with an entry per unit, by name."""

    def random(self, at: Moment) -> Tensor:
        """A random number in (0, 1) per unit, of this run and step: the same for a unit on every solver.

        It is that of the unit's place among all of them, however weights lie, so that processes agree.
        """
        problem, found = self.problem, []
        for i, key in enumerate(self.keys(at)):
            drawn = uniform(torch.arange(problem.all_units[i], device=self.device).to(torch.int32), key)
            if problem.places:
                drawn = problem.places[i].cut_out(drawn)
            elif problem.by_memory:
                drawn = problem.reduce(i, drawn.view(problem.targets[i].shape))
            found.append(drawn)
        return found[0] if len(found) == 1 else torch.cat(found)

    def keys(self, at: Moment) -> list[Key]:
        """Which random numbers every target has at a moment of a run."""
        now = key_of(at.seed, at.step)
        return [now.joined(key) for key in self.target_keys]

    @cached_property
    def target_keys(self) -> list[Key]:
        """What tells the targets' numbers apart, at any moment.

        Units are numbered through all targets, so that experts in one weight have the numbers of as many weights.
        """
        firsts = itertools.accumulate(self.problem.all_units, initial=0)
        own = key_of(self.problem.numbers[0])
        return [own.after(first) for first, _ in zip(firsts, self.problem.targets, strict=False)]

    def update(
        self,
        names: Sequence[str],
        function: Callable[..., object],
        read: Sequence[str],
        grads: Grads | None = None,
        at: Moment | None = None,
    ) -> None:
        """What is kept per unit under these names ← f(what is kept or learned under others), entry by entry.

        f is also given Σ g·θ of every unit where there are gradients, and a random number of each for a moment; these
        it may overwrite. The last it is given is a list of tensors to write to, one for each name, which may be the
        memory of what it reads under that name.
        """
        units, learned = self.state.per_unit, self.state.learned
        given = [units[name] if name in units else learned[name].detach() for name in read]
        given += [] if grads is None else [self.products(grads)]
        given += [] if at is None else [self.random(at).to(self.dtype)]
        # New ones: a failed step goes back to what was there.
        found = [torch.empty(self.count, dtype=self.dtype, device=self.device) for _ in names]
        function(*given, found)
        units.update(zip(names, found, strict=True))

    def within_budget(self, s: Tensor) -> Tensor:
        """The nearest numbers in [0, 1], one per unit, whose cost fits the budgets; s may be changed in place."""
        return within_budget(self, s, self.k)

    def sample(self, s: str, m: str, beta: float, at: Moment) -> None:
        """m ← sigmoid(β·(logit s + logit U)), U drawn evenly: 1 with probability s, the surer the larger β."""
        kind = torch.finfo(self.dtype)
        least, most = kind.tiny**0.5, 1.0 - 0.5 * kind.eps

        def drawn(s: Tensor, u: Tensor, out: Sequence[Tensor]) -> None:
            # A certain unit stays certain, by itself: CPUs take a hundred times as long for the logarithm of 0. The sum
            # of two is one of a product, in half the time.
            inside, against = s.clamp(least, most), 1.0 - u
            free = torch.eq(s, inside, out=torch.empty_like(s))  # 1 or 0, which CPUs make faster than bools
            odds = u.mul_(inside).div_(against.mul_(inside.neg_().add_(1.0)))
            torch.lerp(s, odds.log_().mul_(beta).sigmoid_(), free, out=out[0])

        self.update([m], drawn, [s], at=at)

    def sample_gradient(self, s: str, m: str, out: str, beta: float, grads: Grads) -> None:
        """∂L/∂s of every unit where w = m·θ: Σ g·θ · βm(1−m)/(s(1−s))."""
        least = torch.finfo(self.dtype).tiny

        def slope(s: Tensor, m: Tensor, pull: Tensor, out: Sequence[Tensor]) -> None:
            spread = (1.0 - s).mul_(s).clamp_(min=least)  # where s is 0 or 1, so is m
            torch.ops.aten.sigmoid_backward.grad_input(pull, m, grad_input=out[0]).div_(spread).mul_(beta)

        self.update([out], slope, [s, m], grads=grads)

    def adam(self, names: Sequence[str], rate: float, betas: tuple[float, float], eps: float, t: int) -> None:
        """Adam's t-th step of s: `names` are those of s, of its two moments and of its gradient, which goes."""
        (one, two), read = betas, list(names)

        def step(s: Tensor, mean: Tensor, square: Tensor, grad: Tensor, out: Sequence[Tensor]) -> None:
            torch.lerp(mean, grad, 1.0 - one, out=out[1])
            torch.mul(square, two, out=out[2]).addcmul_(grad, grad, value=1.0 - two)
            # Both moments are divided by what is missing of their weights, 1 − βᵗ: in the numbers here.
            root = math.sqrt(1.0 - two**t)
            scale = out[2].sqrt().add_(eps * root)
            torch.addcdiv(s, out[1], scale, value=-rate * root / (1.0 - one**t), out=out[0])

        self.update(read[:3], step, read)
        del self.state.per_unit[read[3]]
