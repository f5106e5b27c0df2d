"""Single weights on a CPU: pieces that stay in the cache go through all operations before the next one is read.

Everything is arithmetic on floats: torch's operations on bools take up to seven times as long as a product (25.5M
weights on 2 cores: a product 2 ms, a sigmoid 5, a comparison into floats 1.4, into bools 6, `where` 12, `nonzero` 11).

The threshold and τ start from the last step's. The former is exact wherever the search starts; the latter is saved with
the former, so that a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from spartan.kernels.engine import Engine
from spartan.ops.parts import CHUNK, Part, check_budget, total_cost
from spartan.ops.select import Threshold, boundary
from spartan.ops.soft_topk import Dual, logit, rest_of_step, solve

PASSES = 12
WINDOW = 4e-3  # of the threshold, up and down: where it is looked for, at first
ROW = 64  # so many weights are passed over at once where none is near the threshold
# Up to β·τ = 8 the product βu, rounded, is as good as β(u − center): z is off by 5e-7 where the mask is not 0 or 1.
PLAIN = 8.0

# out = x · m(1−m), and out = x where |u| > λ, exactly +0.0 elsewhere: one operation each.
_times_slope = torch.ops.aten.sigmoid_backward.grad_input
_where_above = torch.ops.aten.hardshrink_backward.grad_input


class Piece(NamedTuple):
    """A part of one tensor that fits the cache."""

    i: int  # number of the tensor
    position: int  # of its first weight in the group
    here: slice  # where it is in the tensor
    theta: Tensor
    room: tuple[Tensor, ...]  # three tensors of its length, for whatever is computed


class ChunkEngine(Engine):
    """Goes through the weights of one group in chunks.

    Args:
        parameters: the model's tensors, in row-major order.
        thetas: the dense weights of each.
        costs: what a weight of each costs.
        factors: u = factor · |θ|.
    """

    fills_in = False

    def __init__(
        self,
        parameters: Sequence[Tensor],
        thetas: Sequence[Tensor],
        costs: Sequence[float],
        factors: Sequence[float],
    ) -> None:
        self.parameters, self.thetas = list(parameters), list(thetas)
        self.costs, self.factors = list(costs), list(factors)
        self.sizes = [t.numel() for t in thetas]
        self.dtype = thetas[0].dtype
        self.total = math.fsum(n * c for n, c in zip(self.sizes, costs, strict=True))
        self._pieces = self._cut_up()
        self._threshold: Threshold | None = None
        self._dual: Dual | None = None
        self._window = WINDOW

    def _cut_up(self) -> list[Piece]:
        """All tensors in pieces, which share their room; made once, since a view takes as long as a short operation."""
        longest = min(CHUNK, max(self.sizes))
        room = [torch.empty(longest, dtype=self.dtype) for _ in range(3)]
        found, position = [], 0
        for i, theta in enumerate(self.thetas):
            for start in range(0, self.sizes[i], CHUNK):
                here = slice(start, min(start + CHUNK, self.sizes[i]))
                # In the middle of the room, so that each half, long or short, stays with one of two threads: cores that
                # share no cache would hand it to and fro (seen: 72 ms instead of 44 for a gradient).
                skip = (longest - here.stop + start) // 32 * 16
                views = tuple(r[skip : skip + here.stop - start] for r in room)
                found.append(Piece(i, position + start, here, theta.detach().view(-1)[here], views))
            position += self.sizes[i]
        return found

    def has(self, thetas: Sequence[Tensor]) -> bool:
        """Whether these are the dense weights that it reads, and not something computed from them."""
        return thetas[0].data_ptr() == self.thetas[0].data_ptr() and [t.numel() for t in thetas] == self.sizes

    def _beside(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece and that of other tensors, where there are any."""
        flat = [None if t is None else t.detach().view(-1) for t in tensors]
        for piece in self._pieces:
            other = flat[piece.i]
            if other is not None:
                yield piece, other[piece.here]

    def _scores(self, piece: Piece) -> Tensor:
        """u of a piece, in room 0."""
        u = torch.abs(piece.theta, out=piece.room[0])
        return u if self.factors[piece.i] == 1.0 else u.mul_(self.factors[piece.i])

    @staticmethod
    def _mask(u: Tensor, dual: Dual, out: Tensor) -> Tensor:
        """m of a piece."""
        z = u if dual.center == 0 else torch.sub(u, dual.center, out=out)
        # One operation for βz + offset.
        return torch.add(u.new_tensor(dual.offset), z, alpha=dual.beta, out=out).sigmoid_()

    def _bounds(self, piece: Piece) -> list[tuple[slice, float]]:
        """Which u are kept, by place in a piece: those above so much. Of those equal to the threshold the first are."""
        threshold = self._threshold
        assert threshold is not None
        value, size = float(threshold.value), len(piece.theta)
        ties = min(max(int(threshold.cut) - piece.position, 0), size)
        if not ties:
            return [(slice(0, size), value)]
        zero = piece.theta.new_zeros(())
        below = -math.inf if value <= 0 else float(torch.nextafter(zero + value, zero))
        return [(slice(0, ties), below), (slice(ties, size), value)]

    def _only_kept(self, piece: Piece, u: Tensor, x: Tensor, out: Tensor) -> None:
        """x where a weight is kept, exactly +0.0 elsewhere."""
        for place, bound in self._bounds(piece):
            _where_above(x[place], u[place], bound, grad_input=out[place])

    # ------------------------------------------------------------------ masks

    def choose(self, k: float, beta: float | None) -> tuple[Threshold, Dual | None]:
        """The threshold of the k largest weights, and with a β the soft mask."""
        k = check_budget(k, self.total)
        start = self._start(beta)
        found, f, d = self._first_pass(k, start)
        dual = None if start is None else self._newton(k, start, f, d)
        if found is None or (beta is not None and dual is None):  # from nothing
            parts = [
                Part(torch.abs(t).view(-1).mul_(x), c)
                for t, x, c in zip(self.thetas, self.factors, self.costs, strict=True)
            ]
            edge = boundary(parts, k)
            found = edge.threshold
            dual = solve(parts, k, beta, start=edge) if beta is not None and dual is None else dual
        self._dual = dual
        if self._threshold is not None and found.value:  # look where it moves to; the answer does not depend on this
            moved = abs(float(found.value) - float(self._threshold.value)) / abs(float(found.value))
            self._window = min(max(4 * moved, 0.5 * self._window, 1e-4), 0.1) if math.isfinite(moved) else WINDOW
        self._threshold = found
        return found, self._dual

    def _start(self, beta: float | None) -> Dual | None:
        """The last τ under the new β."""
        last = self._dual
        if beta is None or last is None or not (last.beta > 0 and beta > 0 and math.isfinite(last.offset)):
            return None
        return self._split(beta, float(last.center), float(last.offset) * beta / last.beta)

    def _split(self, beta: float, origin: float, s: float) -> Dual:
        """The dual of β(u − origin) + s, written from where the mask is neither 0 nor 1: u − center is exact there."""
        tau = origin - s / beta
        center = 0.0 if beta * abs(tau) <= PLAIN else origin if abs(s) <= 4.0 else tau
        center = float(torch.tensor(center, dtype=self.dtype))
        return Dual(beta, center, s - beta * (origin - center))

    def _first_pass(self, k: float, dual: Dual | None) -> tuple[Threshold | None, float, float]:
        """The threshold, if it is near the last one; and F and D at the dual, if there is one."""
        near = self._threshold
        value = -math.inf if near is None else float(near.value)
        hard = math.isfinite(value) and k < self.total
        least, most = value - self._window * abs(value), value + self._window * abs(value)
        above, around, f, d = 0.0, [], 0.0, 0.0
        if not hard and dual is None:
            return None, f, d
        for piece in self._pieces:
            u, cost = self._scores(piece), self.costs[piece.i]
            if hard:
                larger, some = self._near(u, least, most, piece.room)
                above += larger * cost
                around.append(some)
            if dual is not None:
                one, two = self._moments(self._mask(u, dual, piece.room[1]))
                f, d = f + cost * one, d + cost * (one - two)
        return self._inside(around, least, most, k, above) if hard else None, f, d

    @staticmethod
    def _near(u: Tensor, least: float, most: float, room: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
        """How many of a piece lie above a window, and a few that hold all that lie in it; takes rooms 1 and 2."""
        # Ones and zeros in the data's own type; counts up to 2²⁴ are exact.
        over = torch.gt(u, most, out=room[1])
        larger, whole = int(over.sum()), u.numel() - u.numel() % ROW
        inside = torch.ge(u, least, out=room[2]).sub_(over)
        rows = inside[:whole].view(-1, ROW).amax(1).nonzero().view(-1)
        some = [u[:whole].view(-1, ROW).index_select(0, rows).view(-1)]
        return larger, some if whole == u.numel() else [*some, u[whole:].clone()]

    def _inside(
        self, around: list[list[Tensor]], least: float, most: float, k: float, above: float
    ) -> Threshold | None:
        """The threshold within a window, when what lies above it is kept; None if it is not there."""
        few = torch.cat([x for some in around for x in some])
        owner = torch.repeat_interleave(torch.tensor([sum(map(len, some)) for some in around]))
        there = few.ge(least).logical_and_(few.le(most))
        few, owner = few[there], owner[there]
        counts = torch.bincount(owner, minlength=len(around)).tolist()
        parts = [Part(u, self.costs[p.i]) for u, p in zip(few.split(counts), self._pieces, strict=True)]
        room = k - above
        if room < 0 or room >= total_cost(parts):
            return None
        found = boundary(parts, room).threshold
        if not math.isfinite(found.value):
            return None
        cut = int(found.cut)  # where they are listed here, the first of those equal to it that is not kept
        if 0 < cut < len(few):
            piece = self._pieces[int(owner[cut])]
            kept = int((few[:cut] == found.value).logical_and_(owner[:cut] == owner[cut]).sum())  # of that piece
            cut = piece.position + int((self._scores(piece) == found.value).nonzero()[kept])
        elif cut:
            cut = sum(self.sizes)
        return Threshold(found.value, cut, found.cost + above)

    @staticmethod
    def _moments(m: Tensor) -> tuple[float, float]:
        return float(m.sum()), float(torch.dot(m, m))

    def _newton(self, k: float, dual: Dual, f: float, d: float) -> Dual | None:
        """Root of Σ c·m = k on the logit of the budget fraction (`ops.soft_topk` says why), from F and D at the start.

        None where that is no good start.
        """
        beta, goal = dual.beta, logit(k / self.total)
        if math.isinf(goal):
            return Dual(beta, 0.0, goal)
        tol, last = (1e-6 if self.dtype == torch.float32 else 1e-13), math.inf
        for passes in range(1, PASSES + 1):
            residual = abs(f - k) / k
            if residual <= tol:
                return replace(dual, passes=passes, residual=residual)
            if not (0 < f < self.total and d > 0 and residual < last):
                return None
            step = (logit(f / self.total) - goal) * f * (self.total - f) / (self.total * d)
            last, rest = residual, rest_of_step(step, f, d, self.total)
            dual = self._split(beta, float(dual.center), float(dual.offset) - step)
            if rest <= 0.5 * tol:  # the other half is for rounding
                return replace(dual, passes=passes, residual=max(rest, torch.finfo(self.dtype).eps))
            f = d = 0.0
            for piece in self._pieces:
                one, two = self._moments(self._mask(self._scores(piece), dual, piece.room[1]))
                f, d = f + self.costs[piece.i] * one, d + self.costs[piece.i] * (one - two)
        return None

    def restore(self, threshold: Threshold, dual: Dual | None) -> tuple[Threshold, Dual | None]:
        """Go on from masks that were saved."""
        self._threshold = threshold.host()
        self._dual = None if dual is None else dual.host()
        return self._threshold, self._dual

    # ------------------------------------------------------------------ weights

    def put(self) -> None:
        """θ into the parameters."""
        torch._foreach_copy_([p.detach() for p in self.parameters], self.thetas)

    def take(self) -> None:
        """θ from the parameters."""
        torch._foreach_copy_(self.thetas, [p.detach() for p in self.parameters])

    def project(self, soft: bool) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters; exactly +0.0 where not kept."""
        dual = self._dual
        assert dual is not None or not soft
        for piece, parameter in self._beside(self.parameters):
            if self.factors[piece.i] != 1.0:
                u = self._scores(piece)
                m = self._mask(u, dual, piece.room[1]) if soft and dual is not None else None
                self._only_kept(piece, u, piece.theta if m is None else m.mul_(piece.theta), out=parameter)
                continue
            for place, bound in self._bounds(piece):  # u is |θ| itself: half the time of the above
                torch.hardshrink(piece.theta[place], bound, out=parameter[place])
            if soft and dual is not None:
                parameter.mul_(self._mask(self._scores(piece), dual, piece.room[0]))

    # ------------------------------------------------------------------ gradients

    def through_mask(self, grads: Sequence[Tensor | None]) -> None:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − c·a₁/a₂), in place."""
        dual = self._dual
        assert dual is not None
        a1, a2 = [0.0] * len(self.sizes), 0.0
        for piece, g in self._beside(grads):
            m = self._mask(self._scores(piece), dual, piece.room[0])
            a2 += self.costs[piece.i] * float(torch.dot(m, torch.sub(1.0, m, out=piece.room[1])))
            a1[piece.i] += float(torch.dot(g, _times_slope(piece.theta, m, grad_input=piece.room[2])))
        # A tensor with a NaN or infinite gradient is left out, as in `ops.soft_topk.pull_ratio`.
        ratio = math.fsum(x for x in a1 if math.isfinite(x)) / a2 if a2 else 0.0
        for piece, g in self._beside(grads):
            m = self._mask(self._scores(piece), dual, piece.room[0])
            # q = sign(θ)·m(1−m) makes it g·(m + βqu'θ) − βqu'c·a₁/a₂, with u' = ∂u/∂|θ|.
            q = torch.sign(piece.theta, out=piece.room[1])
            q = _times_slope(q, m, grad_input=q)
            slope = dual.beta * self.factors[piece.i]
            g.mul_(m.addcmul_(q, piece.theta, value=slope))
            g.sub_(q, alpha=slope * self.costs[piece.i] * ratio)

    def where_kept(self, grads: Sequence[Tensor | None]) -> None:
        """Zero where not kept, in place."""
        for piece, g in self._beside(grads):
            self._only_kept(piece, self._scores(piece), g, out=g)

    def check(self, grads: Sequence[Tensor | None]) -> None:
        """Nothing: on a CPU whoever asks can wait for the answer."""
