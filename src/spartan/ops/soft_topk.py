"""Computes the soft top-k mask of the paper (Sec. 3.1) and its gradient, in closed form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from spartan.distributed import Ranks
from spartan.ops.newton import Dual, Root, search
from spartan.ops.parts import Part, Parts, check_budget, chunks, extrema, numel, total_cost
from spartan.ops.select import Boundary, as_part, boundary, hard_topk, select
from spartan.scalars import as_plain

# Up to here a pass costs nothing, and float64 gives residuals that float32 cannot (z = −18 is spaced 2e-6 apart).
SMALL = 1 << 16


def moments(parts: Parts, beta: float, center: float, offset: float) -> tuple[float, float]:
    """F = Σ c m and D = Σ c m(1−m) in one pass over the units."""
    f, s = local_moments(parts, beta, center, offset).tolist()
    return f, f - s


def local_moments(parts: Parts, beta: float, center: float, offset: float) -> Tensor:
    """Σ c m and Σ c m² over these units, still on their device."""
    upcast = numel(parts) <= SMALL
    found = torch.zeros(2, dtype=torch.float64, device=parts[0].u.device)
    for part in parts:
        for u, c in chunks(part):
            m = Dual(beta, center, offset).mask(u.double() if upcast else u)
            price, weighted = (1.0, m * c) if isinstance(c, Tensor) else (c, m)
            sums = weighted.sum(dtype=torch.float64), torch.dot(weighted, m.to(weighted.dtype)).double()
            found += price * torch.stack(sums)
    return found


def solve(
    parts: Parts, k: float, beta: float, *, start: Boundary | float, tol: float | None = None, max_iters: int = 60
) -> Dual:
    """Root of Σ c·sigmoid(βu + μ) = k, to be seen in a last pass.

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
    root = Root(k, total, beta, start, extrema(parts), parts[0].u.dtype, tol, trust=False, most=max_iters)
    search({0: root}, lambda roots: [moments(parts, beta, one.center, one.offset) for one in roots.values()])
    assert root.dual is not None
    return root.dual


Init = Literal["cold", "threshold"] | float | None


@dataclass
class Scaling:
    """Algorithm 4 of the paper to the letter, for one budget: log-scalings μ, of what is kept, and ν, of every unit."""

    u: Tensor
    c: Tensor
    k: float
    beta: float
    mu: float
    passes: int = 0
    before: float = 0.0  # μ of the pass before
    worth: float = math.inf  # vᵀm, the last

    def log_sum(self) -> Tensor:
        """log Σ exp(z + ν) over the units here, with ν = log c − log(1 + exp(z + μ))."""
        self.nu = self.c.log() + torch.nn.functional.logsigmoid(-(self.beta * self.u + self.mu))
        return torch.logsumexp(self.beta * self.u + self.nu, 0)

    def value(self, log_sum: float) -> Tensor:
        """vᵀm over the units here, for the μ that the sum over all of them gives."""
        self.before, self.mu, self.passes = self.mu, math.log(self.k) - log_sum, self.passes + 1
        m = torch.exp(self.beta * self.u + self.mu + self.nu - self.c.log())
        return (self.u * self.c * m).sum(dtype=torch.float64)


def sinkhorn(
    problems: Sequence[Parts],
    ks: Sequence[float],
    betas: Sequence[float],
    inits: Sequence[float | None],
    ranks: Ranks,
    tol: float | None = None,
    most: int = 100,
) -> list[Dual]:
    """The paper's iteration for many budgets in step with one another, each from its μ₀ (None is 0).

    `ranks` are the processes that hold shards of the units.
    """
    scalings, tol = [], 0.01 if tol is None else tol
    for parts, k, beta, init in zip(problems, ks, betas, inits, strict=True):
        costs = [torch.as_tensor(part.c, device=part.u.device).expand(part.u.numel()) for part in parts]
        u = torch.cat([part.u for part in parts])
        scalings.append(Scaling(u, torch.cat(costs).to(u.dtype), k, beta, init or 0.0))
    live = [x for x in scalings if x.k > 0]
    values = [(x.u * x.c).sum(dtype=torch.float64) for x in live]  # vᵀm₀ with m₀ = 1
    for x, worth in zip(live, ranks.sum(torch.stack(values)).tolist() if live else [], strict=True):
        x.worth = worth
    while live:
        sums = _log_sum_exp(torch.stack([x.log_sum() for x in live]), ranks)
        worths = ranks.sum(torch.stack([x.value(y) for x, y in zip(live, sums, strict=True)])).tolist()
        going = []
        for x, worth in zip(live, worths, strict=True):
            going += [x] if x.passes < most and abs(worth - x.worth) >= tol * abs(x.worth) else []
            x.worth = worth
        live = going
    return [
        Dual(x.beta, 0.0, x.before, scale=math.exp(x.mu - x.before), passes=x.passes)
        if x.k > 0
        else Dual(x.beta, 0.0, -math.inf)
        for x in scalings
    ]


def _log_sum_exp(here: Tensor, ranks: Ranks) -> list[float]:
    """log Σ exp over all processes, from what each has (−∞ for nothing)."""
    if ranks.alone:
        return here.tolist()
    here = here.double()
    top = ranks.largest(here.clone())
    return (top + torch.log(ranks.sum(torch.exp(here - top)))).tolist()


def residual_at(dual: Dual, parts: Parts, k: float) -> float:
    """|Σ c·sigmoid(βu + μ) − k| / k: how far a dual is from the solution."""
    f, _ = moments(parts, dual.beta, dual.center, dual.offset + math.log(dual.scale))
    return abs(f - k) / k if k else f


class SoftMask(torch.autograd.Function):
    """m = sigmoid(βu + μ) for a solved μ, over many tensors at once; its gradient is that of the solution."""

    @staticmethod
    def forward(ctx: Any, dual: Dual, costs: list[float | Tensor], *u: Tensor) -> tuple[Tensor, ...]:
        """The mask of each tensor of u = v/c (float32 or float64)."""
        masks = tuple(dual.mask(x) for x in u)
        ctx.save_for_backward(*masks)
        ctx.beta, ctx.costs = dual.beta, costs
        return masks

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """∂L/∂u = βm(1−m)(g − c·a₁/a₂), and u = v/c makes this Algorithm 5.

        a₁ = Σ g m(1−m) and a₂ = Σ c m(1−m); the paper writes k − Σ c m², which is the same where Σ c m = k.
        """
        slopes = [m - m * m for m in ctx.saved_tensors]
        a1 = sum((g * s).sum(dtype=torch.float64) for g, s in zip(grads, slopes, strict=True))
        a2 = torch.stack([(c * s).sum(dtype=torch.float64) for c, s in zip(ctx.costs, slopes, strict=True)]).sum()
        ratio = torch.where(a2 != 0, a1 / a2, 0.0)  # 0 where the mask is flat
        each = zip(grads, slopes, ctx.costs, strict=True)
        return None, None, *(ctx.beta * s * (g - (c * ratio).to(g.dtype)) for g, s, c in each)


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
    k, beta, init, tol, max_iters = map(as_plain, (k, beta, init, tol, max_iters))
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
    (mask,) = SoftMask.apply(dual, [part.c], u.to(v.dtype))
    mask = mask.reshape(values.shape).to(dtype)
    if not return_info:
        return mask
    residual = residual_at(dual, [part], k) if solver == "sinkhorn" else dual.residual
    return mask, SoftTopKInfo(dual.mu, dual.passes, residual)


def _solve_as_asked(
    part: Part, k: float, beta: float, solver: str, init: Init, tol: float | None, max_iters: int | None
) -> Dual:
    if solver == "newton":
        at_threshold = init is None or init == "threshold" or beta == 0
        start = boundary([part], k) if at_threshold else 0.0 if init == "cold" else -float(init or 0.0) / beta
        return solve([part], k, beta, start=start, tol=tol, max_iters=60 if max_iters is None else max_iters)
    if init == "threshold":
        kept = part.u[select([part], k).keep(part.u)]
        init = -beta * float(kept.min() if kept.numel() else part.u.max())
    mu = 0.0 if init == "cold" else init
    k = check_budget(k, total_cost([part]))
    return sinkhorn([[part]], [k], [beta], [mu], Ranks([], []), tol, 100 if max_iters is None else max_iters)[0]
