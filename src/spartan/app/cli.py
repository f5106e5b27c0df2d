"""The command line: `spartan train`, `evaluate`, `compare`, `sweep`, `report`, `export`, `bench` and so on."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as _missing:  # the library works without it
    raise SystemExit(f"the command line needs {_missing.name}: pip install 'spartan-sparsity[app]'") from None

from spartan.app.commands.deploy import bench, export, inspect
from spartan.wording import one_line

if TYPE_CHECKING:
    from spartan.app.train.config import Config
    from spartan.app.train.processes import Processes

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key of the recipe; dots reach into sections."),
]


class _Friendly(TyperGroup):
    """A mistake of the user's is one line and exit code 2, what went wrong on the way one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        from spartan.app.train.signals import Interrupted

        try:
            return super().invoke(ctx)
        except Interrupted as stop:
            if os.environ.get("RANK", "0") == "0":
                typer.echo(stop.message, err=True)
            raise
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            if not _is_clear(error) or os.environ.get("SPARTAN_TRACEBACK"):
                raise
            typer.echo(f"error: {one_line(error)}", err=True)
            raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _is_clear(error: Exception) -> bool:
    """Whether the error says enough by itself; of RuntimeErrors, only those that this library raises do."""
    if isinstance(error, (typer.Exit, typer.Abort)) or getattr(error, "errno", None) == errno.EPIPE:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("spartan.")
    return ours or not isinstance(error, RuntimeError)


# Plain help, the same on a terminal, in a pipe and in a log.
app = typer.Typer(
    cls=_Friendly,
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
        from spartan import __version__

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
    """


@app.command()
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
    from spartan.app.train.config import RecipeError, load_recipe, to_yaml
    from spartan.app.train.folder import check_resume_settings, choose_folder
    from spartan.app.train.processes import joined, restarted

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

    from spartan.app.train import loop

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
    from spartan.app.runs import read_run, result_line
    from spartan.app.train import loop

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
    from spartan.app.runs import result_line

    page = _try_report(folder)
    typer.echo(f"{folder}: {result_line(summary)}" + (f"; report: {page}" if page else ""))


def _try_report(folder: Path) -> Path | None:
    """The report, whose failure must not make a finished run look like a failed one."""
    from spartan.app.report.page import write_report

    try:
        return write_report(folder)
    except Exception as error:
        typer.echo(f"warning: no report was written ({type(error).__name__}: {error})", err=True)
        return None


@app.command()
def recipes() -> None:
    """List the built-in recipes.

    `spartan train NAME --show` prints one in full.
    """
    from spartan.app.report.compare import print_table
    from spartan.app.runs import data_name
    from spartan.app.train.config import load_recipe, recipe_names

    configs = {name: load_recipe(name) for name in recipe_names()}
    rows = [[n, c.model, data_name(c), f"{c.sparsity:g}", c.description] for n, c in configs.items()]
    print_table(["name", "model", "data", "sparsity", "description"], rows)


@app.command()
def methods() -> None:
    """List the sparse training methods.

    Any of them is a value for `--set method=…`. θ are the dense weights, w the sparse ones that the model holds, g the
    gradient for w.
    """
    import spartan
    from spartan.app.report.compare import print_table

    header = ["name", "year", "mask", "gradient for θ", "needs", "sparse from", "reference"]
    facts = ("name", "year", "mask_rule", "gradient_rule", "needs", "sparse_from", "reference")
    print_table(header, [[str(getattr(entry, fact)) for fact in facts] for entry in spartan.methods()])


@app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A finished run folder, or a .safetensors file.")],
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
    from spartan.app.train import loop
    from spartan.app.trained import count_nonzero, load_trained

    config, weights, summary = load_trained(target, recipe, sets or ())
    scores = loop.evaluate(config, weights)
    nonzero, total, which = count_nonzero(weights, summary)
    typer.echo(f"top-1     {scores['top1']:.2%}")
    typer.echo(f"top-5     {scores['top5']:.2%}")
    typer.echo(f"loss      {scores['test_loss']:.4f}")
    typer.echo(f"sparsity  {1 - nonzero / max(1, total):.2%}")
    typer.echo(f"nonzero   {nonzero:,} of {total:,} {which}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that contain runs.")],
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="One line a run, unrounded.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="The table as Markdown.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Accuracy against sparsity.")] = None,
) -> None:
    """Compare runs, with means over seeds.

    Runs that differ in their seed only make one line: last-epoch top-1 as mean ± sample standard deviation, and every
    seed's own. Unfinished runs are named and not averaged.

    \b
    spartan compare runs
    spartan compare runs/sweep --markdown table.md --csv runs.csv --plot curve.png
    """
    from spartan.app.report import compare as tables
    from spartan.app.runs import find_runs

    found = find_runs(runs)
    rows = tables.rows_of(found)
    for path in (csv, markdown, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
    if (csv or markdown or plot) and not rows:
        raise ValueError(f"none of the {len(found)} runs is finished; there is nothing to write")
    if csv is not None:
        csv.write_text(tables.to_csv(rows), "utf-8")
    if markdown is not None:
        markdown.write_text(tables.to_markdown(rows), "utf-8")
    if plot is not None:
        tables.plot(rows, plot)
    tables.print_comparison(found)


@app.command()
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
    from spartan.app.report.compare import is_plain, print_comparison
    from spartan.app.runs import find_runs
    from spartan.app.train.sweep import Sweep, Telling, plan

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError("sweep: it starts processes of its own; start it once, without torchrun")
    folder = out or Path("runs") / f"{Path(recipe).stem}-sweep"
    planned = plan(recipe, sets or [], seeds, folder)
    sweeper = Sweep(recipe, folder, min(jobs, len(planned)))
    with Telling(planned, is_plain()) as telling:
        telling.line(f"{len(planned)} runs, {sweeper.at_once} at once -> {folder}")
        outcomes = sweeper.run(planned, telling)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if folder.is_dir() and any(o.state in ("finished", "skipped") for o in outcomes):
        print_comparison(find_runs([folder]))
        if page := _try_report(folder):
            typer.echo(f"report: {page}")
    for outcome in failed:
        typer.echo(f"failed: {outcome.job.folder} ({' '.join(outcome.job.sets)}): {outcome.reason}", err=True)
    if sweeper.stopped():
        typer.echo("stopped; the same command goes on where it stopped", err=True)
        raise typer.Exit(130)
    if failed:
        typer.echo(f"{len(failed)} of {len(planned)} runs failed; the same command tries them again", err=True)
        raise typer.Exit(1)


@app.command()
def report(
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a folder of runs.")],
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the report of a run or a folder of runs.

    One self-contained HTML page; its path is printed.
    """
    from spartan.app.report.page import write_report

    page = write_report(target)
    typer.echo(str(page))
    if open_it:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


for _command in (export, inspect, bench):
    app.command()(_command)
