"""Solves many small budgets at once: n of the m units of every row, hard and soft, without a look at the device.

A soft mask of a row is m = sigmoid(β(u − center) + offset) with Σ m = n, as in `soft_topk`, one center and offset a
row.
"""

import math

import torch
from torch import Tensor

from spartan.ops.parts import CHUNK

# Newton passes that bring every row to the rounding error of its precision, and what part of the budget is near enough
# to stop before: on a CPU only, where looking costs nothing.
PASSES = {torch.float32: 8, torch.float64: 10}
ENOUGH = {torch.float32: 4e-7, torch.float64: 2e-14}
# Rows up to this long are ranked by comparing all pairs, which is 3 to 6 times faster than sorting.
COMPARE_ALL = 16


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


def below(u: Tensor, n: int) -> Tensor:
    """The largest of each row strictly below its n largest, as a column; −∞ where there is none."""
    least = u.sort(dim=1, descending=True).values[:, n - 1 : n]
    return torch.where(u < least, u, -math.inf).amax(1, keepdim=True)


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


def pull(grads: Tensor, slopes: Tensor) -> Tensor:
    """a₁/a₂ = Σ g m(1−m) / Σ m(1−m) of each row (rows × m), as a column; 0 where the mask is flat."""
    a1, a2 = sums(grads * slopes), sums(slopes)
    return torch.where(a2 != 0, a1 / a2, 0.0)[:, None]


def sums(x: Tensor) -> Tensor:
    """Of each row; short ones column by column, which is faster."""
    if x.shape[1] > 8:
        return x.sum(1)
    first, *others = x.unbind(1)
    total = first.clone()
    for column in others:
        total += column
    return total
