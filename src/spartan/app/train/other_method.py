"""Drops what belonged to a recipe's own method when `--set` changes the method."""

from collections.abc import Mapping
from typing import Any

from spartan.wording import shortened

# Left out of a recipe, each of these is the method's own; what suits one method does not suit another.
OWN = ("method_args", "budget", "warmup", "finetune")


def drop_old_methods_settings(recipe: dict[str, Any], asked: Mapping[str, Any], default: str) -> str:
    """Take them out of `recipe` if another method is asked for; returns a line about those that are gone.

    Args:
        recipe: as its file has it.
        asked: what `--set` puts on top, in the same form. What it replaces anyway is not worth a word.
        default: the method of recipes that name none.

    Example:
        >>> recipe = {"method_args": {"beta": [1, 20]}, "warmup": 0.2, "finetune": 0.2}
        >>> drop_old_methods_settings(recipe, {"method": "rigl", "warmup": 0.1}, "spartan")
        'method rigl in place of spartan, without its method_args {beta: [1, 20]}, finetune 0.2'
        >>> recipe
        {}
    """
    before = recipe.get("method", default)
    if asked.get("method", before) == before:
        return ""
    words = []
    for key in OWN:
        if key == "budget" and isinstance(recipe.get(key), Mapping):
            continue  # a table is about layers, whatever trains them
        value, given = recipe.pop(key, None), asked.get(key)
        if isinstance(value, Mapping) and isinstance(given, Mapping):
            value = {k: v for k, v in value.items() if k not in given}
        elif key in asked:
            continue
        if value not in (None, {}):
            words.append(f"{key} {shortened(_in_one_line(value))}")
    return f"method {asked['method']} in place of {before}, without its {', '.join(words)}" if words else ""


def _in_one_line(value: Any) -> str:
    """As a recipe has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_in_one_line(inner)}" for key, inner in value.items()) + "}"
    return str(value)
