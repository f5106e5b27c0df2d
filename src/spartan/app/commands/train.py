"""`spartan train` trains by a recipe, or continues a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from spartan.app.commands.options import Sets
from spartan.app.commands.report import try_report
from spartan.app.runs import read_run, result_line
from spartan.app.train import loop
from spartan.app.train.config import Config, RecipeError, load_recipe, to_yaml
from spartan.app.train.folder import check_resume_settings, choose_folder
from spartan.app.train.processes import Processes, joined, restarted


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A built-in recipe or a .yaml file.  [default: digits]")
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run folder.  [default: runs/<recipe>-<method>-<sparsity>-seed<seed>]"),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the run in this folder, exactly where it stopped.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved recipe as YAML and exit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Train a model by a recipe, or continue a run.

    \b
    spartan train                                        the digits recipe
    spartan train cifar10-wrn22 --set sparsity=.98 --set seed=1
    spartan train digits --set method=imp --set optimizer.lr=0.05 --out runs/imp
    spartan train digits --set 'method_args={beta: [1, 20]}'
    spartan train resnet50-imagenet --show > mine.yaml   every key, to edit; then: spartan train mine.yaml
    spartan train --resume runs/imp                      after Ctrl-C, a kill or a power cut
    spartan train --resume runs/imp --set device=cpu     … elsewhere: keys that change nothing of the result
    torchrun --nproc-per-node=8 -m spartan train resnet50-imagenet --out runs/r50   the same run on eight GPUs

    The folder gets the resolved recipe, versions, metrics.jsonl, TensorBoard events, checkpoints, model.safetensors,
    summary.json and report.html. Every mistake in a recipe is found before the folder is made.
    """
    if resume is not None:
        given = [n for n, v in {"RECIPE": recipe, "--out": out, "--show": show}.items() if v]
        if given:
            raise RecipeError(f"--resume continues a run as it was started; it cannot be combined with {given[0]}")
        check_resume_settings(sets or [])
    name = recipe or "digits"
    asked = load_recipe(name, sets or ()) if resume is None else None
    if show and asked is not None:
        typer.echo(to_yaml(asked), nl=False)
        return

    with joined() as us:
        again = any(us.gather(restarted()))

        def plan() -> tuple[Config | None, Path, bool]:
            if resume is not None or asked is None:
                return None, resume or Path(), True
            return asked, *choose_folder(name, asked, out, again)

        # The first process's word counts for all: on another machine the folder may not have been there, or is by now.
        config, folder, unfinished = us.decide(plan)
        if unfinished or config is None:
            _resume(folder, sets or [] if resume is not None else [], quiet, us)
            return
        if us.first and not quiet:
            on = "" if us.alone else f" on {us.world} processes"
            about = f"{config.method} at sparsity {config.sparsity:g}, {config.epochs} epochs"
            typer.echo(f"{name}: {about}{on} -> {folder}")
        summary = loop.train(config, folder, quiet=quiet, command=["spartan", *sys.argv[1:]])
        if us.first:
            _finish(folder, summary)


def _resume(folder: Path, sets: list[str], quiet: bool, us: Processes) -> None:
    run = us.decide(lambda: read_run(folder))
    if run.summary is not None:
        if us.first:
            typer.echo(f"{folder} is finished: {result_line(run.summary)}")
        return
    if us.first and not quiet:
        typer.echo(f"continuing {folder}" + ("" if us.alone else f" on {us.world} processes"))
    summary = loop.resume(folder, sets, quiet=quiet)
    if us.first:
        _finish(folder, summary)


def _finish(folder: Path, summary: dict[str, Any]) -> None:
    """The report and one line with the result."""
    page = try_report(folder)
    typer.echo(f"{folder}: {result_line(summary)}" + (f"; report: {page}" if page else ""))
