"""The commands, and the arguments and options that several of them share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Target = Annotated[Path, Argument(metavar="RUN|FILE", help="A finished run folder, or a .safetensors file.")]
RecipeOfFile = Annotated[
    str | None,
    Option(metavar="RECIPE", help="For a FILE: the recipe with its data, and its model if the file names none."),
]
Sets = Annotated[
    list[str] | None,
    Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of the recipe; dots reach into sections."),
]
SetsOfFile = Annotated[list[str] | None, Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of the recipe.")]
