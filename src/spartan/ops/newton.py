"""Finds the dual of a soft top-k mask: one scalar a budget, by Newton's method on the logit of the budget fraction.

With two columns the transport problem of the paper (Sec. 3.1) has a single free dual. Write u = v/c, C = Σc and the
mask as m = sigmoid(βu + μ); μ is the root of the monotone F(μ) = Σ c m = k. With D = Σ c m(1−m), h(μ) = logit(F/C) −
logit(k/C) has 0 < h' = C·D/(F(C−F)) ≤ 1, so the plain step μ − h never overshoots, and h is almost linear: two to four
passes to 1e-6 from the hard threshold. Who passes over the units, and how, is not known here: a `Root` is told F and D.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.ops.select import Boundary

MOST_PASSES = 60
# Up to β·τ = 8 the product βu, rounded, is as good as β(u − center): z is off by 5e-7 where the mask is not 0 or 1.
PLAIN = 8.0


@dataclass(frozen=True)
class Dual:
    """A solved mask in three scalars: m = scale · sigmoid(β(u − center) + offset).

    μ is split into −β·center + offset because βu and μ nearly cancel at large β; u − center is exact where it matters.
    `scale` is 1 except for an unconverged Sinkhorn iteration, whose last half-step rescales the mask.
    """

    beta: float
    center: float
    offset: float
    scale: float = 1.0
    passes: int = 0
    residual: float = 0.0

    @property
    def mu(self) -> float:
        """The dual variable μ of the paper."""
        return math.log(self.scale) + self.offset - self.beta * self.center

    def mask(self, u: Tensor) -> Tensor:
        """m for units of normalized value u."""
        m = (u - self.center).mul_(self.beta).add_(self.offset).sigmoid_()
        return m.mul_(self.scale) if self.scale != 1.0 else m


def logit(p: float) -> float:
    """Inverse of the sigmoid, infinite at 0 and 1."""
    if p <= 0 or p >= 1:
        return -math.inf if p <= 0 else math.inf
    return math.log(p) - math.log1p(-p)


def tolerance(dtype: torch.dtype) -> float:
    """|F − k| / k that a solver leaves at most."""
    return 1e-13 if dtype == torch.float64 else 1e-6


class Root:
    """The search for one μ. `center` and `offset` say where F and D are wanted next; `hear` takes them.

    It ends with a `dual`, or as `lost`: a search without known ends that has left what it knows. Then begin again from
    the hard threshold.

    Args:
        k: budget. total: C, what everything costs. beta: sharpness, finite. start: where the hard mask ends, or a guess
        of τ = −μ/β. ends: the smallest and the largest u, between which the root is bracketed; None if nobody has
        looked. dtype: of the units. tol: allowed |F − k| / k; None means 1e-6 for float32 and 1e-13 for float64. trust:
        whether a step is taken without another pass where what it leaves at most (`rest_of_step`) is in tolerance.
        plain: whether the center may be 0 where that is as good, which saves a subtraction. most: passes.
    """

    def __init__(
        self,
        k: float,
        total: float,
        beta: float,
        start: Boundary | float,
        ends: tuple[float, float] | None,
        dtype: torch.dtype,
        tol: float | None = None,
        trust: bool = True,
        plain: bool = False,
        most: int = MOST_PASSES,
    ) -> None:
        self.k, self.total, self.beta, self.ends, self.dtype = k, total, beta, ends, dtype
        self.tol = tolerance(dtype) if tol is None else tol
        self.trust, self.plain, self.most = trust, plain, most
        self.goal, self.passes = logit(k / total), 0
        self.dual: Dual | None = None
        self.lost = False
        self._best = Dual(beta, 0.0, self.goal, residual=math.inf)
        low, high = (-math.inf, math.inf) if ends is None else ends
        if ends is not None and not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("NaN or infinite values have no soft top-k mask")
        if math.isinf(self.goal) or beta == 0 or low == high:
            self.dual = Dual(beta, low if low == high else 0.0, self.goal)
            return
        # z = β(u − origin) + s; the root s lies in [least, greatest].
        self._origin, self._s = _first(start, beta, low, high)
        self._least = self.goal - beta * (high - self._origin)
        self._greatest = self.goal - beta * (low - self._origin)
        self._s = min(max(self._s, self._least), self._greatest)
        self._look()

    @property
    def done(self) -> bool:
        """Whether nothing more is to be told."""
        return self.dual is not None or self.lost

    def hear(self, f: float, d: float) -> None:
        """F and D at the present center and offset."""
        self.passes += 1
        residual, before = abs(f - self.k) / self.k, self._best.residual
        if residual < before:
            self._best = Dual(self.beta, self.center, self.offset, residual=residual)
        if residual <= self.tol or (self.passes == self.most and self.ends is not None):
            self._end(self._best)
            return
        self._least, self._greatest = (self._least, self._s) if f > self.k else (self._s, self._greatest)
        step = self._step(f, d)
        following = self._s - step
        inside = self._least < following < self._greatest
        if self.ends is None and (not inside or residual >= before or self.passes == self.most):
            self.lost = True
            return
        if not inside:
            following = 0.5 * (self._least + self._greatest)
            if not self._least < following < self._greatest:  # the bracket is down to neighbouring numbers
                self._end(self._best)
                return
        self._s = following
        self._look()
        if inside and self.trust:
            rest = rest_of_step(step, f, d, self.total)
            if rest <= 0.5 * self.tol:  # the other half is for rounding
                self._end(Dual(self.beta, self.center, self.offset, residual=max(rest, torch.finfo(self.dtype).eps)))

    def _end(self, dual: Dual) -> None:
        self.dual = Dual(self.beta, dual.center, dual.offset, passes=self.passes, residual=dual.residual)

    def _step(self, f: float, d: float) -> float:
        """Newton's on the logit of the budget fraction; NaN where the mask is flat there."""
        if not 0 < f < self.total or d <= 0:
            return math.nan
        return (logit(f / self.total) - self.goal) * f * (self.total - f) / (self.total * d)

    def _look(self) -> None:
        """The line β(u − origin) + s written from where the mask is neither 0 nor 1: u − center is exact there."""
        tau = self._origin - self._s / self.beta
        if self.plain and self.beta * abs(tau) <= PLAIN:
            center = 0.0
        elif abs(self._s) <= 4.0:
            center = self._origin
        else:
            center = tau if self.ends is None else min(max(tau, self.ends[0]), self.ends[1])
        self.center = float(torch.tensor(center, dtype=self.dtype))
        self.offset = self._s - self.beta * (self._origin - self.center)


def _first(start: Boundary | float, beta: float, low: float, high: float) -> tuple[float, float]:
    """Origin and s to begin with. From the hard threshold they are exact in the limit of large β.

    There the unit at the threshold takes the fraction of the budget that is left, unless that is so close to nothing
    or everything that the tails of its neighbours weigh more.
    """
    if not isinstance(start, Boundary):
        return min(max(start, low), high), 0.0
    value = start.threshold.value
    if math.isinf(value):
        return (low if value < 0 else high), 0.0
    s = max(logit(start.fraction), -0.5 * beta * start.gap_above)
    return value, min(s, 0.5 * beta * start.gap_below)


def search(roots: Mapping[int, Root], moments: Callable[[dict[int, Root]], Sequence[tuple[float, float]]]) -> None:
    """Bring roots to their end, together: each pass asks for F and D of those that are not there yet, by number."""
    while pending := {number: root for number, root in roots.items() if not root.done}:
        for root, (f, d) in zip(pending.values(), moments(pending), strict=True):
            root.hear(f, d)


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
