"""`spartan inspect` describes a packed file, and says which kernels run it."""

from __future__ import annotations

from typing import Annotated

import typer

import spartan
from spartan.app.commands.options import RecipeOfFile, Target
from spartan.app.terminal import print_table, status_line
from spartan.app.trained import find_trained
from spartan.files.inspect import inspect as describe
from spartan.inference.cpu.library import status


def inspect(
    target: Target,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="And which kernel runs each layer on this machine, and why.")
    ] = False,
    recipe: RecipeOfFile = None,
) -> None:
    """Show what is in a packed file.

    For every tensor: its shape and type, the code it is stored in, what is kept, its bytes, and how far these are from the
    information bound (kept · bits + n · H(density)). The checksum is checked. With --kernels each layer's kernels are timed
    for one image, unless they were before.

    \b
    spartan inspect model.safetensors
    spartan inspect runs/imp --kernels
    """
    path = target / "model.safetensors" if target.is_dir() else target
    if not path.is_file():
        raise ValueError(
            f"{target}: there is no " + ("finished run in this folder" if target.is_dir() else "such file")
        )
    text = describe(path)
    typer.echo(text)
    if not kernels:
        return
    trained = find_trained(target, recipe)
    with status_line("timing kernels (the first time ever: compiling them)"):
        fast = spartan.accelerate(trained.model, example_inputs=trained.noise(1))
    typer.echo(f"\nkernels       {status()}")
    print_table(["layer", "kernel", "why"], [[line.layer, line.kernel, line.why] for line in spartan.explain(fast)])
