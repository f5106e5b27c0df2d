"""What every declaration means, as an autograd expression θ → w over one tensor per target.

Masks that have a slope are made here in plain torch, one segment at a time. This is the oracle that solvers, which have
closed forms and kernels, are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spartan.solvers.forms import LEAST, Along, Form, Mask, PerSegment, Shrunk, Stored, Where
from spartan.solvers.torch import TorchSolver
from spartan.solvers.units import masked
from tests.contract.algorithm_3 import exact
from tests.contract.own import Expression, entries_of, values_of
from tests.contract.straight import straight_through


def powers(solver: TorchSolver, thetas: Sequence[Tensor]) -> list[Tensor]:
    """ψ = sign(θ)·|θ|^α."""
    if solver.power == 1.0:
        return list(thetas)
    return [theta.sign() * theta.abs().clamp(min=1e-300).pow(solver.power) for theta in thetas]


def soft_mask(solver: TorchSolver, u: Tensor) -> Tensor:
    """The soft mask of the present duals, differentiable in u: the gradient is that of the solution."""
    problem, duals = solver.problem, solver.dual
    if problem.pattern.rows is not None:
        each = [(u[here].reshape(-1, problem.pattern.rows), duals.beta[s]) for here, s, _, _ in problem.stretches]
        return torch.cat([exact(rows, duals.n, beta, torch.ones_like(rows)).reshape(-1) for rows, beta in each])
    pieces: list[Tensor] = [u] * len(problem.targets)
    for segment, saved, k in zip(problem.segments, duals.saved(), solver.k, strict=True):
        mine = [u[problem.slices[i]] for i in segment.targets]
        costs = [torch.full_like(x, problem.unit_costs[i]) for i, x in zip(segment.targets, mine, strict=True)]
        mask = implicit(torch.cat(mine), torch.cat(costs).detach(), saved, k)
        for i, piece in zip(segment.targets, mask.split([x.numel() for x in mine]), strict=True):
            pieces[i] = piece
    return torch.cat(pieces)


def implicit(u: Tensor, c: Tensor, dual: dict[str, float], k: float) -> Tensor:
    """m = scale · sigmoid(β(u − center) + offset), which costs k, with the gradient of what keeps to that cost.

    dm = m(1−m)(β du + dμ), with dμ such that Σ c dm = 0.
    """
    z = dual["beta"] * u
    m = dual["scale"] * torch.sigmoid(dual["beta"] * (u.detach() - dual["center"]) + dual["offset"])
    assert math.isnan(k) or float((c * m).sum()) == pytest.approx(k, rel=1e-12), "the mask does not cost its budget"
    slope = m * (1 - m)
    if not slope.any():  # everything is kept
        return m + 0.0 * z
    moved = slope * (z - (c * slope * z).sum() / (c * slope).sum())
    return m + moved - moved.detach()


def per_unit(solver: TorchSolver, numbers: PerSegment) -> Tensor:
    """A factor per segment at each of its units."""
    assert not isinstance(numbers, Tensor)  # a device's own numbers are of a step, not of a gradient
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


def hard_values(solver: TorchSolver, form: Form, psi: Sequence[Tensor]) -> list[Tensor]:
    """θ where kept. How Feather and ST-3 shrink it is told by the straight lines of their own tests."""
    if isinstance(form.mask, Shrunk):
        with torch.no_grad():
            return solver.weights(form)
    kept = entries_of(solver, solver.kept(form))
    return [torch.where(keep, x.detach(), 0.0) for x, keep in zip(psi, kept, strict=True)]


def sizes(solver: TorchSolver, i: int, theta: Tensor) -> Tensor:
    """θ, of which only the size of every unit may change, its direction held fixed."""
    way, problem = theta.detach(), solver.problem
    size = problem.reduce(i, theta * way) / problem.reduce(i, way * way)
    return problem.expand(i, size) * way


def damping(solver: TorchSolver, form: Form, psi: Sequence[Tensor]) -> list[Tensor]:
    """1 on A; elsewhere so much of ‖w‖/‖ψ‖ as the form says, over the outputs that a unit has a part in."""
    assert form.damp is not None
    problem, found = solver.problem, []
    each = zip(problem.targets, psi, hard_values(solver, form, psi), entries_of(solver, solver.kept(form)), strict=True)
    for i, (target, x, w, keep) in enumerate(each):
        lengths = []
        for y in (w, x):
            of_outputs = target.axes.at_rows(target.axes.rows(y.detach()).norm(dim=1), y.detach())
            lengths.append(problem.expand(i, problem.reduce(i, of_outputs.square())).sqrt())
        by = float(form.damp[i])
        share = (
            (by * torch.where(lengths[1] > 0, lengths[0] / lengths[1], 0.0)).clamp(LEAST, 1.0) if by else torch.ones(())
        )
        found.append(torch.where(keep, 1.0, share))
    return found


def weights(solver: TorchSolver, form: Form, thetas: Sequence[Tensor], line: Expression | None = None) -> list[Tensor]:
    """w = f(θ), with the gradient that the form declares; a form with an expression of its own needs its straight line."""
    psi = powers(solver, thetas)
    if form.damp is not None:
        plain = weights(solver, form._replace(damp=None), thetas, line)
        return [straight_through(w * f, w.detach()) for w, f in zip(plain, damping(solver, form, psi), strict=True)]
    if form.own is not None:
        assert line is not None, "compared with itself, an expression is always right: write it in own.py once more"
        return line(psi)
    learned = None if form.learned is None else solver.state.learned[form.learned]
    hard = entries_of(solver, solver.kept(form)) if form.project else None
    if isinstance(form.back, Where):
        values = hard_values(solver, form, psi)
        through = [x * f for x, f in zip(psi, entries_of(solver, factors(solver, form, form.back)), strict=True)]
        if learned is not None and isinstance(form.mask, Stored):
            kept = solver.kept(form)
            mask = entries_of(solver, straight_through(learned, kept.to(learned.dtype)))
            through = [x * m for x, m in zip(psi, mask, strict=True)]
        return [straight_through(x, value) for x, value in zip(through, values, strict=True)]
    if isinstance(form.back, Along):
        some = zip(psi, entries_of(solver, solver.kept(form)), strict=True)
        through = [torch.where(keep, x, sizes(solver, i, x)) for i, (x, keep) in enumerate(some)]
        values = hard_values(solver, form, psi)
        return [straight_through(x, value) for x, value in zip(through, values, strict=True)]
    if form.mask is Mask.SOFT:
        soft = soft_mask(solver, values_of(solver, psi) if learned is None else learned)
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
