"""`spartan recipes` and `spartan methods` list what a run can be made of."""

from __future__ import annotations

import spartan
from spartan.app.runs import data_name
from spartan.app.terminal import print_table
from spartan.app.train.config import load_recipe, recipe_names


def recipes() -> None:
    """List the built-in recipes.

    `spartan train NAME --show` prints one in full.
    """
    configs = {name: load_recipe(name) for name in recipe_names()}
    rows = [[n, c.model, data_name(c), f"{c.sparsity:g}", c.description] for n, c in configs.items()]
    print_table(["name", "model", "data", "sparsity", "description"], rows)


def methods() -> None:
    """List the sparse training methods.

    Any of them is a value for `--set method=…`. θ are the dense weights, w the sparse ones that the model holds, g the
    gradient for w.
    """
    header = ["name", "year", "mask", "gradient for θ", "needs", "sparse from", "reference"]
    facts = ("name", "year", "mask_rule", "gradient_rule", "needs", "sparse_from", "reference")
    print_table(header, [[str(getattr(entry, fact)) for fact in facts] for entry in spartan.methods()])
