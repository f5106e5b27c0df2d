"""Makes the narrower model: a copy with smaller tensors, and with the sizes that its modules keep beside them."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import Node

from spartan.narrow import HEADS, WIDTHS, fit_sizes
from spartan.shrink.folding import fold
from spartan.shrink.parts import Parts
from spartan.shrink.rules.base import Survey
from spartan.shrink.trace import Traced, module_of
from spartan.wording import first_line

# Operations whose arguments say sizes, which a module's code may take from an attribute.
_WITH_SIZES = {"view", "_unsafe_view", "reshape", "unflatten", "split", "split_with_sizes", "expand"}


@torch.no_grad()
def narrowed(model: nn.Module, traced: Traced, found: Survey, parts: Parts) -> nn.Module:
    """A copy of the model with what is not kept cut out; ValueError where a module cannot be that narrow."""
    changed = fold(found.ties, traced.leaves, parts.tensors)
    instead: dict[int, Tensor] = {}
    for name, axes in found.leaves.items():
        old = parts.tensors[name]
        new = changed.get(name, old.detach())
        for dim, axis in enumerate(axes):
            if axis.new_size < axis.size:
                new = new.index_select(dim, axis.kept.nonzero()[:, 0].to(new.device))
        if new.shape != old.shape or name in changed:
            new = _laid_out(new, old)
            instead[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    smaller = copy_of(model, instead)
    fit_sizes(smaller, sizes_of(model, traced, found))
    return smaller


def copy_of(model: nn.Module, instead: Mapping[int, Tensor]) -> nn.Module:
    """A copy of a model that has other tensors in place of some, which are given by the id of those; no copy of these."""
    try:
        return copy.deepcopy(model, dict(instead))
    except Exception as error:  # what models hold besides tensors may be anything
        raise RuntimeError(
            f"shrink needs a copy of the model, and {type(model).__name__} cannot be copied: {first_line(error)}"
        ) from error


def _laid_out(new: Tensor, old: Tensor) -> Tensor:
    """In the memory format of the tensor that it was cut from."""
    last = old.ndim == 4 and not old.is_contiguous() and old.is_contiguous(memory_format=torch.channels_last)
    return new.contiguous(memory_format=torch.channels_last) if last else new.contiguous()


def sizes_of(model: nn.Module, traced: Traced, found: Survey) -> dict[str, dict[str, int]]:
    """The sizes that modules keep in attributes and that are other ones now, by module and attribute.

    Groups are known from the operations. For heads, and for the width of all of them, an attribute of a known name is
    looked for that has the size which a dimension had before, in an operation of the module's own code.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {module: path for path, module in model.named_modules()}  # one for each, as `fit_sizes` has them
    sizes: dict[str, dict[str, int]] = {}

    def note(node: Node, attribute: str, old: int, new: int) -> None:
        module = modules.get(module_of(node))
        if module is not None and new != old and vars(module).get(attribute) == old:
            sizes.setdefault(names[module], {})[attribute] = new

    for node, attribute, axis in found.ties.counts:
        note(node, attribute, axis.size, axis.new_size)
    for node in traced.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name.partition("::")[2] in _WITH_SIZES:
            for axis in found.axes_of(node):
                for attribute in HEADS | WIDTHS:
                    note(node, attribute, axis.size, axis.new_size)
    return sizes
