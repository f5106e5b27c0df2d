"""What every declaration means, as an autograd expression θ → w over one tensor per target.

Masks that have a slope are made by the operators, one segment or row at a time. This is the oracle that solvers, which
have closed forms and kernels, are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spartan import soft_topk
from spartan.ops.newton import Dual
from spartan.ops.soft_topk import SoftMask
from spartan.solvers.forms import Form, Mask, PerSegment, Stored, Where
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import masked
from tests.contract.straight import straight_through


def units_of(solver: TorchSolver, tensors: Sequence[Tensor]) -> Tensor:
    """The sum over each unit."""
    return torch.cat([solver.problem.reduce(i, x) for i, x in enumerate(tensors)])


def entries_of(solver: TorchSolver, units: Tensor) -> list[Tensor]:
    """Each unit's entry at all its places."""
    return [solver.problem.expand(i, units[here]) for i, here in enumerate(solver.problem.slices)]


def powers(solver: TorchSolver, thetas: Sequence[Tensor]) -> list[Tensor]:
    """ψ = sign(θ)·|θ|^α."""
    if solver.power == 1.0:
        return list(thetas)
    return [theta.sign() * theta.abs().clamp(min=1e-300).pow(solver.power) for theta in thetas]


def soft_mask(solver: TorchSolver, u: Tensor) -> Tensor:
    """The soft mask of the present duals, differentiable in u: the gradient is that of the solution."""
    problem, duals = solver.problem, solver.dual
    if problem.pattern.rows is not None:
        found = []
        for here, s, _, _ in problem.stretches:
            rows = u[here].reshape(-1, problem.pattern.rows)
            found += [soft_topk(row, duals.n, duals.beta[s], tol=1e-14) for row in rows]
        return torch.cat(found)
    pieces: list[Tensor] = [u] * len(problem.targets)
    for segment, saved in zip(problem.segments, duals.saved(), strict=True):
        dual = Dual(**{**saved, "passes": int(saved["passes"])})
        mine = [u[problem.slices[i]] for i in segment.targets]
        masks = SoftMask.apply(dual, [problem.unit_costs[i] for i in segment.targets], *mine)
        for i, mask in zip(segment.targets, masks, strict=True):
            pieces[i] = mask
    return torch.cat(pieces)


def per_unit(solver: TorchSolver, numbers: PerSegment) -> Tensor:
    """A factor per segment at each of its units."""
    each = numbers if isinstance(numbers, tuple) else (numbers,) * len(solver.problem.segments)
    owners = solver.problem.segment_of
    return torch.cat(
        [torch.full((n,), each[owners[i]], dtype=solver.dtype) for i, n in enumerate(solver.problem.units)]
    )


def factors(solver: TorchSolver, form: Form, where: Where) -> Tensor:
    """The factors on A, on B∖A and on the rest, per unit."""
    a, b, c = (per_unit(solver, x) for x in (where.a, where.b, where.c))
    trained = solver.trained(form)
    return torch.where(solver.kept(form), a, b if trained is None else torch.where(trained, b, c))


def weights(solver: TorchSolver, form: Form, thetas: Sequence[Tensor]) -> list[Tensor]:
    """w = f(θ), with the gradient that the form declares."""
    psi = powers(solver, thetas)
    if form.own is not None:
        return form.own(psi)
    learned = None if form.learned is None else solver.state.learned[form.learned]
    hard = entries_of(solver, solver.kept(form)) if form.project else None
    if isinstance(form.back, Where):
        with torch.no_grad():
            values = solver.weights(form)
        through = [x * f for x, f in zip(psi, entries_of(solver, factors(solver, form, form.back)), strict=True)]
        if learned is not None and isinstance(form.mask, Stored):
            kept = solver.kept(form)
            mask = entries_of(solver, straight_through(learned, kept.to(learned.dtype)))
            through = [x * m for x, m in zip(psi, mask, strict=True)]
        return [straight_through(x, value) for x, value in zip(through, values, strict=True)]
    if form.mask is Mask.SOFT:
        each = enumerate(zip(psi, solver.problem.factors, strict=True))
        u = torch.cat([solver.problem.reduce(i, x.abs()) * f for i, (x, f) in each]) if learned is None else learned
        soft = soft_mask(solver, u)
    else:
        assert isinstance(form.mask, Stored)
        soft = solver.state.per_unit[form.mask.name]
    sigma = [x * m for x, m in zip(psi, entries_of(solver, soft), strict=True)]
    if hard is None:
        return sigma
    return [straight_through(s, masked(s.detach(), keep)) for s, keep in zip(sigma, hard, strict=True)]


def decay(solver: TorchSolver, form: Form, thetas: Sequence[Tensor]) -> list[Tensor] | None:
    """What the form adds to gradients for θ whatever the loss: the gradient of ½·factor·ψ², its factors held fixed."""
    if form.decay is None:
        return None
    leaves = [theta.detach().requires_grad_() for theta in thetas]
    each = zip(powers(solver, leaves), entries_of(solver, factors(solver, form, form.decay)), strict=True)
    with torch.enable_grad():
        penalty = torch.stack([(0.5 * f * x * x).sum() for x, f in each]).sum()
    return list(torch.autograd.grad(penalty, leaves))
