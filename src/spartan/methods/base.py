"""What a method is: one autograd expression θ → w, and a rule that chooses masks between steps.

The sparsifier calls, for every group of targets that compete with one another:

    choose    after each optimizer step: look at θ, decide what is kept now      (no gradient)
    weights   w = f(θ), in torch operations; its VJP is the method's gradient
    observe   before each step: look at the gradient for w, dense, not masked    (no gradient)
    gradient  g = ∂L/∂w → ∂L/∂θ; the VJP of `weights` unless a closed form is given
    freeze    when finetuning begins: the mask that stays

A method object holds settings only. What it knows about a run it keeps in the group: `group.threshold`, `group.dual`,
`group.tensors` (masks, scores: saved with the run) and `group.learned` (parameters: they join the optimizer).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.schedules import Moment, Schedule, linear

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine


class Method(ABC):
    """Base class of the methods; subclass, fill in, decorate with `@register`."""

    name: ClassVar[str]
    year: ClassVar[int]
    mask_rule: ClassVar[str]
    gradient_rule: ClassVar[str]
    needs: ClassVar[str] = "nothing"
    reference: ClassVar[str]

    # From when the model is truly sparse: "start" (at its final sparsity from the first step), "warmup" (at the
    # scheduled one at every step), "finetune", or "never".
    sparse_from: str = "warmup"
    # What applies when the user does not say.
    budget: ClassVar[str] = "global"
    warmup: ClassVar[float] = 0.2
    finetune: ClassVar[float] = 0.2
    # How the sparsity grows over the warm-up, as a fraction of the final one.
    ramp: Schedule = linear(0.0, 1.0)
    # Why the method cannot keep n of every m weights (the pattern NM); "" where it can: its masks come from
    # `group.select` and `group.solve` alone, and stand for any budget k.
    refuses_nm: str = "its masks are not defined for a budget of every m weights"
    # Whether units come back at zero: until the next step, such a weight is kept and zero.
    grows_from_zero: ClassVar[bool] = False
    # Whether it draws random numbers, which are others on another kind of device.
    random: ClassVar[bool] = False
    # Whether `gradient` is linear in g, so that it does not matter where in a step a loss is scaled back.
    linear: bool = True
    # Whether w = θ always, so that nothing needs to be kept or written.
    identity: ClassVar[bool] = False
    # Options of the optimizer's parameter group for `group.learned`, such as {"weight_decay": 0.0}.
    learned_options: ClassVar[dict[str, Any]] = {}

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:  # noqa: B027
        """Make what the method keeps in the group: masks, scores, learned parameters."""

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:  # noqa: B027
        """Decide what is kept at this moment, for the budget `group.k`.

        It may be called more than once at one step (several optimizers, `dense_weights`).
        """

    @abstractmethod
    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """w = f(θ) for what `choose` decided, differentiable, with straight-through projection where it belongs."""

    def observe(self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment) -> None:  # noqa: B027
        """Look at the dense gradients for w, once per step."""

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """The gradient for θ from the one for w; a missing gradient counts as zero."""
        return vjp(self, group, thetas, grads, at)

    def write_fast(self, group: Group, thetas: Sequence[Tensor], engine: Engine) -> bool:
        """Write w into the model by the kernels; False where they cannot do what `weights` says."""
        return False

    def transform_fast(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], engine: Engine
    ) -> bool:
        """Do by the kernels, in place, what `gradient` says; False where they cannot."""
        return False

    def penalty(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor] | None:
        """What `gradient` adds to the VJP whatever the loss, such as a decay of its own; None for nothing."""
        return None

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """Bool per unit: what is kept now."""
        assert group.threshold is not None, f"{self.name}: choose() set no threshold, so keep() must be given"
        return group.keep(group.scores(thetas), group.threshold)

    def ranked(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """What masks are chosen by: one number per unit."""
        return group.scores(thetas)

    def freeze(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """The mask per unit that finetuning keeps: w = θ · mask."""
        return [keep.to(theta.dtype) for keep, theta in zip(self.keep(group, thetas), thetas, strict=True)]

    def beta_at(self, group: Group, at: Moment) -> float | None:
        """The sharpness in use, for methods that have one."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@torch.no_grad()
def vjp(
    method: Method, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
) -> list[Tensor | None]:
    """Autograd through `method.weights`: gradients for θ, and for the learned parameters into their `.grad`."""
    leaves = [theta.detach().requires_grad_() for theta in thetas]
    learned = list(group.learned.values())
    with torch.enable_grad():
        w = method.weights(group, leaves, at)
    outputs = [(y, g) for y, g in zip(w, grads, strict=True) if g is not None and y.requires_grad]
    if not outputs:
        return [None] * len(thetas)
    found = torch.autograd.grad(
        [y for y, _ in outputs], [*leaves, *learned], [g.to(y.dtype) for y, g in outputs], allow_unused=True
    )
    for name, parameter, grad in zip(group.learned, learned, found[len(leaves) :], strict=True):
        if grad is not None:
            if group.ranks is not None and not name[-1].isdigit():
                grad = _over_ranks(group, name, grad)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    return list(found[: len(leaves)])


def _over_ranks(group: Group, name: str, grad: Tensor) -> Tensor:
    """The whole gradient of a learned parameter with one entry per target, from that of this process's shards."""
    if grad.shape != (len(group.targets),):
        raise RuntimeError(
            f"learned[{name!r}] has shape {tuple(grad.shape)}; where weights lie in shards, learned parameters have one "
            "entry per unit (their names end in the target's number) or one per target"
        )
    return group.sum_over_ranks(grad.unbind()).to(grad.dtype)


def masked(x: Tensor, keep: Tensor) -> Tensor:
    """x where kept and exactly +0.0 elsewhere (a product would leave −0.0)."""
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_gradients(grads: Sequence[Tensor | None], keep: Sequence[Tensor]) -> list[Tensor | None]:
    """[kept] ⊙ g: the gradient of a hard mask."""
    return [None if g is None else masked(g, kept) for g, kept in zip(grads, keep, strict=True)]


def with_zeros(group: Group, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Missing gradients as zeros in the parameters, for what is yet to be added to them."""
    found = list(grads)
    for i, target in enumerate(group.targets):
        if found[i] is None and target.parameter.grad is None:
            target.parameter.grad = found[i] = torch.zeros_like(target.parameter)
    return found


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value` in the forward pass, the gradient of x in the backward pass."""
    return _StraightThrough.apply(x, value)


class _StraightThrough(torch.autograd.Function):
    """Exact in the forward pass, where x + (value − x).detach() would round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def generator(at: Moment, device: torch.device, stream: int = 0) -> torch.Generator:
    """Random numbers of this run and step: the same wherever in the step, and after a resume, they are drawn."""
    rng = torch.Generator(device)
    rng.manual_seed(hash((at.seed, at.step, stream)) % (1 << 63))
    return rng
