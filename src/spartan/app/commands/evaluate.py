"""`spartan evaluate` measures a trained model on its test images."""

from __future__ import annotations

from typing import Annotated

import typer

from spartan.app.commands.options import Sets, Target
from spartan.app.train import loop
from spartan.app.trained import count_nonzero, load_trained


def evaluate(
    target: Target,
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="For a FILE: the recipe that says which model and data.")
    ] = None,
    sets: Sets = None,
) -> None:
    """Measure a trained model on its test images.

    \b
    spartan evaluate runs/imp
    spartan evaluate runs/imp --set data.path=elsewhere/cifar10.npz --set device=cpu
    spartan evaluate model.safetensors --recipe cifar10-wrn22
    """
    config, weights, summary = load_trained(target, recipe, sets or ())
    scores = loop.evaluate(config, weights)
    nonzero, total, which = count_nonzero(weights, summary)
    typer.echo(f"top-1     {scores['top1']:.2%}")
    typer.echo(f"top-5     {scores['top5']:.2%}")
    typer.echo(f"loss      {scores['test_loss']:.4f}")
    typer.echo(f"sparsity  {1 - nonzero / max(1, total):.2%}")
    typer.echo(f"nonzero   {nonzero:,} of {total:,} {which}")
