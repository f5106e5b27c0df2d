"""`spartan report` writes a page about a run or several."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from spartan.app.report.page import write_report


def report(
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a folder of runs.")],
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the report of a run or a folder of runs.

    One self-contained HTML page; its path is printed.
    """
    page = write_report(target)
    typer.echo(str(page))
    if open_it:
        webbrowser.open(page.resolve().as_uri())


def try_report(folder: Path) -> Path | None:
    """The report, whose failure must not make a finished run look like a failed one."""
    try:
        return write_report(folder)
    except Exception as error:
        typer.echo(f"warning: no report was written ({type(error).__name__}: {error})", err=True)
        return None
