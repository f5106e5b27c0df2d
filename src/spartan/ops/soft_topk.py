"""The soft top-k mask of the paper (Sec. 3.1): one scalar to solve for, and a closed-form gradient.

With two columns the transport problem has a single free dual. Write u = v/c, C = Σc and the mask as
m = sigmoid(βu + μ); μ is the root of the monotone F(μ) = Σ c m = k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from spartan.ops.collective import Ranks
from spartan.ops.parts import Part, Parts, Spread, check_budget, chunks, extrema, numel, total_cost
from spartan.ops.select import Boundary, as_part, boundary, hard_topk, select

# Up to here a pass costs nothing, and float64 gives residuals that float32 cannot (z = −18 is spaced 2e-6 apart).
SMALL = 1 << 16


@dataclass(frozen=True)
class Dual:
    """A solved mask in three scalars: m = scale · sigmoid(β(u − center) + offset).

    μ is split into −β·center + offset because βu and μ nearly cancel at large β; u − center is exact where it matters.
    `scale` is 1 except for an unconverged Sinkhorn iteration, whose last half-step rescales the mask. Kernels leave
    what they find on the device, as tensors.
    """

    beta: float
    center: float | Tensor
    offset: float | Tensor
    scale: float = 1.0
    passes: int | Tensor = 0
    residual: float | Tensor = 0.0

    @property
    def mu(self) -> float | Tensor:
        """The dual variable μ of the paper."""
        return math.log(self.scale) + self.offset - self.beta * self.center

    def host(self) -> Dual:
        """The same in plain numbers; waits for the device."""
        plain = float(self.center), float(self.offset), self.scale, int(self.passes), float(self.residual)
        return Dual(self.beta, *plain)

    def mask(self, u: Tensor) -> Tensor:
        """m for units of normalized value u."""
        z = (u - self.center).mul_(self.beta).add_(self.offset)
        m = torch.sigmoid_(z)
        return m.mul_(self.scale) if self.scale != 1.0 else m


def logit(p: float) -> float:
    """Inverse of the sigmoid, infinite at 0 and 1."""
    if p <= 0 or p >= 1:
        return -math.inf if p <= 0 else math.inf
    return math.log(p) - math.log1p(-p)


def moments(parts: Parts, beta: float, center: float, offset: float) -> tuple[float, float]:
    """F = Σ c m and D = Σ c m(1−m) in one pass over the units."""
    upcast = numel(parts) <= SMALL
    f = s = 0.0
    mine: Tensor | float = 0.0
    for part in parts:
        for u, c in chunks(part):
            m = Dual(beta, center, offset).mask(u.double() if upcast else u)
            price, weighted = (1.0, m * c) if isinstance(c, Tensor) else (c, m)
            sums = torch.stack((weighted.sum(dtype=torch.float64), torch.dot(weighted, m.to(weighted.dtype)).double()))
            if isinstance(parts, Spread):
                mine = mine + price * sums
            else:
                one, two = sums.tolist()  # one look at the device
                f, s = f + price * one, s + price * two
    if isinstance(parts, Spread) and isinstance(mine, Tensor):
        f, s = parts.ranks.sum_told(mine, late=True)  # all groups begin with Newton's steps together
    return f, f - s


def solve(
    parts: Parts, k: float, beta: float, *, start: Boundary | float, tol: float | None = None, max_iters: int = 60
) -> Dual:
    """Root of Σ c·sigmoid(βu + μ) = k by Newton on h(μ) = logit(F/C) − logit(k/C).

    0 < h' ≤ 1, so the plain step μ − h never overshoots, and h is almost linear: two to four passes to 1e-6 from the
    hard threshold. Bisection takes over when a step leaves the bracket of the root.

    Args:
        parts: the units.
        k: budget.
        beta: sharpness, finite.
        start: where the hard mask ends, or a guess of τ = −μ/β.
        tol: allowed |F − k| / k; None means 1e-6 for float32 and 1e-13 for float64.
        max_iters: most passes over the units.
    """
    total = total_cost(parts)
    k = check_budget(k, total)
    goal = logit(k / total)
    if isinstance(parts, Spread) and math.isinf(goal):
        return Dual(beta, 0.0, goal)  # without a word to the others
    known = start.ends if isinstance(start, Boundary) else None
    low, high = extrema(parts) if known is None else known
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("NaN or infinite values have no soft top-k mask")
    if math.isinf(goal) or beta == 0 or low == high:
        return Dual(beta, low if low == high else 0.0, goal)
    if tol is None:
        tol = 1e-13 if parts[0].u.dtype == torch.float64 else 1e-6
    # z = β(u − origin) + s; the root s lies in [least, most].
    origin, s = _start(start, beta, low, high)
    least, most = goal - beta * (high - origin), goal - beta * (low - origin)
    s = min(max(s, least), most)
    best = Dual(beta, origin, s, residual=math.inf)
    for passes in range(1, max_iters + 1):
        center = origin if abs(s) <= 4.0 else min(max(origin - s / beta, low), high)
        center, offset = _split(origin, s, beta, center, parts[0].u.dtype)
        f, d = moments(parts, beta, center, offset)
        residual = abs(f - k) / k
        best = Dual(beta, center, offset, residual=residual) if residual < best.residual else best
        best = replace(best, passes=passes)
        least, most = (least, s) if f > k else (s, most)
        last, s = s, _newton(s, f, d, total, goal)
        if not least < s < most:
            s = 0.5 * (least + most)
        elif (
            isinstance(parts, Spread) and residual > tol and (rest := rest_of_step(s - last, f, d, total)) <= 0.5 * tol
        ):
            # No round of sums just to see it; the other half is for rounding.
            center, offset = _split(origin, s, beta, center, parts[0].u.dtype)
            return Dual(beta, center, offset, passes=passes, residual=rest)
        if residual <= tol or not least < s < most:  # the latter: the bracket is down to neighbouring numbers
            break
    return best


def _newton(s: float, f: float, d: float, total: float, goal: float) -> float:
    """One step on the logit of the budget fraction; NaN where the mask is flat there."""
    if not 0 < f < total or d <= 0:
        return math.nan
    return s - (logit(f / total) - goal) * f * (total - f) / (total * d)


def rest_of_step(step: float, f: float, d: float, total: float) -> float:
    """What |F − k|/k is at most after a Newton step on h(μ) = logit(F/C) − logit(k/C), without a look at the units.

    Write E_w[m] = Σ c·w·m / Σ c·w. Then 1 − h' = E_m − E_{1−m} and h''/h' = E_m + E_{1−m} − 2·E_{m(1−m)}, and the last
    mean lies between the first two. So |h''| ≤ h'(1 − h'): logit(h') moves no faster than μ, and a step δ leaves

        |h| ≤ h'(1 − h')·(exp|δ| − 1 − |δ|)

    Nothing where all u are equal, or β is 0, since h' = 1 there.

    Args:
        step: δ.
        f: F = Σ c m before the step.
        d: D = Σ c m(1−m) there.
        total: C = Σ c.
    """
    if not abs(step) < 1.0:
        return math.inf
    steep = min(total * d / (f * (total - f)), 1.0)
    # |F − k|/k ≤ exp|h| − 1.
    return math.expm1(steep * (1.0 - steep) * (math.expm1(abs(step)) - abs(step)))


def _split(origin: float, s: float, beta: float, center: float, dtype: torch.dtype) -> tuple[float, float]:
    """The line β(u − origin) + s written from another center: a number of the data's precision, and what is left."""
    center = float(torch.tensor(center, dtype=dtype))
    return center, s - beta * (origin - center)


def _start(start: Boundary | float, beta: float, low: float, high: float) -> tuple[float, float]:
    """Origin and s to begin with. From the hard threshold they are exact in the limit of large β.

    There the unit at the threshold takes the fraction of the budget that is left, unless that is so close to nothing
    or everything that the tails of its neighbours weigh more.
    """
    if not isinstance(start, Boundary):
        return min(max(start, low), high), 0.0
    value = float(start.threshold.value)
    if math.isinf(value):
        return (low if value < 0 else high), 0.0
    s = max(logit(start.fraction), -0.5 * beta * start.gap_above)
    return value, min(s, 0.5 * beta * start.gap_below)


Init = Literal["cold", "threshold"] | float | None


def sinkhorn(
    parts: Parts, k: float, beta: float, *, init: Init = None, tol: float | None = None, max_iters: int = 100
) -> Dual:
    """Algorithm 4 of the paper to the letter, from μ₀ = 0 ("cold"), the hard threshold, or a given μ₀."""
    tol = 0.01 if tol is None else tol
    total = total_cost(parts)
    k = check_budget(k, total)
    if k == 0:
        return Dual(beta, 0.0, -math.inf)
    u = torch.cat([part.u for part in parts])
    c = torch.cat([torch.as_tensor(part.c, device=u.device).expand(part.u.numel()).to(u.dtype) for part in parts])
    z, v, log_c = beta * u, u * c, c.log()
    if isinstance(init, str) and init == "threshold":
        kept = select([Part(u, c)], k).keep(u)
        mu = -beta * float(u[kept].min() if kept.any() else u.max())
    else:
        mu = 0.0 if init is None or isinstance(init, str) else float(init)
    everywhere = parts.ranks if isinstance(parts, Spread) else Ranks([], [])
    worth = float(everywhere.sum(v.sum(dtype=torch.float64)))  # vᵀm₀ with m₀ = 1
    for passes in range(1, max_iters + 1):
        nu = log_c + torch.nn.functional.logsigmoid(-(z + mu))  # log c − log(1 + exp(z + μ))
        before, mu = mu, math.log(k) - _log_sum_exp(z + nu, everywhere)
        m = torch.exp(z + mu + nu - log_c)
        last, worth = worth, float(everywhere.sum((v * m).sum(dtype=torch.float64)))
        if passes == max_iters or abs(worth - last) < tol * abs(last):
            break
    return Dual(beta, 0.0, before, scale=math.exp(mu - before), passes=passes)


def _log_sum_exp(x: Tensor, ranks: Ranks) -> float:
    """log Σ exp x over all processes."""
    if not ranks.groups:
        return float(torch.logsumexp(x, 0))
    here = torch.logsumexp(x, 0).double()  # −∞ of nothing
    top = ranks.largest(here.clone())
    return float(top + torch.log(ranks.sum(torch.exp(here - top))))


def residual_at(dual: Dual, parts: Parts, k: float) -> float:
    """|Σ c·sigmoid(βu + μ) − k| / k: how far a dual is from the solution."""
    f, _ = moments(parts, dual.beta, float(dual.center), float(dual.offset) + math.log(dual.scale))
    return abs(f - k) / k if k else f


class SoftMask(torch.autograd.Function):
    """m = sigmoid(βu + μ) for a solved μ, over many tensors at once; its gradient is that of the solution."""

    @staticmethod
    def forward(
        ctx: Any, dual: Dual, costs: list[float | Tensor], ranks: Ranks | None, *u: Tensor
    ) -> tuple[Tensor, ...]:
        """The mask of each tensor of u = v/c (float32 or float64); `ranks` where they are shards."""
        masks = tuple(dual.mask(x) for x in u)
        ctx.save_for_backward(*masks)
        ctx.beta, ctx.costs, ctx.ranks = dual.beta, costs, ranks
        return masks

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """∂L/∂u = βm(1−m)(g − c·a₁/a₂), and u = v/c makes this Algorithm 5.

        a₂ is Σ c m(1−m); the paper writes k − Σ c m², which is the same where Σ c m = k.
        """
        slopes = [m - m * m for m in ctx.saved_tensors]
        ratio = pull_ratio(grads, slopes, ctx.costs, ctx.ranks)
        return (
            None,
            None,
            None,
            *(ctx.beta * s * (g - (c * ratio).to(g.dtype)) for g, s, c in zip(grads, slopes, ctx.costs, strict=True)),
        )


def pull_ratio(
    grads: Sequence[Tensor], slopes: Sequence[Tensor], costs: Sequence[float | Tensor], ranks: Ranks | None = None
) -> Tensor:
    """a₁/a₂ = Σ g m(1−m) / Σ c m(1−m): how far the budget pulls every unit back; 0 where the mask is flat.

    A tensor with a NaN or infinite gradient is left out of a₁: its own gradient says so, and the others', which a loss
    scaler may have found good already, stay finite.
    """
    a1 = torch.stack([(g * s).sum(dtype=torch.float64) for g, s in zip(grads, slopes, strict=True)])
    a2 = torch.stack([(c * s).sum(dtype=torch.float64) for c, s in zip(costs, slopes, strict=True)])
    if ranks is not None:
        mine = torch.tensor(ranks.counts, device=a1.device)
        a1, a2 = ranks.sum(torch.where(mine, torch.stack((a1, a2)), 0.0)).unbind()
    a1, a2 = torch.where(torch.isfinite(a1), a1, 0.0).sum(), a2.sum()
    return torch.where(a2 != 0, a1 / a2, 0.0)


@dataclass(frozen=True)
class SoftTopKInfo:
    """How a mask was found: the dual μ, the passes over the data, and |cᵀ sigmoid(βv/c + μ) − k| / k.

    For Newton that is the mask's own residual. Sinkhorn ends by rescaling its mask to the budget, so there it tells how
    far μ is from the solution.
    """

    mu: float
    passes: int
    residual: float


@overload
def soft_topk(
    values: Tensor,
    k: float,
    beta: float,
    costs: Tensor | None = None,
    *,
    solver: str = ...,
    init: Init = ...,
    tol: float | None = ...,
    max_iters: int | None = ...,
    return_info: Literal[False] = ...,
) -> Tensor: ...
@overload
def soft_topk(
    values: Tensor,
    k: float,
    beta: float,
    costs: Tensor | None = None,
    *,
    solver: str = ...,
    init: Init = ...,
    tol: float | None = ...,
    max_iters: int | None = ...,
    return_info: Literal[True],
) -> tuple[Tensor, SoftTopKInfo]: ...
def soft_topk(
    values: Tensor,
    k: float,
    beta: float,
    costs: Tensor | None = None,
    *,
    solver: str = "newton",
    init: Init = None,
    tol: float | None = None,
    max_iters: int | None = None,
    return_info: bool = False,
) -> Tensor | tuple[Tensor, SoftTopKInfo]:
    """Soft top-k mask under a linear cost: the operator of the paper, differentiable in `values`.

    The mask m solves max vᵀm + H/β subject to 0 ≤ m ≤ 1 and cᵀm = k (eq. 3), that is
    m = sigmoid(βv/c + μ) with μ such that cᵀm = k. β = 0 gives k/Σc everywhere, β = inf the hard top-k.

    Args:
        values: value of each unit, any shape. The mask of half-precision values is float32.
        k: budget, between 0 and Σc.
        beta: sharpness, at least 0.
        costs: cost of each unit, positive; None means 1 each.
        solver: "newton" (two to four passes to a residual of 1e-6) or "sinkhorn" (Algorithm 4, for comparison).
        init: where to start: "cold" (μ = 0), "threshold" (the hard threshold), a number μ₀, or None for the solver's
            own choice (sinkhorn: cold).
        tol: when to stop. newton: |cᵀm − k|/k (1e-6; float64 1e-13). sinkhorn: relative change of vᵀm (0.01).
        max_iters: most passes over the values; 60 for newton, 100 for sinkhorn.
        return_info: also return μ, the number of passes and the budget residual at μ.

    Returns:
        The mask, of the shape of `values`; with `return_info`, the mask and a `SoftTopKInfo`.

    Example:
        >>> m = soft_topk(torch.tensor([3.0, 1.0, 2.0, 0.0]), k=2, beta=4.0)
        >>> m.round(decimals=2)
        tensor([1.0000, 0.1200, 0.8800, 0.0000])
    """
    if not beta >= 0:
        raise ValueError(f"beta={beta!r} is not a sharpness; it must be at least 0")
    if solver not in ("newton", "sinkhorn"):
        raise ValueError(f'solver={solver!r} is unknown; "newton" and "sinkhorn" are accepted')
    if isinstance(init, str) and init not in ("cold", "threshold"):
        raise ValueError(f'init={init!r} is unknown; "cold", "threshold", a number μ₀ and None are accepted')
    k, beta = float(k), float(beta)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    if math.isinf(beta):
        mask = hard_topk(values, k, costs).to(dtype)
        return (mask, SoftTopKInfo(-math.inf, 1, 0.0)) if return_info else mask
    if tol is None and solver == "newton":
        tol = 1e-13 if dtype == torch.float64 else 9e-7  # and 1e-7 for the rounding of the mask to float32
    v = values.double() if values.numel() <= SMALL else values.to(dtype)
    part = as_part(v.detach(), costs)
    dual = _solve_as_asked(part, k, beta, solver, init, tol, max_iters)
    u = v.reshape(-1) / part.c if isinstance(part.c, Tensor) else v.reshape(-1)
    (mask,) = SoftMask.apply(dual, [part.c], None, u.to(v.dtype))
    mask = mask.reshape(values.shape).to(dtype)
    if not return_info:
        return mask
    residual = residual_at(dual, [part], k) if solver == "sinkhorn" else float(dual.residual)
    return mask, SoftTopKInfo(float(dual.mu), int(dual.passes), residual)


def _solve_as_asked(
    part: Part, k: float, beta: float, solver: str, init: Init, tol: float | None, max_iters: int | None
) -> Dual:
    if solver == "sinkhorn":
        return sinkhorn([part], k, beta, init=init, tol=tol, max_iters=100 if max_iters is None else max_iters)
    start: Boundary | float
    if init is None or init == "threshold" or beta == 0:
        start = boundary([part], k)
    else:
        start = 0.0 if init == "cold" else -float(init) / beta
    return solve([part], k, beta, start=start, tol=tol, max_iters=60 if max_iters is None else max_iters)
