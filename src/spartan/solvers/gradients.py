"""Turns gradients for w into gradients for θ, as methods declare it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spartan.solvers.base import Grads, there
from spartan.solvers.forms import KEPT, LEAST, Along, Form, Mask, PerSegment, Shifted, Where
from spartan.solvers.masks import sums_of_outputs
from spartan.solvers.sampling import Sampling
from spartan.solvers.units import masked, times


class Gradients(Sampling):
    """The gradients of a part of the problem. A missing one counts as zero."""

    def turn(self, form: Form | None, grads: Grads) -> Grads:
        """Gradients for w into gradients for θ."""
        assert form is not None
        grads = self.with_missing(form, grads)
        if all(g is None for g in grads):
            return list(grads)
        self.teach(form, grads)
        if form.damp is not None:
            grads = self._damped(form, form.damp, grads)
        if form.own is not None:
            found = self._autograd(form.own, grads)
        elif isinstance(form.back, Where):
            found = self._where(form, form.back, grads)
        elif isinstance(form.back, Along):
            found = self._along(form, grads)
        else:
            found = self._through_mask(form, grads)
        if self.power != 1.0:
            slopes = self.per_target(self.slopes())
            found = [None if g is None else g * slope for g, slope in zip(found, slopes, strict=True)]
        return found

    def slopes(self) -> list[Tensor]:
        """dψ/dθ = α|θ|^(α−1), by slab."""
        return [self.power * theta.abs().pow(self.power - 1.0) for theta in self.theta.slabs]

    def with_missing(self, form: Form, grads: Grads) -> Grads:
        """Zeros where the loss did not reach a weight that still feels the others, through the budget they share."""
        shifted = isinstance(form.mask, Shifted)  # its expression reaches all
        if not (form.couples or shifted) or self.problem.pattern.rows is not None or all(map(there, grads)):
            return grads
        found = list(grads)
        for i, target in enumerate(self.problem.targets):
            others = range(len(grads)) if shifted else self.problem.members(self.problem.segment_of[i])
            if grads[i] is None and target.parameter.grad is None and any(grads[j] is not None for j in others):
                found[i] = torch.zeros_like(target.local)
        return found

    def teach(self, form: Form, grads: Grads) -> None:
        """The gradient of learned ranks, into their `.grad`: Σ g·θ of their unit, or the slope of the soft mask."""
        if form.learned is None or form.mask is Mask.ONE:  # a hard mask has no slope
            return
        pull = self.products(grads)
        if form.mask is Mask.SOFT:
            pull = self._slope(self.pools.soft(self.ranks(form), self.dual), pull)
        _add_grad(self.state.learned[form.learned], pull)

    def _slope(self, mask: Tensor, pull: Tensor) -> Tensor:
        """∂L/∂u = βm(1−m)(G − c·a₁/a₂) of every unit, from G = ∂L/∂m."""
        slope = mask - mask * mask
        return (pull - self.pools.pulled_back(pull, slope)).mul_(slope).mul_(self._per_unit(self.dual.beta))

    def _per_unit(self, numbers: PerSegment) -> float | Tensor:
        """A number per segment at each of its units; itself where there is one for all."""
        if isinstance(numbers, Tensor):
            return self.of_targets(numbers.to(self.dtype))
        if isinstance(numbers, float) or len(set(numbers)) == 1:
            return numbers if isinstance(numbers, float) else numbers[0]
        return self.at_units(torch.tensor(numbers, dtype=self.dtype, device=self.device))

    def _through_mask(self, form: Form, grads: Grads) -> list[Tensor | None]:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(G − c·a₁/a₂), with G = Σ g·θ over each unit (Algorithm 5).

        Masks that are learned or stored have no slope in θ.
        """
        mask = self.mask(form, torch.empty(0))
        assert mask is not None
        given, values = self.slabs(grads), self.values()
        slabs = list(zip(given, self.spread(mask), strict=True))
        if not form.couples:
            return self._as_given([None if g is None else g * m.to(g.dtype) for g, m in slabs], grads)
        slopes = self.spread(times(self.problem, self._slope(mask, self.products(grads)), self.problem.factors))
        found = [slope * value.sign().to(slope.dtype) for slope, value in zip(slopes, values, strict=True)]
        for turned, (g, m) in zip(found, slabs, strict=True):
            if g is not None:
                turned.addcmul_(m, g.to(m.dtype))
        return self._as_given([x.to(value.dtype) for x, value in zip(found, values, strict=True)], grads)

    def _where(self, form: Form, factors: Where, grads: Grads) -> list[Tensor | None]:
        """g times a factor on A, on B∖A and on the rest."""
        if factors.everywhere:
            return list(grads)
        if factors == KEPT:
            pairs = zip(self.slabs(grads), self.spread(self.kept(form)), strict=True)
            return self._as_given([None if g is None else masked(g, keep) for g, keep in pairs], grads)
        pairs = zip(self.slabs(grads), self.spread(self._factors(form, factors)), strict=True)
        return self._as_given([None if g is None else g * x.to(g.dtype) for g, x in pairs], grads)

    def _along(self, form: Form, grads: Grads) -> list[Tensor | None]:
        """g where kept; elsewhere the part of it along θ, unit by unit."""
        values, kept = self.values(), self.kept(form)
        squares = self.reduce([v.to(self.dtype).square() for v in values])
        parts = self.spread(masked(self.products(grads) / squares, ~kept & (squares > 0)))
        each = zip(self.slabs(grads), values, self.spread(kept), parts, strict=True)
        return self._as_given(
            [None if g is None else torch.where(k, g, (part * v).to(g.dtype)) for g, v, k, part in each], grads
        )

    def _damped(self, form: Form, by: Tensor, grads: Grads) -> list[Tensor | None]:
        """g where kept; elsewhere times so much of ‖w‖/‖θ‖, over the outputs that the unit has a part in."""
        problem, values, weights = self.problem, self.per_target(self.values()), self.weights(form)
        squares = [[x.to(self.dtype).square() for x in some] for some in (weights, values)]
        shares = []
        for i, (target, sums) in enumerate(zip(problem.targets, sums_of_outputs(problem, *squares), strict=True)):
            left, whole = (problem.reduce(i, target.axes.at_rows(x, values[i])) for x in sums)
            share = (left / whole.clamp(min=torch.finfo(self.dtype).tiny)).sqrt() * by[i].to(self.dtype)
            shares.append(torch.where(by[i] == 0, 1.0, share.clamp(LEAST, 1.0)))
        factors = self.spread(torch.where(self.kept(form), 1.0, torch.cat(shares)))
        pairs = zip(self.slabs(grads), factors, strict=True)
        return self._as_given([None if g is None else g * x.to(g.dtype) for g, x in pairs], grads)

    def _factors(self, form: Form, factors: Where) -> Tensor:
        """Of every unit."""
        each = (self._per_unit(x) for x in (factors.a, factors.b, factors.c))
        a, b, c = (torch.as_tensor(x, dtype=self.dtype, device=self.device) for x in each)
        trained = self.trained(form) if factors.divides_the_rest else None
        return torch.where(self.kept(form), a, b if trained is None else torch.where(trained, b, c))

    def _as_given(self, slabs: Sequence[Tensor | None], grads: Grads) -> list[Tensor | None]:
        """Gradients by target; none where none was given."""
        found = self.per_target([torch.empty(0) if x is None else x for x in slabs])
        return [None if g is None else x for g, x in zip(grads, found, strict=True)]

    def _autograd(self, own: Callable[[Sequence[Tensor]], list[Tensor]], grads: Grads) -> list[Tensor | None]:
        """Through a method's own expression, to θ and to all that it learns."""
        state, ranks = self.state, self.problem.ranks
        leaves = [x.detach().requires_grad_() for x in self.per_target(self.values())]
        with torch.enable_grad():
            weights = own(leaves)
        outputs = [(w, g) for w, g in zip(weights, grads, strict=True) if g is not None and w.requires_grad]
        if not outputs:
            return [None] * len(leaves)
        inputs = [*leaves, *state.parameters()]
        found = torch.autograd.grad([w for w, _ in outputs], inputs, [g for _, g in outputs], allow_unused=True)
        learned = found[len(leaves) :]
        for parameter, grad in zip(state.parameters(), learned, strict=True):
            if grad is not None:
                whole = any(parameter is p for p in state.learned_per_target.values())
                _add_grad(parameter, ranks.sum(ranks.counted(grad)) if whole else grad)
        return list(found[: len(leaves)])

    def add_decay(self, form: Form, grads: Grads, scale: Tensor | None = None) -> None:
        """Add to gradients for θ what the form adds whatever the loss, times the scale that they still have."""
        for g, added in zip(grads, self.decay(form), strict=True):
            if g is not None:
                g.add_(added if scale is None else added * scale.to(added.dtype))

    def pace(self, form: Form, which: Sequence[int]) -> None:
        """Of these parameters, which an optimizer has moved away from θ: let them go as far as the form says."""
        assert form.pace is not None
        factors = self.per_target(self.spread(self._factors(form, form.pace)))
        for i in which:
            moved, theta = self.problem.targets[i].local, self.theta.views[i]
            # A factor of 1 leaves what the optimizer made of θ as it is, to the bit.
            torch.lerp(theta, moved, factors[i].to(moved.dtype), out=moved)

    def decay(self, form: Form) -> list[Tensor]:
        """What the form adds to the gradients for θ whatever the loss: a multiple of θ, or of ψ times its slope."""
        assert form.decay is not None
        factors = self.spread(self._factors(form, form.decay))
        found = [x.to(value.dtype) * value for x, value in zip(factors, self.values(), strict=True)]
        if self.power != 1.0:
            found = [x * slope for x, slope in zip(found, self.slopes(), strict=True)]
        return self.per_target(found)


def _add_grad(parameter: Tensor, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
