"""Many small budgets at once: n of the m units of every row, hard and soft, without a look at the device.

A soft mask of a row is m = sigmoid(β(u − center) + offset) with Σ m = n, as in `soft_topk`, one center and offset a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spartan.ops.parts import CHUNK
from spartan.ops.select import Threshold

# Newton passes that bring every row to the rounding error of its precision, and what part of the budget is near enough
# to stop before: on a CPU only, where looking costs nothing.
PASSES = {torch.float32: 8, torch.float64: 10}
ENOUGH = {torch.float32: 4e-7, torch.float64: 2e-14}
# Rows up to this long are ranked by comparing all pairs, which is 3 to 6 times faster than sorting.
COMPARE_ALL = 16


@dataclass(frozen=True)
class RowThreshold(Threshold):
    """What is kept: the `cut` largest of every `m` consecutive units; of equal ones, the first.

    `value` is −∞ where that is all of them, else ∞: no single value divides what is kept from what is not.
    """

    m: int = 1

    @classmethod
    def of(cls, n: int, m: int, cost: float = math.nan) -> RowThreshold:
        """Keep n of every m."""
        return cls(-math.inf if n == m else math.inf, n, cost, m)

    @property
    def n(self) -> int:
        """How many of each row: `cut`, which the host always knows here."""
        return int(self.cut)

    def host(self) -> RowThreshold:
        """Itself: the host knows it."""
        return self

    def keep(self, u: Tensor, start: int = 0) -> Tensor:
        """Bool per unit."""
        return top(u.reshape(-1, self.m), self.n).reshape(-1)


@dataclass(frozen=True, eq=False)
class RowDual:
    """Solved masks of many rows of m units: m = sigmoid(β(u − center) + offset), with a center and an offset a row."""

    beta: float
    center: Tensor
    offset: Tensor
    m: int
    passes: int = 0

    @property
    def mu(self) -> None:
        """Every row has a μ of its own, so there is none to name."""
        return None

    def mask(self, u: Tensor, start: int = 0) -> Tensor:
        """The mask of units that stand at positions `start`, `start` + 1, … of the whole vector."""
        rows = slice(start // self.m, (start + u.numel()) // self.m)
        z = u.reshape(-1, self.m) - self.center[rows, None]
        return z.mul_(self.beta).add_(self.offset[rows, None]).sigmoid_().reshape(-1)


def top(u: Tensor, n: int) -> Tensor:
    """Bool: the n largest of each row of u (rows × m); of equal ones, the first.

    Example:
        >>> top(torch.tensor([[3.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2)
        tensor([[ True, False,  True, False],
                [ True,  True, False, False]])
    """
    return _top(u.t().contiguous(), n).t().contiguous()


def _top(x: Tensor, n: int) -> Tensor:
    """The same with rows as columns (m × rows), along which sums and comparisons are fast."""
    m = x.shape[0]
    if m > COMPARE_ALL:
        order = x.argsort(dim=0, descending=True, stable=True)
        return torch.zeros_like(x, dtype=torch.bool).scatter_(0, order[:n], True)
    ahead = torch.zeros_like(x, dtype=torch.uint8)  # how many of the row stand before each unit
    for j in range(1, m):
        for i in range(j):
            first = x[i] >= x[j]
            ahead[j] += first
            ahead[i] += ~first
    return ahead < n


def below(u: Tensor, n: int, m: int) -> Tensor:
    """The largest of every m units strictly below the n largest, at each of them; −∞ where there is none."""
    x = u.reshape(-1, m)
    least = x.sort(dim=1, descending=True).values[:, n - 1 : n]
    return torch.where(x < least, x, -math.inf).amax(1, keepdim=True).expand(-1, m).reshape(-1)


def solve(u: Tensor, n: int, beta: float) -> tuple[Tensor, Tensor]:
    """Center and offset of the soft top-n mask of each row of u (rows × m), 1 ≤ n ≤ m, for a finite β.

    Seen from midway between the n-th and the (n+1)-th largest, the root lies within ±log m at any β: there the mask of
    the latter alone outweighs what the n largest lack, or the other way round. Newton on h = logit(F/m) − logit(n/m)
    starts there, with bisection where a step leaves the bracket. With Σ m − n written as the sum over the others less
    what the n largest lack, nothing cancels.

    Example:
        >>> u = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
        >>> center, offset = solve(u, 2, beta=4.0)
        >>> torch.sigmoid(4.0 * (u - center[:, None]) + offset[:, None]).round(decimals=2)
        tensor([[1.0000, 0.1200, 0.8800, 0.0000]])
    """
    rows, m = u.shape
    if u.device.type == "cpu" and u.numel() > CHUNK:
        found = [solve(piece, n, beta) for piece in u.split(max(1, CHUNK // m))]
        return torch.cat([center for center, _ in found]), torch.cat([offset for _, offset in found])
    if n == m or beta == 0.0 or not rows:  # a shard may be empty
        goal = math.inf if n == m else math.log(n) - math.log(m - n)
        return u.new_zeros(rows), u.new_full((rows,), goal)
    x = u.t().contiguous()
    kept = _top(x, n)
    last, next_one = torch.where(kept, x, math.inf).amin(0), torch.where(kept, -math.inf, x).amax(0)
    center = next_one + 0.5 * (last - next_one)
    # The center is rounded; what it lacks of the middle would shift the root by more than log m at large β.
    s = (-0.5 * beta) * ((last - center) + (next_one - center))
    least, most = s - math.log(m), s + math.log(m)
    sign = torch.where(kept, -1.0, 1.0).to(u.dtype)
    z = (x - center).mul_(beta).mul_(sign)
    for _ in range(PASSES[u.dtype]):
        # How far each unit is from the hard mask: 1 − m of the n largest, m of the others.
        tail = torch.addcmul(z, sign, s).sigmoid_()
        excess = (tail * sign).sum(0)  # F − n
        if u.device.type == "cpu" and float(excess.abs().max()) <= n * ENOUGH[u.dtype]:
            break
        slope = torch.addcmul(tail, tail, tail, value=-1.0).sum(0)
        high = excess > 0
        least, most = torch.where(high, least, s), torch.where(high, s, most)
        h = torch.log1p(excess / n) - torch.log1p(-excess / (m - n))
        step = h * (n + excess) * (m - n - excess) / (m * slope)
        s_new = torch.where(slope > 0, s - step, s)
        inside = (s_new >= least) & (s_new <= most)
        s = torch.where(inside, s_new, 0.5 * (least + most))
    return center, s


def pull_rows(grads: Tensor, slopes: Tensor, m: int) -> Tensor:
    """a₁/a₂ = Σ g m(1−m) / Σ m(1−m) of each row, at each of its units; 0 where the mask is flat."""
    s = slopes.reshape(-1, m)
    a1, a2 = _sums(grads.reshape(-1, m) * s), _sums(s)
    return torch.where(a2 != 0, a1 / a2, 0.0)[:, None].expand(-1, m).reshape(-1)


def _sums(x: Tensor) -> Tensor:
    """Of each row; short ones column by column, which is faster."""
    if x.shape[1] > 8:
        return x.sum(1)
    first, *others = x.unbind(1)
    total = first.clone()
    for column in others:
        total += column
    return total


class RowSoftMask(torch.autograd.Function):
    """The masks of `RowDual` over many tensors; the gradient is that of the solution."""

    @staticmethod
    def forward(ctx: Any, dual: RowDual, *u: Tensor) -> tuple[Tensor, ...]:
        """The mask of each tensor of units (float32 or float64)."""
        masks, start = [], 0
        for x in u:
            masks.append(dual.mask(x, start))
            start += x.numel()
        ctx.save_for_backward(*masks)
        ctx.beta, ctx.m = dual.beta, dual.m
        return tuple(masks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """∂L/∂u = βm(1−m)(g − a₁/a₂), with the sums over the row."""
        slopes = [m - m * m for m in ctx.saved_tensors]
        return None, *(ctx.beta * s * (g - pull_rows(g, s, ctx.m)) for g, s in zip(grads, slopes, strict=True))
