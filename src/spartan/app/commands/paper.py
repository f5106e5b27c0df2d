"""The command about the paper: `paper`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

# What runs a command is imported by it, so that help needs neither torch nor the extras.
if TYPE_CHECKING:
    from spartan.app.paper.exhibit import Exhibit
    from spartan.app.paper.results import Results

_FILES = Path(__file__).parents[1].joinpath("paper", "exhibits").glob("[a-z]*.py")
_SHOW_SECONDS = 15.0  # that tables and figures of all exhibits take, after the runs
NAMES = ", ".join(sorted(path.stem.replace("_", "-") for path in _FILES))  # an exhibit's file has its name


def paper(
    exhibit: Annotated[str, Argument(metavar="list|all|page|EXHIBIT", help=f"What to make. Exhibits: {NAMES}.")],
    scale: Annotated[
        str, Option(metavar="tiny|small|full", help="digits on a CPU, CIFAR on one GPU, or the paper's ImageNet-1K.")
    ] = "small",
    out: Annotated[Path, Option(metavar="DIR", help="Where tables, figures, runs and their results go.")] = Path(
        "paper"
    ),
    rerun: Annotated[bool, Option("--rerun", help="Train what has no stored result.")] = False,
    jobs: Annotated[int, Option(metavar="N", min=1, help="With --rerun: how many runs at once.")] = 1,
    seconds: Annotated[
        float | None,
        Option(metavar="N", min=1, help="With --rerun: end within N seconds; begin no run that would not end by then."),
    ] = None,
    data: Annotated[
        Path | None,
        Option(metavar="DIR", help="With --rerun: the data, as cifar10.npz, torchvision's files or imagenet/."),
    ] = None,
    keep: Annotated[
        bool,
        Option(
            "--keep", help="Put the results in DIR into the package, for those who keep them under version control."
        ),
    ] = False,
) -> None:
    """Make the paper's tables and figures again.

    Each comes from this code: computed where no training is needed, else from stored results, of which --rerun trains
    those that are missing. Tables are written as Markdown and CSV, figures as PNG and SVG, each for light pages and for
    dark ones. One line says how it compares with the published one.

    A result is stored when its run ends, so that a call that is stopped or killed loses none. The same call again trains
    what is missing, and goes on with runs that were cut off where DIR still has them.

    \b
    spartan paper list
    spartan paper flops                                    8.24 G, 35.19 G, 12.76% and 5.76%, with the arithmetic
    spartan paper accuracy                                 from the results that are stored
    spartan paper exploration --scale tiny --rerun         trains on digits, in a minute or two on a CPU
    spartan paper all --scale small --rerun --jobs 6 --data data     on one GPU; again after a stop: it goes on
    spartan paper all --scale small --rerun --jobs 6 --seconds 590   as much of it as 590 s allow; again: the rest
    spartan paper page --out docs/reproduction.md          the page with everything, ours beside theirs
    """
    began = time.monotonic()
    from spartan.app.paper.exhibit import check_scale, exhibits, find, wanted
    from spartan.app.paper.page import write_page
    from spartan.app.paper.results import Results
    from spartan.app.terminal import print_table

    size = check_scale(scale)
    training = {"--jobs": jobs > 1, "--seconds": seconds is not None, "--data": data is not None}
    for option, given in training.items():
        if given and not rerun:
            raise ValueError(f"{option} is about training; it goes with --rerun")
    if exhibit == "list":
        print_table(["name", "kind", "in the paper", "what"], [[e.name, e.kind, e.where, e.title] for e in exhibits()])
        return
    if exhibit == "page":
        if rerun or keep:
            raise ValueError("page shows what the package has; for more: spartan paper all --rerun --keep")
        written = write_page(out if out.suffix == ".md" else out / "reproduction.md", Results(size))
        typer.echo(f"page     {written}")
        return
    chosen = list(exhibits()) if exhibit == "all" else [find(exhibit)]
    results = Results(size, out)
    end = None if seconds is None else began + seconds
    code = _train(chosen, results, out, jobs, data, end) if rerun else 0
    if keep:
        kept = results.keep(wanted(chosen, size))
        typer.echo(f"kept: {kept} result{'s' * (kept != 1)} of {results.own}, in the package")
    for one in chosen:
        _show(one, results, out)
    for name in results.stale():
        typer.echo(f"left aside: the result of {name} is of another recipe than today's", err=True)
    if code:
        raise typer.Exit(code)


def _train(
    chosen: "Sequence[Exhibit]", results: "Results", out: Path, jobs: int, data: Path | None, end: float | None
) -> int:
    """Train what is missing; the exit code."""
    from spartan.app.paper.exhibit import wanted
    from spartan.app.paper.experiments import alone
    from spartan.app.paper.training import train_missing
    from spartan.app.train.sweep import out_of_time
    from spartan.app.train.time_limit import TimeLimit

    runs = wanted(chosen, results.scale)
    measured = [one for one in chosen if one.makes]
    for one in measured:
        typer.echo(f"{one.name}: measured, not trained; this makes its results anew: {one.makes}")
    limit = None if end is None else TimeLimit(end - _SHOW_SECONDS, lambda job: alone(job.recipe, job.config))
    outcomes, stopped = train_missing(runs, results, out, jobs, data, limit)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    for outcome in failed:
        typer.echo(f"failed: {outcome.job.folder} ({' '.join(outcome.job.sets)}): {outcome.reason}", err=True)
    if stopped:
        typer.echo("stopped; the same command goes on where it stopped", err=True)
        return 130
    if told := out_of_time(outcomes):
        typer.echo(told)
    if not outcomes and not measured:
        typer.echo("nothing to train: every run has its result" if runs else "nothing to train: no run is needed")
    return 1 if failed else 0


def _show(exhibit: "Exhibit", results: "Results", out: Path) -> None:
    from spartan.app.paper.exhibit import make, missing_line
    from spartan.app.terminal import print_table

    made = make(exhibit, results, out)
    scale = "" if exhibit.kind == "exact" else f", scale {results.scale}" if exhibit.kind == "trained" else ", measured"
    typer.echo(f"\n{exhibit.name}: {exhibit.title} ({exhibit.where}{scale})")
    for table in made.shown.tables:
        typer.echo(f"\n{table.caption}")
        sys.stdout.flush()
        print_table(table.header, table.cells)
    typer.echo("")
    for claim in made.shown.claims:
        typer.echo(f"{claim.verdict}: {claim.text}; here: {claim.figures}")
    for note in made.shown.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"compared: {made.shown.line}")
    if missing := missing_line(exhibit, made, results.scale):
        typer.echo(f"missing: {missing}")
    typer.echo(f"files: {', '.join(path.name for path in made.files)} in {out}")


COMMANDS = (paper,)
