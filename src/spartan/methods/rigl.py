"""RigL: the rigged lottery."""

from dataclasses import dataclass

from spartan.methods.registry import register
from spartan.methods.stored import ByGradient
from spartan.problem.schedules import Moment


@register
@dataclass(frozen=True)
class RigL(ByGradient):
    """RigL: drop the smallest weights now and then, grow as many where the gradient is largest.

        θ ← θ − η · M ⊙ ∇L(M ⊙ θ)                             at every step but these:
        M ← M minus the ⌊f_t·|M|⌋ units smallest in |θ|        at steps t = 0, n, 2n, … < T_end, in each layer
        M ← M plus as many of the others, largest in |∇L(M ⊙ θ)|, from θ = 0 and without momentum
        f_t = f/2 · (1 + cos(πt/T_end))                        T_end: when finetuning begins, at 77% by default

    An update of the mask takes the place of a step, as in the paper's Algorithm 1: `optimizer.step()` leaves every
    parameter as it is then, and the run has one update in n steps less. (The authors' code takes a further batch for it,
    and does not count it.) The gradient is that of this batch, for all weights, accumulated as the optimizer would have
    seen it. A unit that is dropped and grown again at once keeps its value and its momentum. Layers share a budget with
    `budget="global"`.

    Differences from the authors' code by intent: it adds noise of 1e-5 to |θ| before it drops, here units of equal
    magnitude go by position; it clears all that the optimizer keeps of a grown weight, here the momentum only (SGD has
    nothing else; without its second moment Adam would begin with strides several times too long).

    Args:
        every: n, optimizer steps from one update of the mask to the next.
        fraction: f, of the kept units, what the first updates replace.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=1000, method=RigL(every=50))
        >>> int((model.weight != 0).sum())
        16
    """

    every: int = 100
    fraction: float = 0.3

    name = "rigl"
    year = 2020
    mask_rule = "random; in place of every nth step the smallest of |θ| give way to the largest of |g|"
    gradient_rule = "g where kept, else 0"
    needs = "dense gradients, every n steps"
    reference = "Evci et al., Rigging the lottery: making all tickets winners, ICML 2020"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every == 1:
            raise ValueError("RigL: every=1 would update the mask in the place of every step, and train nothing")

    def replaces(self, at: Moment) -> bool:
        """The step of an update is one of the mask alone."""
        return self.updates_at(at)

    def fraction_at(self, at: Moment) -> float:
        """f_t, t being the step in whose place the update stands."""
        return super().fraction_at(at.before())
