"""The `spartan` command: puts the commands together, and tells their errors in one line."""

import errno
import os
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup

    from spartan.app.commands import models, paper, runs, setup
except ModuleNotFoundError as _missing:  # the library works without them
    raise SystemExit(f"the command line needs {_missing.name}: pip install 'spartan-sparsity[app]'") from None

from spartan import __version__
from spartan.app.extras import how_to_get
from spartan.app.interrupted import Interrupted
from spartan.wording import one_line, raised_in


class _ErrorsInOneLine(TyperGroup):
    """A mistake of the user's is one line and exit code 2, what went wrong on the way one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Interrupted as stop:
            if os.environ.get("RANK", "0") == "0":
                typer.echo(stop.message, err=True)
            raise
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            # An error of torch's does not say enough by itself; typer's own are no errors, nor is a closed pipe.
            unclear = isinstance(error, RuntimeError) and not raised_in(error).startswith("spartan.")
            no_error = isinstance(error, (typer.Exit, typer.Abort)) or getattr(error, "errno", None) == errno.EPIPE
            if unclear or no_error or os.environ.get("SPARTAN_TRACEBACK"):
                raise
            missing = how_to_get((error.name or "").partition(".")[0]) if isinstance(error, ModuleNotFoundError) else ""
            typer.echo(f"error: {one_line(error)}{': ' if missing else ''}{missing}", err=True)
            raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


# Plain help, the same on a terminal, in a pipe and in a log.
app = typer.Typer(
    cls=_ErrorsInOneLine,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="SPARTAN_TRACEBACK=1 shows where an error comes from.",
)


def main() -> None:
    """Entry point of `spartan` and `python -m spartan`."""
    app(prog_name="spartan")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spartan {__version__}")
        raise typer.Exit


@app.callback()
def _spartan(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models to an exact sparsity budget, compare methods, look at the result.

    \b
    A first run, well under a minute on a CPU, no download:
      spartan train
    Three methods, two sparsities, three seeds, and the table:
      spartan sweep digits --set method=spartan,topkast,imp --set sparsity=.95,.98 --seeds 3
    What is gained, on disk and in time:
      spartan export runs/digits-spartan-0.95-seed0
      spartan bench runs/digits-spartan-0.95-seed0
    What there is:
      spartan recipes
      spartan methods
      spartan paper list
    What is installed here, and what would run:
      spartan doctor
    """


for _command in (*runs.COMMANDS, *models.COMMANDS, *paper.COMMANDS, *setup.COMMANDS):
    app.command()(_command)
