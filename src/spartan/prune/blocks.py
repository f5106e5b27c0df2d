"""Finds the blocks of a model: modules of one class in a chain, of which one after the other can be pruned."""

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from torch import nn

from spartan.problem.targets import Globs, as_globs

Blocks = dict[str, nn.Module]


def find_blocks(model: nn.Module, weights: Collection[int], globs: Globs) -> tuple[Blocks, str]:
    """The blocks by name, in the order of the modules, and why there are none.

    Args:
        model: the model, without wrappers.
        weights: the parameters to be pruned, by their id.
        globs: names of modules that are blocks; None finds the outermost chains, `ModuleList` or `Sequential` of two or
            more modules of one class that all have weights to prune.
    """
    if globs is None:
        found = dict(_chains("", model, weights))
        why = "" if found else "no ModuleList or Sequential of two or more modules of one class"
    else:
        asked = as_globs("blocks", globs)
        found = {}
        for name, module in model.named_modules():
            if name and any(fnmatchcase(name, glob) for glob in asked):
                found[name] = module
        for glob in asked:
            if not any(fnmatchcase(name, glob) for name in found):
                some = ", ".join(list(dict(model.named_children()))[:8])
                raise ValueError(f"blocks={glob!r} matches no module of the model, which has {some}, …")
        for name in found:
            inside = next((other for other in found if name.startswith(f"{other}.")), None)
            if inside is not None:
                raise ValueError(f"blocks={globs!r} names {name}, which is inside {inside}; blocks follow one another")
        why = "" if found else "asked for by blocks=()"
    shared = _shared(model, found)
    return ({}, shared) if shared else (found, why)


def _chains(name: str, module: nn.Module, weights: Collection[int]) -> Iterator[tuple[str, nn.Module]]:
    children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    alike = len(children) > 1 and len({type(child) for _, child in children}) == 1
    chain = alike and isinstance(module, (nn.ModuleList, nn.Sequential))
    if chain and all(any(id(p) in weights for p in child.parameters()) for _, child in children):
        yield from children
        return
    for inner, child in children:
        yield from _chains(inner, child, weights)


def _shared(model: nn.Module, blocks: Blocks) -> str:
    """Says which blocks have a parameter in common with another or with the rest of the model; "" for none."""
    holder: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        block = next((name for name in blocks if path == name or path.startswith(f"{name}.")), "the rest of the model")
        for parameter in module.parameters(recurse=False):
            if holder.setdefault(id(parameter), block) != block:
                return f"{holder[id(parameter)]} and {block} share weights"
    return ""
