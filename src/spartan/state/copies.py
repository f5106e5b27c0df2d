"""Rebuilds a sparsifier for copies of its model and of its optimizers: what `copy.deepcopy` and pickle call."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from spartan.step.wrap import unwrapped

if TYPE_CHECKING:
    from spartan.sparsifier import Sparsifier


def rebuilt(
    kind: "type[Sparsifier]",
    model: nn.Module,
    arguments: dict[str, Any],
    state: Mapping[str, Any],
    outer: list[Any],
    optimizers: list[Optimizer],
    learned: list[dict[str, nn.Parameter]],
) -> "Sparsifier":
    """A sparsifier for copies of a model, of the optimizers attached to it, and of what the method has learned."""
    found = kind(model, **arguments)
    for part, saved in zip(found._run.weights.parts, learned, strict=True):
        for mine in (part.state.learned, part.state.learned_per_target):
            mine.update({name: saved[name] for name in mine})  # those that the optimizer's copy holds
    found.settings = dict(state["settings"])
    found.load_state_dict(state)
    if optimizers:
        found.attach(*(next((x for x in outer if unwrapped(x) is o), o) for o in optimizers))
    return found
