"""The declarations by which a method says what becomes of θ and of gradients, so that any solver can do it.

A is what is kept, B a larger set that some methods also train; both come from a selection or are stored.

    rank     what units compete by: |ψ(θ)|, or values that are learned
    mask     w = mask · θ, projected on A or not
    damp     first of all, gradients outside A times what of the length of their outputs is kept
    back     gradients for w into gradients for θ: factors on A, on B∖A and on the rest, or through the mask, or what of
             them lies along θ
    decay    a multiple of θ, by the same three sets, added to the gradient once per step, unscaled
    pace     how far θ goes along with the optimizer's update, by the same three sets
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import Tensor

# One number for all segments, or one each; or, where the device finds it, a tensor with one for every target, which is the
# same for all those of a segment.
PerSegment = float | tuple[float, ...] | Tensor


@dataclass(frozen=True)
class Where:
    """Factors on A, on B∖A and on the rest."""

    a: PerSegment
    b: PerSegment
    c: PerSegment

    @property
    def everywhere(self) -> bool:
        """Whether all three are 1."""
        return all(isinstance(x, float) and x == 1.0 for x in (self.a, self.b, self.c))

    @property
    def divides_the_rest(self) -> bool:
        """Whether B∖A and the rest have factors of their own."""
        return _differ(self.b, self.c)

    @property
    def divides(self) -> bool:
        """Whether A and B∖A have."""
        return _differ(self.a, self.b)


def _differ(x: PerSegment, y: PerSegment) -> bool:
    """Tensors are not looked at: that would wait for the device."""
    return x is not y and (isinstance(x, Tensor) or isinstance(y, Tensor) or x != y)


KEPT = Where(1.0, 0.0, 0.0)  # g where kept, else 0
STRAIGHT = Where(1.0, 1.0, 1.0)  # g, straight through the mask
LEAST = 0.001  # of a damped gradient: batch norm's ε lets them be some 300 times as large
# Under which names torch's optimizers, and most others, keep a running sum of gradients.
MOMENTA = ("momentum_buffer", "exp_avg")


class Mask(Enum):
    """Masks without settings."""

    ONE = "1 where kept"
    SOFT = "the soft top-k mask"


@dataclass(frozen=True)
class Shrunk:
    """(1 − (τ/u)ᵖ)^(1/p) where kept: shrunk by the largest value τ that is not kept.

    With `row_scale` the mask is multiplied by 1.01/(r + 0.01), r being the share of its output channel's magnitude that
    is kept.
    """

    p: float = 1.0
    row_scale: bool = False


@dataclass(frozen=True)
class Shifted:
    """min(z − λ, u)/u where kept: ranks are z = u − sigmoid(s), s learned per target under this name, λ is what is below.

    It comes with an expression of its own, which says the same; kernels of single weights do without.
    """

    name: str


@dataclass(frozen=True)
class Stored:
    """A mask that the method keeps per unit under this name: bools, or numbers that are not projected."""

    name: str


class VJP(Enum):
    """Gradients through the mask, with the slope going to whatever ranks."""

    THROUGH = "m·g, and the slope of m"


class Along(Enum):
    """g on A; elsewhere what would make the unit larger or smaller as a whole, and nothing else."""

    THETA = "elsewhere θ·(Σ g·θ)/(Σ θ²), the sums over the unit"


class Form(NamedTuple):
    """What a method declares for a moment.

    Args:
        mask: see above.
        back: see above.
        decay: see above; None for none.
        learned: the name of the learned values that rank, one per unit; None for magnitudes. They get the slope of the
            mask, or Σ g·θ of their unit where that is stored.
        project: whether w is zero outside A; False leaves the model soft-masked.
        kept: the name of A where it is stored although the mask is not; `more`: that of B.
        own: an autograd expression, from one tensor per target to as many, where the above does not fit. It may use
            learned parameters. Then `mask` and `back` say nothing, unless the mask is `Shifted`.
        pace: see above; None is all the way, everywhere.
        damp: outside A gradients are multiplied by ‖w‖/‖θ‖, over the outputs that a unit has a part in, times a number of
            the target, and by 1 at most and LEAST at least; 0 is for not at all, None for none. Batch norm divides an
            output by its size and multiplies its gradients by as much, some hundred times where next to nothing of it
            is kept; so damped they are about as large as those of others.
    """

    mask: Mask | Shrunk | Shifted | Stored = Mask.ONE
    back: Where | VJP | Along = KEPT
    decay: Where | None = None
    learned: str | None = None
    project: bool = True
    kept: str | None = None
    more: str | None = None
    own: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
    pace: Where | None = None
    damp: Tensor | None = None

    @property
    def stored(self) -> str | None:
        """The name of A, where it is stored."""
        return self.mask.name if isinstance(self.mask, Stored) else self.kept

    @property
    def by_magnitude(self) -> bool:
        """Whether A and the mask follow from |θ| and what was solved for."""
        return self.own is None and self.stored is None and self.learned is None

    @property
    def everything(self) -> bool:
        """Whether w = θ."""
        return self.mask is Mask.ONE and not self.project

    @property
    def couples(self) -> bool:
        """Whether a weight that the loss does not reach still feels the others, through the budget they share."""
        return self.by_magnitude and self.back is VJP.THROUGH and self.mask is Mask.SOFT
