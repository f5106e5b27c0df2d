"""Reads calibration data, and runs a model on it as it will be used: in eval mode, without caches and fused attention."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from spartan.distributed import is_compiled

Batch = tuple[tuple[Any, ...], dict[str, Any]]
NEEDED = "a list of batches, each a tensor, a tuple of arguments or a dict of keyword arguments of the model, is needed"


def read_batches(calibration: Any, criterion: str) -> list[Batch]:
    """All batches as arguments of the model; ValueError, naming the batch, for what is none."""
    if calibration is None:
        raise ValueError(
            f"criterion={criterion!r} looks at the inputs of every layer, and there is no calibration data; pass "
            'calibration=batches, or criterion="magnitude", which needs none'
        )
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        raise ValueError(f"calibration is {type(calibration).__name__}; {NEEDED}")
    found = [_arguments(number, batch) for number, batch in enumerate(calibration)]
    if not found:
        raise ValueError(f"calibration is empty; {NEEDED}")
    return found


def _arguments(number: int, batch: Any) -> Batch:
    if isinstance(batch, list):
        raise ValueError(
            f"calibration: batch {number} is a list, as a DataLoader gives it, labels and all; pass what the model is to be "
            f"called with, such as [x for x, _ in loader]: {NEEDED}"
        )
    if isinstance(batch, Mapping):
        found: Batch = ((), dict(batch))
    else:
        found = (batch if isinstance(batch, tuple) else (batch,), {})
    tensors = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    if not tensors:
        raise ValueError(f"calibration: batch {number} is {batch!r:.60}, without a tensor; {NEEDED}")
    if any(x.is_floating_point() and not bool(torch.isfinite(x).all()) for x in tensors):
        raise ValueError(f"calibration: batch {number} holds NaN or infinite values; leave it out")
    return found


def moved(batch: Batch, device: torch.device) -> Batch:
    """A copy on a device, into which a model may write."""
    return tree_map_only(Tensor, lambda x: x.to(device, copy=True), batch)


def shapes_of(batch: Batch) -> str:
    """The shapes of its tensors, for an error."""
    found = [
        f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tree_leaves(batch) if isinstance(x, Tensor)
    ]
    return ", ".join(found)


@contextmanager
def as_in_use(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode, keeps no keys and values, and computes attention where its products are seen."""
    training = [(module, module.training) for module in model.modules()]
    every: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in every if getattr(config, "use_cache", False)}
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        if any(is_compiled(module) for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            model.eval()
            for config in configs.values():
                config.use_cache = False
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for config in configs.values():
                config.use_cache = True
            for module, was in training:
                module.training = was
