"""What callbacks of all frameworks do: check settings when they are given, choose optimizers, say where a run stands."""

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from spartan.distributed import is_dtensor
from spartan.sparsifier import Sparsifier
from spartan.step.wrap import MARK, is_scheduled, unwrapped

# What the framework gives, and not the user.
OURS = ("self", "model", "sparsity", "total_steps")


class Asked:
    """What a user asks of a callback: `Sparsifier`'s arguments, without the model and the number of steps.

    Example:
        >>> Asked(0.9, {"method": "topkast", "warmup": 0.1}).settings["warmup"]
        0.1
    """

    def __init__(self, sparsity: float, settings: Mapping[str, Any]) -> None:
        known = [name for name in inspect.signature(Sparsifier.__init__).parameters if name not in OURS]
        for name in settings:
            if name not in known:
                raise TypeError(f"{name!r} is no setting of a Sparsifier; these are: {', '.join(known)}")
        self.sparsity, self.settings = sparsity, dict(settings)

    def build(self, model: nn.Module, total_steps: int, optimizers: Iterable[Any]) -> Sparsifier:
        """A sparsifier for a model, attached to those optimizers that train its targets."""
        sparsifier = Sparsifier(model, self.sparsity, total_steps, **self.settings)
        mine = {id(target.parameter) for target in sparsifier._targets}
        every = list(optimizers)
        some = [o for o in every if any(id(p) in mine for group in o.param_groups for p in group["params"])]
        refuse_learned(sparsifier, some)
        return sparsifier.attach(*(some or every))


def refuse_learned(sparsifier: Sparsifier, optimizers: Iterable[Any]) -> None:
    """Refuse methods with parameters of their own where the framework's scheduler has counted the optimizer's already."""
    if not sparsifier._run.weights.learned():
        return
    if any(map(is_scheduled, optimizers)):
        raise ValueError(
            f"method={sparsifier.method.name!r} learns parameters of its own, which join the optimizer before its "
            "learning-rate scheduler is built; here the framework has built both. Build them yourself: the optimizer, "
            "Sparsifier(model, …).attach(optimizer), then the scheduler, and hand both to the framework; no callback is "
            "needed then. Or choose a method that learns nothing but the weights."
        )


def holds_state(optimizer: Any) -> bool:
    """Whether an optimizer has loaded a checkpoint with a sparsifier's state, which waits there for one."""
    return isinstance(unwrapped(optimizer).param_groups[0].get(MARK), Mapping)


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether FSDP of version 1 has put several weights of a model into one vector."""
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and any(isinstance(m, loaded.FullyShardedDataParallel) for m in model.modules())


def is_sharded(sparsifier: Sparsifier) -> bool:
    """Whether the targets lie in shards over several processes, or could."""
    return any(is_dtensor(target.parameter) for target in sparsifier._targets)


def numbers(sparsifier: Sparsifier) -> dict[str, float]:
    """What goes into logs: the density that the masks have and the one asked for, and β where there is one.

    On an accelerator this waits for it: call it when logs are written, not at every step.
    """
    found = sparsifier.progress()
    return {
        name: float(found[name].item() if isinstance(found[name], torch.Tensor) else found[name])
        for name in ("density", "target_density", "beta")
        if found[name] is not None
    }
