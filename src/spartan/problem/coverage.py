"""Counts which weights are no targets, and says why, so that nobody takes a small part of a model for all of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from spartan.problem.targets import Globs, Target, all_parameters, as_globs, matches, unwrap, wanted

BY_NAME = "left out by name"


@dataclass(frozen=True)
class Coverage:
    """The weights of two or more dimensions of a model: those of targets, and the others by why they are none."""

    targets: int
    left_out: dict[str, int]
    frozen: tuple[Target, ...]  # what would be targets if they could be trained

    @property
    def share(self) -> float:
        """Of these weights, the fraction that are no targets."""
        rest = sum(self.left_out.values())
        return rest / (self.targets + rest)

    def __str__(self) -> str:
        whole = self.targets + sum(self.left_out.values())
        parts = sorted(self.left_out.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{why} {n / whole:.1%}" for why, n in parts)
        return f"{self.share:.1%} of the weights of two or more dimensions ({reasons})"


def coverage_of(model: nn.Module, targets: Sequence[Target], include: Globs = None, exclude: Globs = None) -> Coverage:
    """What a model's targets leave out; the globs are those that they were found with."""
    mine = {id(t.parameter) for t in targets}
    meant = [t for t in wanted(model, include, exclude) if id(t.parameter) not in mine]
    excluded = as_globs("exclude", exclude)
    adapted = _has_adapters(model)
    left_out: dict[str, int] = {}
    for other in all_parameters(model):
        n = other.parameter.numel() if other.parameter.ndim >= 2 else 0
        if n and id(other.parameter) not in mine:
            named = any(matches(other, glob) for glob in excluded)
            why = _why(other, named, include is not None, adapted)
            left_out[why] = left_out.get(why, 0) + n
    return Coverage(sum(t.numel for t in targets), left_out, tuple(t for t in meant if not t.parameter.requires_grad))


def _why(other: Target, excluded: bool, by_name_only: bool, adapted: bool) -> str:
    """Why a weight is no target."""
    if excluded:
        return BY_NAME
    if not other.parameter.requires_grad:
        return "PEFT base weights" if adapted else "frozen"
    if by_name_only:
        return BY_NAME
    return "embedding" if other.embeds or "embed" in other.attribute else "other"


def ask_about_adapters(model: nn.Module, include: Globs) -> None:
    """Ask what is to be sparse in a model with PEFT's adapters: they, or the weights that they stand beside."""
    layers = [name for name, module in unwrap(model).named_modules() if "base_layer" in dict(module.named_children())]
    if include is None and layers:
        raise ValueError(
            f"model: PEFT has put adapters beside the weights of {len(layers)} layers ({layers[0]}, …), and what is to be "
            "sparse has to be said: include='*lora_*' for the adapters (or by their names), include='*base_layer.weight' "
            "for the weights beside them, after requires_grad_(True), which PEFT has taken from them. A base that is sparse "
            "already keeps its zeros by itself: train the adapters without a sparsifier, merge them, and call "
            "spartan.remask(merged, like=base)"
        )


def _has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters beside the weights of a model, which are frozen then."""
    inner = unwrap(model)
    return hasattr(inner, "peft_config") or any(hasattr(module, "base_layer") for module in inner.modules())
