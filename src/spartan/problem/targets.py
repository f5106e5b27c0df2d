"""Finds the targets: which parameter tensors of a model become sparse."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from spartan.distributed import is_dtensor, local, same_placement
from spartan.problem.axes import PLAIN, Axes
from spartan.problem.layers import DEFAULT, axes_if_named, axes_of, bare_name, is_embedding

# Globs over parameter names, as `include` and `exclude` take them.
Globs = str | Iterable[str] | None


@dataclass(eq=False)
class Target:
    """One parameter tensor to sparsify. `names` are all the names it goes by; the first is its own."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    owner: nn.Module
    attribute: str
    axes: Axes = PLAIN
    is_weight: bool = True  # of a layer that is made sparse by default
    embeds: bool = False  # whether an embedding looks it up, alone or beside a layer that it is tied to

    def __post_init__(self) -> None:
        self.dtype, self.device = self.parameter.dtype, self.parameter.device  # as they were when it was found

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, whole."""
        return tuple(self.parameter.shape)

    @property
    def numel(self) -> int:
        """Entries of the weight, whole."""
        return self.parameter.numel()

    @property
    def local(self) -> Tensor:
        """What this process holds of the weight: all of it, or its shard; in the parameter's memory, no gradient."""
        return local(self.parameter).detach()

    @property
    def local_grad(self) -> Tensor | None:
        """The gradient of that."""
        grad = self.parameter.grad
        if grad is None or not is_dtensor(self.parameter):
            return grad
        if (placed := same_placement(self.parameter, grad)) is not grad:
            self.parameter.grad = grad = placed
        return local(grad)

    @cached_property
    def dense_stride(self) -> tuple[int, ...] | None:
        """The strides of the local tensor, if its entries fill its memory without gaps, in any order; else None."""
        expected, here = 1, self.local
        for stride, n in sorted(zip(here.stride(), here.shape, strict=True)):
            if n > 1:
                if stride != expected:
                    return None
                expected *= n
        return here.stride()

    def flatten(self, x: Tensor) -> Tensor:
        """A tensor of the local shape, flat in the order of the weight's memory: a view where it lies so itself."""
        if self.dense_stride is None:
            return x.reshape(-1)
        sides = zip(x.shape, x.stride(), self.dense_stride, strict=True)
        here = x if all(n < 2 or mine == its for n, mine, its in sides) else self.laid_out(x)
        return here.as_strided((here.numel(),), (1,), here.storage_offset())

    def unflatten(self, flat: Tensor) -> Tensor:
        """What `flatten` undoes: a view in the local shape."""
        shape = self.local.shape
        rows = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return flat.as_strided(shape, self.dense_stride or rows, flat.storage_offset())

    def laid_out(self, x: Tensor) -> Tensor:
        """The same tensor with its memory in the order of the weight's."""
        here = self.local
        return torch.empty_strided(here.shape, here.stride(), dtype=x.dtype, device=x.device).copy_(x)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module) and _only_wraps(model):
            model = inner
        else:
            return model


def _only_wraps(model: nn.Module) -> bool:
    """Whether a module holds nothing but the one that torch.compile was given."""
    return list(model._modules) == ["_orig_mod"] and not model._parameters and not model._buffers


def clean_name(name: str) -> str:
    """A parameter's name without the layer that torch.compile puts around modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def as_globs(argument: str, globs: Globs) -> tuple[str, ...]:
    """A tuple of globs; one string is one glob."""
    if globs is None:
        return ()
    found = (globs,) if isinstance(globs, str) else tuple(globs)
    for glob in found:
        if not isinstance(glob, str):
            raise ValueError(f"{argument} holds {glob!r}; globs over parameter names, such as 'layer1.*', are needed")
    return found


def matches(target: Target, glob: str) -> bool:
    """Whether any name of the target fits the glob."""
    return any(fnmatchcase(name, glob) for name in target.names)


def first_match(table: Mapping[str, float], target: Target) -> float | None:
    """The number under the first glob that fits the target."""
    return next((float(value) for glob, value in table.items() if matches(target, glob)), None)


def some_names(targets: Sequence[Target], most: int = 8) -> str:
    """Some target names for an error message."""
    return ", ".join(t.name for t in targets[:most]) + (", …" if len(targets) > most else "")


def find_targets(
    model: nn.Module, include: Globs = None, exclude: Globs = None, *, frozen_too: bool = False
) -> list[Target]:
    """The targets of a model in the order of its parameters, tied weights once.

    Args:
        model: the model, possibly wrapped in DDP or torch.compile.
        include: globs over parameter names; None means the weights of every layer that `layers.axes_of` recognises,
            but for those that an embedding shares.
        exclude: globs of those to leave dense.
        frozen_too: take what cannot be trained where nothing can, as in a model that is ready for use.
    """
    asked = wanted(model, include, exclude)
    found = [t for t in asked if t.parameter.requires_grad]
    found = asked if frozen_too and not found else found
    for target in found:
        _check(target)
    found = [t for t in found if t.numel]
    if not found:
        raise ValueError(
            f"no layer to sparsify: include={include!r}, exclude={exclude!r} leave no trainable weight of "
            f"{type(unwrap(model)).__name__}; by default these are the weights of {DEFAULT}"
        )
    return found


def wanted(model: nn.Module, include: Globs = None, exclude: Globs = None) -> list[Target]:
    """What would be targets if all of it could be trained; the arguments are those of `find_targets`."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}, not a torch.nn.Module")
    everything = all_parameters(model)
    included, excluded = as_globs("include", include), as_globs("exclude", exclude)
    for argument, globs in (("include", included), ("exclude", excluded)):
        for glob in globs:
            if not any(matches(target, glob) for target in everything):
                names = ", ".join(target.name for target in everything[:8])
                raise ValueError(f"{argument}={glob!r} matches no parameter of the model, which has {names}, …")
    found = [t for t in everything if (_asked_for(t, included) if include is not None else _by_default(t))]
    return [t for t in found if not any(matches(t, glob) for glob in excluded)]


def all_parameters(model: nn.Module) -> list[Target]:
    """Every parameter of a model once, with all its names."""
    model = unwrap(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, Target] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        prefix, _, attribute = name.rpartition(".")
        owner = modules[prefix]
        axes = axes_of(owner, prefix.rpartition(".")[2], attribute, parameter)
        if id(parameter) not in found:
            found[id(parameter)] = Target((), parameter, owner, attribute, is_weight=False)
        target = found[id(parameter)]
        target.names += (clean_name(name),)
        target.embeds |= is_embedding(owner)
        # A weight shared by a Linear and an Embedding has the axes of the Linear's.
        if axes is not None and not target.is_weight:
            target.owner, target.attribute, target.axes, target.is_weight = owner, attribute, axes, True
    return list(found.values())


def _by_default(target: Target) -> bool:
    """Whether an unnamed parameter is a target; one that another tool rewrites counts, so that it is refused."""
    if "parametrizations" in target.name.split("."):
        return target.parameter.ndim >= 2
    return target.is_weight and not target.embeds


def _asked_for(target: Target, globs: tuple[str, ...]) -> bool:
    for glob in globs:
        if matches(target, glob):
            if target.parameter.ndim >= 2:
                if not target.is_weight:
                    target.axes = axes_if_named(target.owner, target.parameter)
                return True
            if not any(c in glob for c in "*?["):
                raise ValueError(f"include={glob!r} has {target.parameter.ndim} dimension(s); a target needs 2 or more")
    return False


def _check(target: Target) -> None:
    """Refuse what cannot be trained this way, with the remedy."""
    name, parameter = target.name, target.parameter
    if "parametrizations" in name.split(".") or parametrize.is_parametrized(target.owner, target.attribute):
        raise ValueError(
            f"{name} is parametrized already; remove the parametrization "
            "(torch.nn.utils.parametrize.remove_parametrizations) or exclude it"
        )
    bare = bare_name(target.attribute)
    if bare != target.attribute and hasattr(target.owner, bare) and bare not in target.owner._parameters:
        raise ValueError(f"{name} is rewritten by a hook (nn.utils.prune or weight_norm); remove that or exclude it")
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{name} has no shape yet; run one forward pass through the lazy layers first")
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device; give the model its weights first (model.to_empty and load)")
    if not parameter.is_floating_point() or parameter.layout is not torch.strided:
        raise ValueError(f"{name} is a {parameter.layout} tensor of {parameter.dtype}; dense floating-point is needed")


def current(target: Target) -> Tensor:
    """What the model holds under the target's name now."""
    found = target.owner._parameters.get(target.attribute)  # a module's own getattr takes ten times as long
    return getattr(target.owner, target.attribute) if found is None else found
