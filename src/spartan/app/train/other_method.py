"""Says what of a recipe goes when `--set` changes its method: the settings that were the old method's own."""

from collections.abc import Mapping
from typing import Any

from spartan.wording import shortened

# Left out of a recipe, each of them is the method's own. Another method's arguments, phases or budget would not be.
OWN = ("method_args", "budget", "warmup", "finetune")


def dropped_settings(recipe: Mapping[str, Any], asked: Mapping[str, Any], default: str) -> dict[str, Any]:
    """The settings of `recipe` that do not go with the method that is asked for; none if that is the recipe's.

    Args:
        recipe: as its file has it.
        asked: what `--set` puts on top, in the same form. What is asked for is not dropped.
        default: the method of recipes that name none.

    Example:
        >>> recipe = {"method_args": {"beta": [1, 20]}, "warmup": 0.2, "finetune": 0.2}
        >>> dropped_settings(recipe, {"method": "rigl", "warmup": 0.1}, "spartan")
        {'method_args': {'beta': [1, 20]}, 'finetune': 0.2}
        >>> dropped_settings(recipe, {"method": "spartan"}, "spartan")
        {}
    """
    if asked.get("method", before := recipe.get("method", default)) == before:
        return {}
    own = {key: recipe[key] for key in OWN if recipe.get(key) not in (None, {})}
    if isinstance(own.get("budget"), Mapping):
        del own["budget"]  # a table is about layers, whatever trains them
    return {key: value for key, value in own.items() if key not in asked or key == "method_args"}


def describe_dropped(recipe: Mapping[str, Any], asked: Mapping[str, Any], default: str) -> str:
    """One line about what is dropped; empty where nothing is that `asked` does not replace."""
    dropped = dropped_settings(recipe, asked, default)
    given, own = asked.get("method_args"), dropped.get("method_args")
    if isinstance(given, Mapping) and isinstance(own, Mapping):
        dropped["method_args"] = {key: value for key, value in own.items() if key not in given}
    words = [f"{key} {shortened(_flow(value))}" for key, value in dropped.items() if value != {}]
    if not words:
        return ""
    return f"method {asked['method']} in place of {recipe.get('method', default)}, without its {', '.join(words)}"


def _flow(value: Any) -> str:
    """As a recipe has it in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return str(value)
