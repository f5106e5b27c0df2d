"""`spartan sweep` runs a grid of settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from spartan.app.commands.report import try_report
from spartan.app.report.compare import print_comparison
from spartan.app.runs import find_runs
from spartan.app.terminal import is_plain
from spartan.app.train.sweep import Sweep, SweepDisplay, plan


def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A built-in recipe or a .yaml file.")],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="KEY=A,B,…", help="Values to try; one in brackets or braces counts as one."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Seeds 0 to N-1 of each.  [default: 1]")] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="How many runs at once.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the runs go.  [default: runs/<recipe>-sweep]")
    ] = None,
) -> None:
    """Run a grid of settings and compare them.

    At the end come the table of `spartan compare` and a report for the whole folder. The same command again does what is
    missing: finished runs are skipped, unfinished ones continued, failed ones tried again. A failing run does not stop
    the others; it is named at the end, and the exit code is 1.

    \b
    spartan sweep digits --set method=spartan,topkast,imp --set sparsity=.9,.95,.98 --seeds 3
    spartan sweep cifar10-wrn22 --set 'method_args={beta: [1, 5]},{beta: [1, 10]}' --seeds 3 --jobs 4
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError("sweep: it starts processes of its own; start it once, without torchrun")
    folder = out or Path("runs") / f"{Path(recipe).stem}-sweep"
    planned = plan(recipe, sets or [], seeds, folder)
    sweeper = Sweep(recipe, folder, min(jobs, len(planned)))
    with SweepDisplay(planned, is_plain()) as display:
        display.line(f"{len(planned)} runs, {sweeper.at_once} at once -> {folder}")
        outcomes = sweeper.run(planned, display)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if folder.is_dir() and any(o.state in ("finished", "skipped") for o in outcomes):
        print_comparison(find_runs([folder]))
        if page := try_report(folder):
            typer.echo(f"report: {page}")
    for outcome in failed:
        typer.echo(f"failed: {outcome.job.folder} ({' '.join(outcome.job.sets)}): {outcome.reason}", err=True)
    if sweeper.stopped():
        typer.echo("stopped; the same command goes on where it stopped", err=True)
        raise typer.Exit(130)
    if failed:
        typer.echo(f"{len(failed)} of {len(planned)} runs failed; the same command tries them again", err=True)
        raise typer.Exit(1)
