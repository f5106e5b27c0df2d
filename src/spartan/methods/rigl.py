"""RigL: the rigged lottery."""

from dataclasses import dataclass

from spartan.methods.registry import register
from spartan.methods.stored import ByGradient


@register
@dataclass(frozen=True)
class RigL(ByGradient):
    """RigL: drop the smallest weights now and then, grow as many where the gradient is largest.

        θ ← θ − η · M ⊙ ∇L(M ⊙ θ)                             at every step
        M ← M minus the ⌊f_t·|M|⌋ units smallest in |θ|        every n steps, in each layer, until the mask is fixed
        M ← M plus as many of the others, largest in |∇L(M ⊙ θ)|, from θ = 0
        f_t = f/2 · (1 + cos(πt/T_end))                        T_end: when finetuning begins, at 75% by default

    The gradient is the one of the step just taken, for all weights, accumulated as the optimizer sees it. A unit that
    is dropped and grown again at once keeps its value. Layers share a budget with `budget="global"`.

    Differences from the paper: its Algorithm 1 updates the mask in the place of a gradient step (its code: with a batch
    of its own, between two steps), here the update follows the step whose gradient it uses. Its code clears the
    optimizer's momentum for grown weights; here that has been fading since they were dropped, to 0.9ⁿ of it with SGD's
    usual momentum, and holds what weight decay added to it since.

    Args:
        every: n, optimizer steps between two updates of the mask.
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
    mask_rule = "random; every n steps the smallest of |θ| give way to the largest of |g|"
    gradient_rule = "g where kept, else 0"
    needs = "dense gradients, every n steps"
    reference = "Evci et al., Rigging the lottery: making all tickets winners, ICML 2020"
