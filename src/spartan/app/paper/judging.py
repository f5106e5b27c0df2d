"""When a difference counts, and when a claim is confirmed: said once, before any run."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spartan.app.paper.exhibit import Verdict

# Points of accuracy that single runs must be apart: three seeds of the methods here lie 0.1 to 0.3 apart.
ONE_SEED = 0.5
RULE = (
    "A is above B if the means differ by more than twice the standard error of the difference, where both "
    "have several seeds, "
    f"and by more than {ONE_SEED} points where one has a single seed. What grows over several points ends above where it "
    "began, and no step on the way goes below the one before. "
    f"Gains and margins differ if they are more than {ONE_SEED} points apart."
)


@dataclass(frozen=True)
class Difference:
    """How much the first mean is above the second, and the least that counts."""

    value: float
    least: float

    @property
    def above(self) -> bool:
        """Whether the first is above the second."""
        return self.value > self.least

    @property
    def below(self) -> bool:
        """Whether the first is below the second."""
        return self.value < -self.least

    def __str__(self) -> str:
        return f"{self.value:+.2f}" + ("" if abs(self.value) > self.least else " (within noise)")


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Of two lists of scores, one a seed; None where one is empty.

    Example:
        >>> print(difference([91.6, 92.0, 91.9], [91.5, 91.4, 91.5]))
        +0.37
        >>> print(difference([91.6], [91.5]))
        +0.10 (within noise)
    """
    if not first or not second:
        return None
    least = ONE_SEED
    if min(len(first), len(second)) > 1:
        least = 2 * sum(statistics.variance(x) / len(x) for x in (first, second)) ** 0.5
    return Difference(statistics.fmean(first) - statistics.fmean(second), least)


def grows(series: Sequence[Sequence[float]]) -> bool | None:
    """Whether scores grow along a series; None while one is missing that could decide it.

    Example:
        >>> grows([[90.0], [90.3], [90.9]]), grows([[90.0], [90.3]]), grows([[90.0], [], [89.0]])
        (True, False, False)
    """
    steps = [difference(b, a) for a, b in itertools.pairwise([x for x in series if x])]
    if any(step is not None and step.below for step in steps):
        return False
    whole = difference(series[-1], series[0])
    if whole is not None and not whole.above:
        return False
    return True if all(series) else None


def beside(below: float) -> str:
    """How far something is below another, or above it, in points.

    Example:
        >>> beside(0.5), beside(-0.25)
        ('0.50 points below', '0.25 points above')
    """
    return f"{abs(below):.2f} points {'below' if below >= 0 else 'above'}"


def verdict(points: Iterable[bool | None]) -> Verdict:
    """Of a claim about all these points, of which None are not measured yet: one that fails is enough.

    Example:
        >>> verdict([True, None]), verdict([False, None]), verdict([True, True])
        ('not yet measured', 'not confirmed', 'confirmed')
    """
    found = list(points)
    if any(point is False for point in found):
        return "not confirmed"
    return "not yet measured" if not found or any(point is None for point in found) else "confirmed"


def listed(words: Iterable[str], otherwise: str = "no results yet") -> str:
    """Joined by semicolons."""
    return "; ".join(words) or otherwise
