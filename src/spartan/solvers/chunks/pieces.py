"""Cuts weights into pieces that fit the cache, and computes on one."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spartan.ops.parts import CHUNK
from spartan.ops.select import Threshold
from spartan.problem.axes import Axes
from spartan.problem.problem import Problem

# out = x · m(1−m), and out = x where u > λ, exactly +0.0 elsewhere: one operation each.
times_slope = torch.ops.aten.sigmoid_backward.grad_input
where_above = torch.ops.aten.threshold_backward.grad_input

# Exponents whose powers are the same to the bit wherever in a tensor a number stands; of others the last few numbers of
# a piece come from another routine.
EXACT_POWERS = (0.5, 1.0, 2.0, 3.0)


class Piece(NamedTuple):
    """A part of one target that fits the cache."""

    i: int  # number of the target
    segment: int
    cost: float  # of a weight
    factor: float  # u = factor · |θ|
    position: int  # of its first weight in the segment
    row: int  # weights of an output, of which the piece has whole ones; 0 where it has not
    here: slice  # where it is in the target
    units: slice  # where it is among all units
    theta: Tensor
    room: tuple[Tensor, ...]  # four tensors of its length, for whatever is computed


Reader = Callable[[Piece], Tensor]  # what units compete by; it may be in room 0


def cut_up(problem: Problem, thetas: Sequence[Tensor]) -> list[Piece]:
    """All targets in pieces, which share their room; made once, since a view takes as long as a short operation."""
    longest = min(CHUNK, max(problem.units))
    room = [torch.empty(longest, dtype=thetas[0].dtype) for _ in range(4)]
    found = []
    for i, (view, target) in enumerate(zip(thetas, problem.targets, strict=True)):
        theta, size, rows = target.flatten(view), problem.units[i], weights_of_an_output(target.axes, view)
        length = CHUNK // rows * rows if 0 < rows <= CHUNK else CHUNK
        whole = rows if rows and length % rows == 0 else 0
        for start in range(0, size, length):
            here = slice(start, min(start + length, size))
            # In the middle of the room, so that each half, long or short, stays with one of two threads: cores that
            # share no cache would hand it to and fro (seen: 72 ms instead of 44 for a gradient).
            skip = (longest - here.stop + start) // 32 * 16
            views = tuple(r[skip : skip + here.stop - start] for r in room)
            first = problem.slices[i].start
            units = slice(first + here.start, first + here.stop)
            facts = i, problem.segment_of[i], problem.unit_costs[i], problem.factors[i]
            found.append(Piece(*facts, problem.first_position[i] + start, whole, here, units, theta[here], views))
    return found


def weights_of_an_output(axes: Axes, x: Tensor) -> int:
    """How many there are, where they follow one another in memory; else 0."""
    if axes.swapped or x.ndim < 2 or not x.numel() or (axes.stacked and not x.is_contiguous()):
        return 0
    outputs = math.prod(x.shape[: 1 + axes.stacked])
    found = x.numel() // outputs
    return found if outputs == 1 or x.stride(int(axes.stacked)) == found else 0


def as_bytes(mask: Tensor) -> Tensor:
    """Bools as 0 and 1, in the same memory: to choose by random bools takes some ten times as long."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def value_of(piece: Piece, power: float) -> Tensor:
    """θ, or ψ = θ·|θ|^(α−1) in room 3."""
    if power == 1.0:
        return piece.theta
    psi = torch.abs(piece.theta, out=piece.room[3])
    return (psi if power == 2.0 else psi.pow_(power - 1.0)).mul_(piece.theta)


def slope_of(piece: Piece, power: float) -> Tensor:
    """dψ/dθ = α|θ|^(α−1), in room 3."""
    slope = torch.abs(piece.theta, out=piece.room[3])
    return (slope if power == 2.0 else slope.pow_(power - 1.0)).mul_(power)


def magnitude(piece: Piece, power: float) -> Tensor:
    """u of a piece, in room 0."""
    u = torch.abs(value_of(piece, power), out=piece.room[0])
    return u if piece.factor == 1.0 else u.mul_(piece.factor)


def bounds(piece: Piece, threshold: Threshold) -> list[tuple[slice, float]]:
    """Which u are kept, by place in a piece: those above so much. Of those equal to the threshold the first are."""
    value, size = threshold.value, len(piece.theta)
    ties = min(max(threshold.cut - piece.position, 0), size)
    if not ties:
        return [(slice(0, size), value)]
    below = torch.nextafter(piece.theta.new_tensor(value), piece.theta.new_tensor(-math.inf))
    return [(slice(0, ties), float(below)), (slice(ties, size), value)]


def only_kept(piece: Piece, u: Tensor, threshold: Threshold, x: Tensor, out: Tensor) -> Tensor:
    """x where a weight is kept, exactly +0.0 elsewhere."""
    for place, bound in bounds(piece, threshold):
        where_above(x[place], u[place], bound, grad_input=out[place])
    return out


def ones_where_kept(piece: Piece, u: Tensor, threshold: Threshold, out: Tensor) -> Tensor:
    """1 where a weight is kept, else 0."""
    for place, bound in bounds(piece, threshold):
        torch.gt(u[place], bound, out=out[place])
    return out


def soft_mask(u: Tensor, center: float, offset: float, beta: float, out: Tensor) -> Tensor:
    """m of a piece."""
    z = u if center == 0 else torch.sub(u, center, out=out)
    # One operation for βz + offset.
    return torch.add(u.new_tensor(offset), z, alpha=beta, out=out).sigmoid_()


def shrunk_mask(u: Tensor, tau: float | Tensor, p: float, out: Tensor, rest: Tensor) -> Tensor:
    """(1 − (τ/u)ᵖ)^(1/p) above τ > 0; what it is elsewhere does not matter. It takes `rest`."""
    # x = 1 − τ/u without cancellation, and 0 below τ, since powers of negative numbers are slow.
    x = torch.sub(u, tau, out=out).div_(u).clamp_(min=0.0)
    if p == 1.0:
        return x
    if p not in (2.0, 3.0, 4.0):
        return torch.neg(x, out=x).log1p_().mul_(p).expm1_().neg_().pow_(1.0 / p)
    # 1 − qᵖ = x·(1 + q + … + qᵖ⁻¹) with q = 1 − x, in a fifth of the time.
    q = torch.sub(1.0, x, out=rest)
    series = q + 1.0
    for _ in range(int(p) - 2):
        series.mul_(q).add_(1.0)
    return x.mul_(series).pow_(1.0 / p)


def shifted_value(piece: Piece, value: Tensor, z: Tensor, below: float, shift: float, out: Tensor) -> Tensor:
    """sign(θ)·(z − λ), divided by what makes u of |θ|: θ times the mask `Shifted` where kept, when it shrinks at all."""
    if shift + below <= 0:
        return value
    torch.sub(z, below, out=out).mul_(torch.sign(value, out=piece.room[2]))
    return out if piece.factor == 1.0 else out.div_(piece.factor)


def scaled_rows(piece: Piece, value: Tensor, u: Tensor, threshold: Threshold, mask: Tensor) -> Tensor:
    """A mask times 1.01/(r + 0.01), r being the share of each output's magnitude that is kept; takes room 2."""
    room = piece.room[2].view(-1, piece.row)
    before = torch.abs(value, out=piece.room[2]) if piece.factor != 1.0 else u
    whole = before.view(-1, piece.row).sum(1)
    only_kept(piece, u, threshold, before, out=piece.room[2])
    left = room.sum(1)
    scale = 1.01 / ((left / piece.row + 1e-6) / (whole / piece.row + 1e-6) + 0.01)
    mask.view(-1, piece.row).mul_(scale[:, None])
    return mask
