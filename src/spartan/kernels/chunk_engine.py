"""Single weights on a CPU: pieces that stay in the cache go through all operations before the next one is read.

The threshold and τ start from the last step's. The former is exact wherever the search starts; the latter is saved with
the former, so that a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spartan.kernels.engine import Engine
from spartan.ops.parts import CHUNK, Part, check_budget
from spartan.ops.select import Threshold, boundary
from spartan.ops.soft_topk import Dual, logit, solve

PASSES = 12
WINDOW = 4e-3  # of the threshold, up and down: where it is looked for, at first


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
        self.total = math.fsum(n * c for n, c in zip(self.sizes, costs, strict=True))
        longest = min(CHUNK, max(self.sizes))
        self._room = [torch.empty(longest, dtype=thetas[0].dtype) for _ in range(4)]
        self._flags, self._more_flags = (torch.empty(longest, dtype=torch.bool) for _ in range(2))
        self._threshold: Threshold | None = None
        self._dual: Dual | None = None
        self._window = WINDOW

    def has(self, thetas: Sequence[Tensor]) -> bool:
        """Whether these are the dense weights that it reads, and not something computed from them."""
        return thetas[0].data_ptr() == self.thetas[0].data_ptr() and [t.numel() for t in thetas] == self.sizes

    def _chunks(self, *lists: Sequence[Tensor | None]) -> Iterator[tuple[int, int, list[Tensor]]]:
        """The number of a tensor, the position of a chunk, and that chunk of the tensor of each list."""
        position = 0
        for i, size in enumerate(self.sizes):
            flat = [t.detach().view(-1) for x in lists if (t := x[i]) is not None]
            if len(flat) == len(lists):
                for start in range(0, size, CHUNK):
                    yield i, position + start, [t[start : start + CHUNK] for t in flat]
            position += size

    def _scores(self, i: int, theta: Tensor) -> Tensor:
        """u of a chunk, in room 0."""
        u = torch.abs(theta, out=self._room[0][: theta.numel()])
        return u if self.factors[i] == 1.0 else u.mul_(self.factors[i])

    def _mask(self, u: Tensor, dual: Dual) -> Tensor:
        """m of a chunk, in room 1."""
        z = torch.sub(u, dual.center, out=self._room[1][: u.numel()])
        # One operation for βz + offset.
        return torch.add(z.new_tensor(dual.offset), z, alpha=dual.beta, out=z).sigmoid_()

    def _keep(self, u: Tensor, position: int) -> Tensor:
        """What is kept of a chunk."""
        threshold = self._threshold
        assert threshold is not None
        keep = torch.gt(u, threshold.value, out=self._flags[: u.numel()])
        ties = min(max(int(threshold.cut) - position, 0), u.numel())
        if ties:
            keep[:ties] |= u[:ties] == threshold.value
        return keep

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
        return Dual(beta, last.center, last.offset * beta / last.beta)

    def _first_pass(self, k: float, dual: Dual | None) -> tuple[Threshold | None, float, float]:
        """The threshold, if it is near the last one; and F and D at the dual, if there is one."""
        near = self._threshold
        value = -math.inf if near is None else float(near.value)
        hard = math.isfinite(value) and k < self.total
        least, most = value - self._window * abs(value), value + self._window * abs(value)
        above, inside, f, d = 0.0, [], 0.0, 0.0
        if not hard and dual is None:
            return None, f, d
        for i, _, (theta,) in self._chunks(self.thetas):
            u = self._scores(i, theta)
            if hard:
                over = torch.gt(u, most, out=self._flags[: u.numel()])
                above += int(over.count_nonzero()) * self.costs[i]
                within = torch.ge(u, least, out=self._more_flags[: u.numel()]).logical_xor_(over)
                inside.append(Part(u[within], self.costs[i]))
            if dual is not None:
                one, two = self._moments(self._mask(u, dual))
                f, d = f + self.costs[i] * one, d + self.costs[i] * (one - two)
        return self._inside(inside, k, above) if hard else None, f, d

    def _inside(self, inside: list[Part], k: float, above: float) -> Threshold | None:
        """The threshold among a few units, when what lies above them is kept; None if it is not among them."""
        room = k - above
        if room < 0 or room >= math.fsum(p.u.numel() * p.c for p in inside):
            return None
        found = boundary(inside, room).threshold
        if found.cut or not math.isfinite(found.value):  # ties are cut by position, which these have lost
            return None
        return Threshold(found.value, 0, found.cost + above)

    @staticmethod
    def _moments(m: Tensor) -> tuple[float, float]:
        return float(m.sum()), float(torch.dot(m, m))

    def _newton(self, k: float, dual: Dual, f: float, d: float) -> Dual | None:
        """Root of Σ c·m = k on the logit of the budget fraction (`ops.soft_topk` says why), from F and D at the start.

        None where that is no good start.
        """
        beta, goal, single = dual.beta, logit(k / self.total), self.thetas[0].dtype == torch.float32
        if math.isinf(goal):
            return Dual(beta, 0.0, goal)
        tol, last = (1e-6 if single else 1e-13), math.inf
        origin, s = float(dual.center), float(dual.offset)
        for passes in range(1, PASSES + 1):
            residual = abs(f - k) / k
            if residual <= tol:
                return replace(dual, passes=passes, residual=residual)
            if not (0 < f < self.total and d > 0 and residual < last):
                return None
            step = (logit(f / self.total) - goal) * f * (self.total - f) / (self.total * d)
            s, last = s - step, residual
            center = origin if abs(s) <= 4.0 else origin - s / beta
            center = float(torch.tensor(center, dtype=self.thetas[0].dtype))
            dual = Dual(beta, center, s - beta * (origin - center))
            if single and abs(step) < 2e-4:  # it leaves an error of its square
                return replace(dual, passes=passes, residual=step * step)
            f = d = 0.0
            for i, _, (theta,) in self._chunks(self.thetas):
                one, two = self._moments(self._mask(self._scores(i, theta), dual))
                f, d = f + self.costs[i] * one, d + self.costs[i] * (one - two)
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
        zero = self.thetas[0].new_zeros(())
        for i, position, (theta, parameter) in self._chunks(self.thetas, self.parameters):
            u = self._scores(i, theta)
            keep, w = self._keep(u, position), theta
            if soft:
                assert self._dual is not None
                w = self._mask(u, self._dual).mul_(theta)
            torch.where(keep, w, zero, out=parameter)

    # ------------------------------------------------------------------ gradients

    def through_mask(self, grads: Sequence[Tensor | None]) -> None:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − c·a₁/a₂), in place."""
        dual = self._dual
        assert dual is not None
        a1, a2 = [0.0] * len(self.sizes), 0.0
        for i, _, (theta, g) in self._chunks(self.thetas, grads):
            slope = self._slope(self._mask(self._scores(i, theta), dual))
            pull = torch.mul(g, theta, out=self._room[3][: g.numel()])
            a1[i] += float(torch.dot(pull, slope))
            a2 += self.costs[i] * float(slope.sum())
        # A tensor with a NaN or infinite gradient is left out, as in `ops.soft_topk.pull_ratio`.
        ratio = math.fsum(x for x in a1 if math.isfinite(x)) / a2 if a2 else 0.0
        for i, _, (theta, g) in self._chunks(self.thetas, grads):
            u = self._scores(i, theta)
            m = self._mask(u, dual)
            slope = self._slope(m)
            # sign(θ)·g·θ is g·|θ|, so that g has one factor, and what is left has no g.
            g.mul_(m.addcmul_(slope, u, value=dual.beta))
            slope.mul_(torch.sign(theta, out=self._room[3][: g.numel()]))
            g.sub_(slope, alpha=dual.beta * self.factors[i] * self.costs[i] * ratio)

    def _slope(self, m: Tensor) -> Tensor:
        """m(1−m) of a chunk, in room 2."""
        return torch.addcmul(m, m, m, value=-1.0, out=self._room[2][: m.numel()])

    def where_kept(self, grads: Sequence[Tensor | None]) -> None:
        """Zero where not kept, in place."""
        zero = self.thetas[0].new_zeros(())
        for i, position, (theta, g) in self._chunks(self.thetas, grads):
            torch.where(self._keep(self._scores(i, theta), position), g, zero, out=g)

    def check(self, grads: Sequence[Tensor | None]) -> None:
        """Nothing: on a CPU whoever asks can wait for the answer."""
